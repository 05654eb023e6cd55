"""Which points a model has, by its spec, and of what shape they are."""

from cutaway.points.table import GLOBAL_FIRST, GLOBAL_LAST, IN_LAYER, OF_CHOICE, Point
from cutaway.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, ModelSpec


def layer_names(spec: ModelSpec, layer: int) -> list[str]:
    """The points that layer `layer` of this spec has, in the order of the pass."""
    what = spec.layers[layer]
    attention, latent = what.attention, what.attention.latent
    experts = isinstance(what.feed_forward, ExpertsSpec)
    before = what.norm is not None and what.placement == "pre"
    after = what.norm is not None and what.placement == "post"
    present = {
        "attn.norm": before,
        "attn.q_latent": latent is not None and latent.q_rank is not None,
        "attn.kv_latent": latent is not None,
        "attn.k_shared": latent is not None,
        "attn.q_normed": attention.qk_norm is not None,
        "attn.k_normed": attention.qk_norm is not None,
        "attn.q_rot": attention.rotary is not None,
        "attn.k_rot": attention.rotary is not None,
        "attn.sum": after,
        "resid_mid": not what.parallel,
        "mlp.norm": before and not what.shared_norm,
        "mlp.gate": isinstance(what.feed_forward, FeedForwardSpec) and what.feed_forward.gated,
        "mlp.up": not experts,
        "mlp.act": not experts,
        "moe.shared_out": isinstance(what.feed_forward, ExpertsSpec) and what.feed_forward.shared is not None,
        "mlp.sum": after,
    }
    names = [name for name in IN_LAYER if present.get(name, experts or not name.startswith("moe."))]
    if attention.norm_after_rotary:  # the two pairs stand in the other order
        turned = [name for name in names if name.endswith("_rot")]
        at = names.index("attn.q_normed") if "attn.q_normed" in names else 0
        names = [name for name in names if name not in turned]
        names[at:at] = turned
    return names


def dot_inputs(attention: AttentionSpec) -> tuple[str, str]:
    """The points at which queries and keys stand as they enter the dot product."""
    if attention.qk_norm is not None and (attention.norm_after_rotary or attention.rotary is None):
        return "attn.q_normed", "attn.k_normed"
    return ("attn.q_rot", "attn.k_rot") if attention.rotary is not None else ("attn.q", "attn.k")


def shape_symbols(point: Point, spec: ModelSpec) -> tuple[str, ...]:
    """The shape of a point in symbols, in this model: where values have a width of their own it says so."""
    shape = point.info.shape
    if point.name not in ("attn.v", "attn.z") or point.layer is None:
        return shape
    attention = spec.layers[point.layer].attention
    return shape if attention.value_width == attention.d_head else (*shape[:-1], "d_value")


def shape_of(point: Point, spec: ModelSpec, tokens: int) -> tuple[int, ...]:
    """The shape of a point in numbers, in a pass over `tokens` tokens with nothing cached."""
    layer = spec.layers[point.layer or 0]
    attention, latent, experts = layer.attention, layer.attention.latent, layer.feed_forward
    sizes: dict[str, int | None] = {
        "1": 1,
        "3": 3,
        "T": tokens,
        "S": tokens,
        "d": spec.d_model,
        "V": spec.vocab_size,
        "H": attention.n_heads,
        "H_kv": attention.n_kv_heads,
        "d_head": attention.d_head,
        "d_value": attention.value_width,
        "d_ff": experts.d_ff if isinstance(experts, FeedForwardSpec) else None,
        "E": experts.n_experts if isinstance(experts, ExpertsSpec) else None,
        "k": experts.router.n_active if isinstance(experts, ExpertsSpec) else None,
        "q_rank": latent.q_rank if latent is not None else None,
        "kv_rank": latent.kv_rank if latent is not None else None,
        "d_rope": latent.d_rope if latent is not None else None,
    }
    shape = [sizes[symbol] for symbol in shape_symbols(point, spec)]
    return tuple(size for size in shape if size is not None)


def points_of(spec: ModelSpec) -> list[Point]:
    """Every point that a pass of this spec has, in its order."""
    absent = {
        "embed.positions": spec.positions is None,
        "embed.types": spec.token_types is None,
        "embed.norm": spec.embed_norm is None,
        "final.norm": spec.final_norm is None,
        "pooler.out": not spec.pooler,
        "logits": spec.headless,
    }
    first = [Point(name) for name in GLOBAL_FIRST if not absent.get(name, False)]
    inside = [Point(name, i) for i in range(spec.n_layers) for name in layer_names(spec, i)]
    return first + inside + [Point(name) for name in GLOBAL_LAST if not absent.get(name, False)]


def choice_points(spec: ModelSpec) -> list[Point]:
    """The points of the choice of a token, in the order of its stages; none where no token can follow."""
    return [] if spec.headless or not spec.causal else [Point(name) for name in OF_CHOICE]


def all_points(spec: ModelSpec) -> list[Point]:
    """Those of a pass, then those of the choice that it leads to."""
    return points_of(spec) + choice_points(spec)
