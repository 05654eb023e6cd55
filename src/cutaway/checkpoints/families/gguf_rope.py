"""Rotary positions as GGUF files write them down, read as llama.cpp reads them."""

from typing import Literal

import numpy as np

from cutaway.checkpoints.families.config import Config, decimal
from cutaway.checkpoints.stored import Tensors, quoted
from cutaway.errors import CutawayError
from cutaway.spec import FactorScaling, LinearScaling, RotaryScaling, RotarySpec, YarnScaling

KINDS = ("none", "linear", "yarn", "longrope")
FACTORS = "rope_freqs.weight"  # one for each pair of coordinates: how Llama 3.1's scaling is stored
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
IGNORED = (r"rope_(freqs|factors_short|factors_long)\.weight",)  # no weights: they are in the spec


def gguf_rotary(
    config: Config, tensors: Tensors, dims: int, *, pairing: Literal["halves", "adjacent"] = "halves"
) -> RotarySpec:
    """The rotary positions that the metadata and tensors of a GGUF file describe.

    `dims` coordinates of each head turn. A file with factors for short and for long texts (Phi-3) takes the long
    ones for sequences past the original context, as the model's own code does; llama.cpp looks at the size of
    its cache instead. Raises CutawayError for a kind of scaling that is not known.
    """
    base = _number(config, "rope.freq_base", 10_000.0)
    return RotarySpec(base, dims, pairing, _scaling(config, tensors, dims))


def _scaling(config: Config, tensors: Tensors, dims: int) -> RotaryScaling | None:
    kind = config.get("rope.scaling.type", str, "linear")  # what a file that names no kind means
    if kind not in KINDS:
        raise CutawayError(
            f"'rope.scaling.type' is {quoted(kind)} in {config.where}; those that can be computed are "
            f"{', '.join(KINDS)}."
        )
    original = config.optional_size("rope.scaling.original_context_length") or config.size("context_length")
    older = _number(config, "rope.scale_linear", 0.0)  # the name of early files
    factor = _number(config, "rope.scaling.factor", older) or 1.0  # 0 stands for none
    if kind == "none":
        factor = 1.0
    magnitude = _number(config, "rope.scaling.attn_factor", 1.0)
    short, long = _factors(tensors, dims)
    if kind == "yarn":
        if short is not None:
            raise CutawayError(f"{config.where} ask for YaRN, and the file has factors for each pair too: which is it?")
        return _yarn(config, factor, original, magnitude)
    if kind == "longrope" and short is None:
        raise CutawayError(f"{config.where} ask for the kind 'longrope', but the file has no {SHORT}.")
    if short is None or long is None:
        if magnitude == 1.0:
            return None if factor == 1.0 else LinearScaling(factor)
        short = long = np.ones(dims // 2)
    return FactorScaling(tuple(map(float, short * factor)), tuple(map(float, long * factor)), original, magnitude)


def _yarn(config: Config, factor: float, original: int, magnitude: float) -> YarnScaling:
    config.only("rope.scaling.yarn_ext_factor", 1.0)
    config.only("rope.scaling.yarn_attn_factor", 1.0)
    under = _number(config, "rope.scaling.yarn_log_multiplier", 0.0)
    growth = YarnScaling.growth(factor)
    return YarnScaling(
        factor,
        original,
        fast=_number(config, "rope.scaling.yarn_beta_fast", 32.0),
        slow=_number(config, "rope.scaling.yarn_beta_slow", 1.0),
        magnitude=magnitude * (growth / YarnScaling.growth(factor, under) if under else growth),
    )


def _factors(tensors: Tensors, dims: int) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """What each pair's angle is divided by in short and in long sequences, where the file says."""
    found: list[np.ndarray] = []
    for name in (FACTORS, FACTORS) if FACTORS in tensors else (SHORT, LONG):
        if name in tensors:
            weight = tensors[name]
            if weight.shape != (dims // 2,):
                raise CutawayError(
                    f"{tensors.source}: {name} has shape {list(weight.shape)}; {dims} coordinates of a head turn, "
                    f"which are {dims // 2} pairs."
                )
            found.append(weight.dequantise(np.float64))
    if len(found) == 1:
        raise CutawayError(f"{tensors.source} has one of {SHORT} and {LONG}; both are needed.")
    return (found[0], found[1]) if found else (None, None)


def _number(config: Config, key: str, default: float) -> float:
    return decimal(config.get(key, float, default))
