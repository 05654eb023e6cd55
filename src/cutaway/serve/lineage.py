"""Where each point comes from, where it goes, and its formula: read off the spec, for whatever model it is."""

from functools import lru_cache

from cutaway.points import Point, dot_inputs, layer_names, points_of
from cutaway.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormSpec
from cutaway.trace.capture.plan import head_input

_ACTIVATIONS = {
    "silu": r"\mathrm{SiLU}",
    "gelu": r"\mathrm{GELU}",
    "gelu_tanh": r"\mathrm{GELU}",
    "relu": r"\mathrm{ReLU}",
}


def inputs_of(point: Point, spec: ModelSpec) -> list[Point]:
    """The points that the value at `point` is computed from, in the order in which the formula names them."""
    i = point.layer
    if i is None:
        return _outside(point.name, spec)
    layer = spec.layers[i]
    names = layer_names(spec, i)
    if point.name == "resid_pre":
        return [Point("resid_post", i - 1) if i > 0 else Point("embed.out")]
    return [Point(name, i) for name in _inside(point.name, layer, names)]


@lru_cache(maxsize=8)
def _consumers(spec: ModelSpec) -> dict[Point, list[Point]]:
    found: dict[Point, list[Point]] = {}
    for point in points_of(spec):
        for source in inputs_of(point, spec):
            found.setdefault(source, []).append(point)
    return found


def consumers_of(point: Point, spec: ModelSpec) -> list[Point]:
    """The points that are computed from the value at `point`."""
    return _consumers(spec).get(point, [])


def weights_of(point: Point, spec: ModelSpec) -> list[str]:
    """The names of the stored weights that the value at `point` is computed with."""
    prefix = "" if point.layer is None else f"layers.{point.layer}."
    names = {
        "embed.tokens": ["embed.tokens"],
        "attn.raw": ["attn.o.weight"],
        "attn.head_out": ["attn.o.weight"],
        "mlp.raw": ["mlp.down.weight"],
        "mlp.gate": ["mlp.gate.weight"],
        "mlp.up": ["mlp.up.weight"],
        "attn.q_latent": ["attn.q_down.weight", "attn.q_latent_norm.gain"],
        "attn.kv_latent": ["attn.kv_down.weight", "attn.kv_latent_norm.gain"],
        "attn.k_shared": ["attn.k_shared.weight"],
        "attn.q": ["attn.q.weight"],
        "attn.k": ["attn.k.weight"],
        "attn.v": ["attn.v.weight"],
        "attn.norm": ["attn.norm.gain"],
        "mlp.norm": ["mlp.norm.gain"],
        "final.norm": ["final.norm.gain"],
        "moe.router_logits": ["moe.router.weight"],
        "logits": ["embed.tokens" if spec.tied_head else "head.weight"],
    }
    if point.layer is not None and point.name == "mlp.raw" and not _dense(spec.layers[point.layer]):
        return []
    return [prefix + name for name in names.get(point.name, [])]


def _dense(layer: LayerSpec) -> bool:
    return isinstance(layer.feed_forward, FeedForwardSpec)


def _outside(name: str, spec: ModelSpec) -> list[Point]:
    there = {point.name for point in points_of(spec) if point.layer is None}
    last = Point("resid_post", spec.n_layers - 1)
    parts = [Point(part) for part in ("embed.tokens", "embed.types", "embed.positions") if part in there]
    match name:
        case "embed.tokens":
            return [Point("tokens")]
        case "embed.norm":
            return parts
        case "embed.out":
            return [Point("embed.norm")] if "embed.norm" in there else parts
        case "final.norm":
            return [last]
        case "pooler.out" | "logits":
            return [head_input(spec)]
    return []


