"""Which layers see only the last so many tokens."""

from collections.abc import Sequence
from dataclasses import replace

from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.stored import quoted
from cutaway.errors import CutawayError
from cutaway.spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(config: Config, n_layers: int, known: Sequence[str] = (FULL, SLIDING)) -> list[str] | None:
    """The kind of each layer's attention, where the configuration lists them."""
    types = config.optional("layer_types", list)
    if types is None:
        return None
    if len(types) != n_layers:
        raise CutawayError(f"'layer_types' in {config.where} names {len(types)} layers; the model has {n_layers}.")
    for kind in types:
        if kind not in known:
            raise CutawayError(f"'layer_types' in {config.where} holds {quoted(kind)}; known are {', '.join(known)}.")
    return types


def with_windows(spec: ModelSpec, windows: Sequence[int | None]) -> ModelSpec:
    """The spec with a window, or none, for each layer."""
    layers = tuple(
        replace(layer, attention=replace(layer.attention, window=window))
        for layer, window in zip(spec.layers, windows, strict=True)
    )
    return replace(spec, layers=layers)
