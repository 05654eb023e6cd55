"""Where files keep the matrices of experts: one by one, one under another, or gate and up fused as well."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.families.names import Source
from cutaway.checkpoints.stored import Tensors
from cutaway.engines.weights import Weight
from cutaway.spec import ExpertsSpec, ModelSpec, RouterSpec

# Where one part ("gate", "up", "down") of one expert of one layer comes from.
ExpertSource = Callable[[int, int, str], Source]

GGUF_STACKED, GGUF_SEPARATE = "blk.{layer}.ffn_{part}_exps.weight", "blk.{layer}.ffn_{part}.{expert}.weight"
_SOFTMAX = 1  # GGUF's number for it


def expert_sources(spec: ModelSpec, find: ExpertSource) -> dict[str, Source]:
    """Our names → theirs, for every expert of every layer that has some."""
    names = {}
    for layer, what in enumerate(spec.layers):
        if not isinstance(what.feed_forward, ExpertsSpec):
            continue
        for number in range(what.feed_forward.n_experts):
            for part in ("gate", "up", "down") if what.feed_forward.expert.gated else ("up", "down"):
                names[f"layers.{layer}.moe.experts.{number}.{part}.weight"] = find(layer, number, part)
    return names


def hugging_face_experts(tensors: Tensors, separate: str, parts: Mapping[str, str], fused: str) -> ExpertSource:
    """Experts in whichever way a layer of this checkpoint keeps them.

    `separate` names their matrices, with {layer}, {expert} and {part} as in `parts`. Where there is a
    `gate_up_proj` behind `fused` (with {layer}), they are as `transformers` computes with since its version 5: it
    holds gate above up, `[E, 2 d_ff, d]`, and `down_proj` beside it `[E, d, d_ff]`.
    """

    def source(layer: int, number: int, part: str) -> Source:
        block = fused.format(layer=layer)
        if f"{block}.gate_up_proj" not in tensors:
            return Source(separate.format(layer=layer, expert=number, part=parts[part]))
        if part == "down":
            return Source(f"{block}.down_proj", lambda stack: stack.expert(number))
        return Source(f"{block}.gate_up_proj", lambda stack: _half(stack.expert(number), second=part == "up"))

    return source


def with_experts(
    spec: ModelSpec, n_experts: int, router: RouterSpec, d_ff: int | None = None, dense: Collection[int] = ()
) -> ModelSpec:
    """The spec with experts of the shape of each layer's feed-forward in its place, but for the `dense` layers.

    `d_ff` is their width, where it is another.
    """
    layers = []
    for i, layer in enumerate(spec.layers):
        one = layer.feed_forward
        if i in dense or isinstance(one, ExpertsSpec):
            layers.append(layer)
        else:
            experts = ExpertsSpec(n_experts, replace(one, d_ff=d_ff or one.d_ff), router)
            layers.append(replace(layer, feed_forward=experts))
    return replace(spec, layers=tuple(layers))


def with_gguf_experts(config: Config, spec: ModelSpec) -> ModelSpec:
    """The spec with the experts that a GGUF file states, chosen by a softmax whose best are made to sum to 1."""
    config.only("expert_gating_func", _SOFTMAX, why="no router but the softmax belongs to this architecture")
    config.only("expert_weights_norm", True)
    config.only("expert_weights_scale", 0.0, 1.0)
    config.only("expert_shared_count", 0)
    router = RouterSpec(config.size("expert_used_count"))
    return with_experts(spec, config.size("expert_count"), router, config.optional_size("expert_feed_forward_length"))


def gguf_experts(tensors: Tensors) -> ExpertSource:
    """Experts of a GGUF file: stacked, or, in the files of Mixtral's first months, one by one."""

    def source(layer: int, number: int, part: str) -> Source:
        stacked = GGUF_STACKED.format(layer=layer, part=part)
        if stacked in tensors:
            return Source(stacked, lambda stack: stack.expert(number))
        single = GGUF_SEPARATE.format(layer=layer, part=part, expert=number)
        return Source(single if single in tensors else stacked)

    return source


def _half(both: Weight, second: bool) -> Weight:
    """The first or the second half of a matrix's rows."""
    middle = both.shape[0] // 2
    return both.row_slice(middle, both.shape[0]) if second else both.row_slice(0, middle)