def _inside(name: str, layer: LayerSpec, names: list[str]) -> list[str]:
    attention = layer.attention
    q, k = dot_inputs(attention)
    reads = "attn.norm" if "attn.norm" in names else "resid_pre"
    middle = "resid_pre" if layer.parallel else "resid_mid"
    fed = "mlp.norm" if "mlp.norm" in names else reads if layer.shared_norm else middle
    latent = attention.latent is not None
    rotated = "attn.q_rot" in names
    normed_first = not attention.norm_after_rotary
    table = {
        "attn.norm": ["resid_pre"],
        "attn.q_latent": [reads],
        "attn.kv_latent": [reads],
        "attn.k_shared": [reads],
        "attn.q": ["attn.q_latent" if "attn.q_latent" in names else reads],
        "attn.k": ["attn.kv_latent", "attn.k_shared"] if latent else [reads],
        "attn.v": ["attn.kv_latent"] if latent else [reads],
        "attn.q_normed": ["attn.q" if normed_first or not rotated else "attn.q_rot"],
        "attn.k_normed": ["attn.k" if normed_first or not rotated else "attn.k_rot"],
        "attn.q_rot": ["attn.q_normed" if "attn.q_normed" in names and normed_first else "attn.q"],
        "attn.k_rot": ["attn.k_normed" if "attn.k_normed" in names and normed_first else "attn.k"],
        "attn.dots": [q, k],
        "attn.scores": ["attn.dots"],
        "attn.masked": ["attn.scores"],
        "attn.pattern": ["attn.masked"],
        "attn.z": ["attn.pattern", "attn.v"],
        "attn.head_out": ["attn.z"],
        "attn.raw": ["attn.z"],
        "attn.out": ["attn.raw"],
        "attn.sum": ["resid_pre", "attn.out"],
        "resid_mid": ["attn.sum"] if "attn.sum" in names else ["resid_pre", "attn.out"],
        "mlp.norm": [middle],
        "mlp.gate": [fed],
        "mlp.up": [fed],
        "mlp.act": ["mlp.gate", "mlp.up"] if "mlp.gate" in names else ["mlp.up"],
        "moe.router_logits": [fed],
        "moe.scores": ["moe.router_logits"],
        "moe.chosen": ["moe.scores"],
        "moe.gates": ["moe.scores", "moe.chosen"],
        "moe.expert_out": [fed, "moe.chosen"],
        "moe.shared_out": [fed],
        "mlp.raw": ["mlp.act"]
        if _dense(layer)
        else ["moe.gates", "moe.expert_out", *(["moe.shared_out"] if "moe.shared_out" in names else [])],
        "mlp.out": ["mlp.raw"],
        "mlp.sum": ["resid_mid", "mlp.out"],
        "resid_post": ["mlp.sum"]
        if "mlp.sum" in names
        else ["resid_pre", "attn.out", "mlp.out"]
        if layer.parallel
        else ["resid_mid", "mlp.out"],
    }
    return table[name]


def formula_of(point: Point, spec: ModelSpec) -> str:
    """The formula of `point` in LaTeX, in the lecture's symbols (T tokens, d width, x W)."""
    if point.layer is None:
        return _formula_outside(point.name, spec)
    layer = spec.layers[point.layer]
    return _formula_inside(point.name, layer, layer_names(spec, point.layer))


def _formula_outside(name: str, spec: ModelSpec) -> str:
    scale = rf"{spec.embed_scale:.4g}\," if spec.embed_scale != 1.0 else ""
    added = "".join(
        [
            " + X_{type}" if spec.token_types is not None else "",
            " + X_{pos}" if spec.positions is not None else "",
        ]
    )
    positions = r"X_{pos}[t] = E_{pos}[t]"
    if spec.positions is not None and spec.positions.kind == "sinusoidal":
        positions = r"X_{pos}[t, 2i] = \sin(t / 10000^{2i/d}),\quad X_{pos}[t, 2i{+}1] = \cos(t / 10000^{2i/d})"
    logits = r"\ell = \hat H\, W_U" + (r" + b" if spec.head_bias else "")
    if spec.tied_head:
        logits += r",\quad W_U = E^\top"
    return {
        "tokens": r"\mathrm{ids} = \mathrm{tokenize}(\mathrm{text})",
        "embed.tokens": r"X_{tok}[t] = E[\mathrm{id}_t]",
        "embed.types": r"X_{type}[t] = E_{type}[\mathrm{kind}_t]",
        "embed.positions": positions,
        "embed.norm": _norm(spec.embed_norm, "x"),
        "embed.out": rf"H_0 = {scale}X_{{tok}}{added}",
        "final.norm": _norm(spec.final_norm, r"h"),
        "pooler.out": r"\tanh(h_0\, W + b)",
        "logits": logits,
    }[name]


