"""The same intermediates under the names of other tools: TransformerLens, Hugging Face's modules, llama.cpp.

A foreign name stands for ours where what it names has the same axes (but for a batch of one in front). Where the axes
are others, or what is meant differs, it is refused with our name and the difference: a right shape with a wrong
meaning helps nobody.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from cutaway.errors import UnknownPoint
from cutaway.points.present import layer_names
from cutaway.points.table import POINTS
from cutaway.spec import ExpertsSpec, FeedForwardSpec, ModelSpec


@dataclass(frozen=True)
class ForeignName:
    """One name of another tool, `{i}` in the place of the layer; `theirs` are its axes where they are not ours.

    `note` says what else differs; then the name is refused too.
    """

    tool: str
    name: str
    ours: str
    theirs: tuple[str, ...] | None = None
    note: str | None = None

    @property
    def accepted(self) -> bool:
        return self.theirs is None and self.note is None

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        layer = r"(?P<layer>\d+|\*)"
        return re.compile(re.escape(self.name).replace(re.escape("{i}"), layer))


LENS, HUGGING_FACE, LLAMA_CPP = "TransformerLens", "Hugging Face", "llama.cpp"
_BY_TOKEN, _FLAT = ("T", "H", "d_head"), ("T", "H · d_head")
_BEFORE_GAIN = "there before the gain (and shift) of the norm, here after it"

FOREIGN: tuple[ForeignName, ...] = (
    ForeignName(LENS, "hook_embed", "embed.tokens"),
    ForeignName(LENS, "hook_pos_embed", "embed.positions"),
    ForeignName(LENS, "hook_tokens", "tokens"),
    ForeignName(LENS, "blocks.{i}.hook_resid_pre", "resid_pre"),
    ForeignName(LENS, "blocks.{i}.ln1.hook_normalized", "attn.norm", note=_BEFORE_GAIN),
    ForeignName(LENS, "blocks.{i}.attn.hook_q", "attn.q", _BY_TOKEN),
    ForeignName(LENS, "blocks.{i}.attn.hook_k", "attn.k", ("T", "H_kv", "d_head")),
    ForeignName(LENS, "blocks.{i}.attn.hook_v", "attn.v", ("T", "H_kv", "d_head")),
    ForeignName(LENS, "blocks.{i}.attn.hook_rot_q", "attn.q_rot", _BY_TOKEN),
    ForeignName(LENS, "blocks.{i}.attn.hook_rot_k", "attn.k_rot", ("T", "H_kv", "d_head")),
    ForeignName(LENS, "blocks.{i}.attn.hook_attn_scores", "attn.masked"),
    ForeignName(LENS, "blocks.{i}.attn.hook_pattern", "attn.pattern"),
    ForeignName(LENS, "blocks.{i}.attn.hook_z", "attn.z", _BY_TOKEN),
    ForeignName(LENS, "blocks.{i}.attn.hook_result", "attn.head_out", ("T", "H", "d")),
    ForeignName(LENS, "blocks.{i}.hook_attn_out", "attn.out"),
    ForeignName(LENS, "blocks.{i}.hook_resid_mid", "resid_mid"),
    ForeignName(LENS, "blocks.{i}.ln2.hook_normalized", "mlp.norm", note=_BEFORE_GAIN),
    ForeignName(LENS, "blocks.{i}.mlp.hook_pre", "mlp.gate or mlp.up"),
    ForeignName(LENS, "blocks.{i}.mlp.hook_pre_linear", "mlp.up"),
    ForeignName(LENS, "blocks.{i}.mlp.hook_post", "mlp.act"),
    ForeignName(LENS, "blocks.{i}.hook_mlp_out", "mlp.out"),
    ForeignName(LENS, "blocks.{i}.hook_resid_post", "resid_post"),
    ForeignName(LENS, "ln_final.hook_normalized", "final.norm", note=_BEFORE_GAIN),
    ForeignName(HUGGING_FACE, "model.embed_tokens", "embed.tokens"),
    ForeignName(HUGGING_FACE, "transformer.wte", "embed.tokens"),
    ForeignName(HUGGING_FACE, "transformer.wpe", "embed.positions"),
    ForeignName(HUGGING_FACE, "model.layers.{i}.input_layernorm", "attn.norm"),
    ForeignName(HUGGING_FACE, "model.layers.{i}.self_attn.q_proj", "attn.q", _FLAT),
    ForeignName(HUGGING_FACE, "model.layers.{i}.self_attn.k_proj", "attn.k", ("T", "H_kv · d_head")),
    ForeignName(HUGGING_FACE, "model.layers.{i}.self_attn.v_proj", "attn.v", ("T", "H_kv · d_head")),
    ForeignName(HUGGING_FACE, "model.layers.{i}.self_attn.o_proj", "attn.raw"),
    ForeignName(HUGGING_FACE, "model.layers.{i}.self_attn", "attn.raw"),
    ForeignName(HUGGING_FACE, "model.layers.{i}.post_attention_layernorm", "mlp.norm or attn.out"),
    ForeignName(HUGGING_FACE, "model.layers.{i}.mlp.gate_proj", "mlp.gate"),
    ForeignName(HUGGING_FACE, "model.layers.{i}.mlp.up_proj", "mlp.up"),
    ForeignName(HUGGING_FACE, "model.layers.{i}.mlp.down_proj", "mlp.raw"),
    ForeignName(HUGGING_FACE, "model.layers.{i}.mlp", "mlp.raw"),
    ForeignName(HUGGING_FACE, "model.layers.{i}", "resid_post"),
    ForeignName(HUGGING_FACE, "model.norm", "final.norm"),
    ForeignName(HUGGING_FACE, "transformer.h.{i}.ln_1", "attn.norm"),
    ForeignName(HUGGING_FACE, "transformer.h.{i}.attn", "attn.raw"),
    ForeignName(HUGGING_FACE, "transformer.h.{i}.attn.c_attn", "attn.q, attn.k and attn.v", ("T", "3 · d")),
    ForeignName(HUGGING_FACE, "transformer.h.{i}.attn.c_proj", "attn.raw"),
    ForeignName(HUGGING_FACE, "transformer.h.{i}.ln_2", "mlp.norm"),
    ForeignName(HUGGING_FACE, "transformer.h.{i}.mlp.c_fc", "mlp.up"),
    ForeignName(HUGGING_FACE, "transformer.h.{i}.mlp.act", "mlp.act"),
    ForeignName(HUGGING_FACE, "transformer.h.{i}.mlp.c_proj", "mlp.raw"),
    ForeignName(HUGGING_FACE, "transformer.h.{i}.mlp", "mlp.raw"),
    ForeignName(HUGGING_FACE, "transformer.h.{i}", "resid_post"),
    ForeignName(HUGGING_FACE, "transformer.ln_f", "final.norm"),
    ForeignName(HUGGING_FACE, "lm_head", "logits"),
    ForeignName(HUGGING_FACE, "hidden_states[{i}]", "resid_pre"),
    ForeignName(HUGGING_FACE, "attentions[{i}]", "attn.pattern"),
    ForeignName(LLAMA_CPP, "inp_embd", "embed.tokens"),
    ForeignName(LLAMA_CPP, "attn_norm-{i}", "attn.norm"),
    ForeignName(LLAMA_CPP, "Qcur-{i}", "attn.q", note="there the name is given before and after the rotation"),
    ForeignName(LLAMA_CPP, "Kcur-{i}", "attn.k", note="there the name is given before and after the rotation"),
    ForeignName(LLAMA_CPP, "Vcur-{i}", "attn.v", ("T", "H_kv", "d_head")),
    ForeignName(LLAMA_CPP, "kq-{i}", "attn.dots"),
    ForeignName(LLAMA_CPP, "kq_soft_max-{i}", "attn.pattern"),
    ForeignName(LLAMA_CPP, "kqv-{i}", "attn.z"),
    ForeignName(LLAMA_CPP, "kqv_out-{i}", "attn.raw", note="there before W_O, or after it, by version"),
    ForeignName(LLAMA_CPP, "ffn_inp-{i}", "resid_mid"),
    ForeignName(LLAMA_CPP, "ffn_norm-{i}", "mlp.norm"),
    ForeignName(LLAMA_CPP, "ffn_gate-{i}", "mlp.gate"),
    ForeignName(LLAMA_CPP, "ffn_up-{i}", "mlp.up"),
    ForeignName(LLAMA_CPP, "ffn_gate_par-{i}", "mlp.act"),
    ForeignName(LLAMA_CPP, "ffn_swiglu-{i}", "mlp.act"),
    ForeignName(LLAMA_CPP, "ffn_out-{i}", "mlp.raw"),
    ForeignName(LLAMA_CPP, "ffn_moe_logits-{i}", "moe.router_logits"),
    ForeignName(LLAMA_CPP, "ffn_moe_probs-{i}", "moe.scores"),
    ForeignName(LLAMA_CPP, "ffn_moe_topk-{i}", "moe.chosen"),
    ForeignName(LLAMA_CPP, "l_out-{i}", "resid_post"),
    ForeignName(LLAMA_CPP, "result_norm", "final.norm"),
    ForeignName(LLAMA_CPP, "result_output", "logits"),
)


def our_pattern(pattern: str, spec: ModelSpec) -> str:
    """Our address or pattern for that of another tool; any other text as it is.

    Raises UnknownPoint, with our name, for one whose axes or meaning are not ours.
    """
    for foreign in FOREIGN:
        found = foreign.pattern.fullmatch(pattern)
        if found is None:
            continue
        layer = found.groupdict().get("layer")
        ours = _ours(foreign.ours, spec, layer)
        if layer is not None and "{i}" in foreign.name:
            if foreign.name.startswith("hidden_states") and layer.isdecimal() and int(layer) == spec.n_layers:
                ours, layer = _last_hidden(spec)  # the tuple has one more entry than the model has layers
            ours = ours if layer is None else " and ".join(f"layers.{layer}.{name}" for name in ours.split(" and "))
        if foreign.accepted:
            return ours
        raise UnknownPoint(f"{pattern!r} is {foreign.tool}'s name of {ours}, {_difference(foreign)}; ask for {ours}.")
    return pattern


def _difference(foreign: ForeignName) -> str:
    if foreign.note is not None:
        return foreign.note
    shape = POINTS[foreign.ours].shape if foreign.ours in POINTS else ()
    here = f" and here [{', '.join(shape)}]" if shape else ", which are three points here"
    return f"which is [{', '.join(foreign.theirs or ())}] there{here}"


def _ours(ours: str, spec: ModelSpec, layer: str | None) -> str:
    """The one point of a name that means different ones in different architectures."""
    index = int(layer) if layer is not None and layer.isdecimal() and int(layer) < spec.n_layers else 0
    what = spec.layers[index]
    if ours == "mlp.gate or mlp.up":
        gated = isinstance(what.feed_forward, FeedForwardSpec) and what.feed_forward.gated
        return "mlp.gate" if gated or isinstance(what.feed_forward, ExpertsSpec) else "mlp.up"
    if ours == "mlp.norm or attn.out":
        return "attn.out" if what.out_norm is not None or "mlp.norm" not in layer_names(spec, index) else "mlp.norm"
    return ours.replace(", ", " and ")


def _last_hidden(spec: ModelSpec) -> tuple[str, str | None]:
    """What stands last in the tuple of hidden states: the final norm, or the last stream of a model without one."""
    return ("final.norm", None) if spec.final_norm is not None else ("resid_post", str(spec.n_layers - 1))