def _formula_inside(name: str, layer: LayerSpec, names: list[str]) -> str:
    a = layer.attention
    x = r"\hat X" if "attn.norm" in names else "X"
    y = r"\hat Y" if "mlp.norm" in names else x if layer.shared_norm else "Y"
    bias = " + b" if a.qkv_bias else ""
    fed = layer.feed_forward
    dense_bias = " + b" if isinstance(fed, FeedForwardSpec) and fed.bias else ""
    activation = fed.activation if isinstance(fed, FeedForwardSpec) else fed.expert.activation
    phi = _ACTIVATIONS[activation]
    post = layer.placement == "post" and layer.norm is not None
    qk = (r"c_Q\, W_Q", r"[\,c_{KV} W_K ;\, k_{shared}\,]", r"c_{KV}\, W_V")
    if a.latent is None:
        qk = (rf"{x} W_Q{bias}", rf"{x} W_K{bias}", rf"{x} W_V{bias}")
    elif a.latent.q_rank is None:
        qk = (rf"{x} W_Q", *qk[1:])
    table = {
        "resid_pre": r"X = \text{what the layer before leaves}",
        "attn.norm": _norm(layer.norm, "x"),
        "attn.q_latent": rf"c_Q = \mathrm{{norm}}({x} W_{{DQ}})",
        "attn.kv_latent": rf"c_{{KV}} = \mathrm{{norm}}({x} W_{{DKV}})",
        "attn.k_shared": rf"k_{{shared}} = {x} W_{{KR}}",
        "attn.q": f"Q = {qk[0]}",
        "attn.k": f"K = {qk[1]}",
        "attn.v": f"V = {qk[2]}",
        "attn.q_normed": _norm(a.qk_norm, "q"),
        "attn.k_normed": _norm(a.qk_norm, "k"),
        "attn.q_rot": _rotation("q"),
        "attn.k_rot": _rotation("k"),
        "attn.dots": r"(Q K^\top)_{ts} = q_t \cdot k_s",
        "attn.scores": _scores(a),
        "attn.masked": _mask(a),
        "attn.pattern": r"A_{ts} = \frac{e^{S_{ts}}}{\sum_{s'} e^{S_{ts'}}}",
        "attn.z": r"Z_t = \sum_s A_{ts}\, v_s",
        "attn.head_out": r"Z^{(h)} W_O^{(h)}",
        "attn.raw": r"[Z^{(1)};\dots;Z^{(H)}]\, W_O" + (" + b" if a.out_bias else ""),
        "attn.out": r"\mathrm{norm}(\mathrm{raw})"
        if layer.out_norm is not None
        else r"\text{attn.out} = \text{attn.raw}",
        "attn.sum": r"X + \text{attn.out}",
        "resid_mid": r"Y = \mathrm{norm}(X + \text{attn.out})" if post else r"Y = X + \text{attn.out}",
        "mlp.norm": _norm(layer.norm, "x" if layer.parallel else "y"),
        "mlp.gate": rf"G = {y} W_{{gate}}{dense_bias}",
        "mlp.up": rf"U = {y} W_{{up}}{dense_bias}",
        "mlp.act": rf"{phi}(G) \odot U" if "mlp.gate" in names else rf"{phi}(U)",
        "moe.router_logits": rf"{y} W_{{router}}",
        "moe.scores": r"\mathrm{softmax}(r_t)",
        "moe.chosen": r"\mathrm{top}_k(\text{scores}_t)",
        "moe.gates": r"g_{te}\ \text{of the chosen}",
        "moe.expert_out": r"f_e(y_t)",
        "moe.shared_out": r"f_{shared}(y_t)",
        "mlp.raw": (
            rf"a\, W_{{down}}{dense_bias}" if isinstance(fed, FeedForwardSpec) else r"\sum_e g_{te}\, f_e(y_t)"
        ),
        "mlp.out": r"\mathrm{norm}(\mathrm{raw})" if layer.out_norm is not None else r"\text{mlp.out} = \text{mlp.raw}",
        "mlp.sum": r"Y + \text{mlp.out}",
        "resid_post": r"X + \text{attn.out} + \text{mlp.out}"
        if layer.parallel
        else r"\mathrm{norm}(Y + \text{mlp.out})"
        if post
        else r"Y + \text{mlp.out}",
    }
    if isinstance(fed, ExpertsSpec) and fed.router.scores == "sigmoid":
        table["moe.scores"] = r"\sigma(r_t)"
    return table[name]


def _norm(norm: NormSpec | None, x: str) -> str:
    if norm is None:
        return x
    gain, bias = (r" \odot g" if norm.gain else ""), (" + b" if norm.bias else "")
    if norm.kind == "layer":
        return rf"\frac{{{x} - \mu}}{{\sqrt{{\sigma^2 + \epsilon}}}}{gain}{bias}"
    return rf"\frac{{{x}}}{{\sqrt{{\frac1d \sum_j {x}_j^2 + \epsilon}}}}{gain}{bias}"


def _rotation(x: str) -> str:
    return (
        rf"\begin{{pmatrix}} {x}'_i \\ {x}'_j \end{{pmatrix}} = "
        rf"\begin{{pmatrix}} \cos t\theta_i & -\sin t\theta_i \\ \sin t\theta_i & \cos t\theta_i \end{{pmatrix}}"
        rf"\begin{{pmatrix}} {x}_i \\ {x}_j \end{{pmatrix}}"
    )


def _scores(a: AttentionSpec) -> str:
    plain = r"\frac{q_t \cdot k_s}{\sqrt{d_{head}}}" if a.scale is None else rf"{a.scale:.4g}\; q_t \cdot k_s"
    return plain if a.cap is None else rf"{a.cap:g} \tanh\!\left({plain} / {a.cap:g}\right)"


def _mask(a: AttentionSpec) -> str:
    if not a.causal:
        return r"S_{ts}\quad \text{(nothing is hidden)}"
    reach = "" if a.window is None else rf",\ s > t - {a.window}"
    return rf"S_{{ts}} + M_{{ts}},\quad M_{{ts}} = 0 \text{{ for }} s \le t{reach},\ \text{{else }} -\infty"
