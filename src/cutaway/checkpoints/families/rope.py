"""Rotary positions as configurations write them down: the base, and every way of stretching the angles.

There are two spellings: `rope_parameters` with everything in it, and the older `rope_theta` beside `rope_scaling`.
"""

from collections.abc import Mapping
from math import log, sqrt
from typing import Any, Literal

from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.stored import quoted
from cutaway.errors import CutawayError
from cutaway.spec import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RotaryScaling,
    RotarySpec,
    YarnScaling,
)

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_SPELLINGS = ("rope_parameters", "rope_scaling")


def rotary(
    config: Config,
    dims: int,
    *,
    default_base: float = 10_000.0,
    pairing: Literal["halves", "adjacent"] = "halves",
    parameters: Mapping[str, Any] | None = None,
    d_head: int | None = None,
) -> RotarySpec:
    """The rotary positions that a Hugging Face configuration describes, for heads of which `dims` coordinates turn.

    `parameters` stand in place of what the configuration says of the whole model (models that turn some layers
    otherwise): then the base is theirs or `default_base`. Where only a part of a head turns, give `d_head`, so
    that a `partial_rotary_factor` can be held against `dims` (`rotated` works them out). Raises CutawayError for
    a kind or a setting that is not known.
    """
    if parameters is None:
        default_base = config.get("rope_theta", float, default_base)
        parameters = stated(config)
    rope = Config({k: v for k, v in parameters.items() if v is not None}, f"the rotary settings in {config.where}")
    base = rope.get("rope_theta", float, default_base)
    part = rope.get("partial_rotary_factor", float, 1.0)
    if "partial_rotary_factor" in rope and int((d_head or dims) * part) != dims:
        raise CutawayError(
            f"'partial_rotary_factor' is {part} in {rope.where}, which does not turn the {dims} coordinates of a head "
            "that this architecture turns."
        )
    scaling = _scaling(rope, config, dims)
    unread = [key for key in parameters if parameters[key] is not None and key not in rope.read]
    if unread:
        raise CutawayError(
            f"{rope.where} have {', '.join(map(quoted, unread[:5]))}, which rotary positions of the kind "
            f"{_kind(rope)!r} do not have; it may change the angles, so the checkpoint is refused."
        )
    return RotarySpec(base, dims, pairing, scaling)


def stated(config: Config) -> Mapping[str, Any]:
    """What the configuration says about rotary positions under either name; empty where it says nothing."""
    found = [rope for key in _SPELLINGS if (rope := config.optional(key, dict))]
    if len(found) == 2 and found[0] != found[1]:
        raise CutawayError(f"'rope_parameters' and 'rope_scaling' differ in {config.where}; one of them must go.")
    return found[0] if found else {}


def rotated(config: Config, d_head: int, default: float = 1.0, key: str = "partial_rotary_factor") -> int:
    """How many coordinates of a head of `d_head` turn: the part that `key` states, in either place."""
    part = config.get(key, float, default)
    rope = Config(stated(config), f"the rotary settings in {config.where}")
    part = rope.get("partial_rotary_factor", float, part)
    if not 0 < part <= 1:
        raise CutawayError(f"{key!r} is {part} in {config.where}; it must be above 0 and at most 1.")
    dims = int(d_head * part)
    if dims < 2 or dims % 2:
        raise CutawayError(
            f"{key!r} = {part} in {config.where} turns {dims} of a head's {d_head} coordinates; they turn in pairs."
        )
    return dims


def _kind(rope: Config) -> str:
    old, new = rope.optional("type", str), rope.optional("rope_type", str)
    old = "longrope" if old == "su" else old  # the name that Phi-3 first gave it
    new = "longrope" if new == "su" else new
    if old is not None and new is not None and old != new:
        raise CutawayError(f"'rope_type' is {quoted(new)} and 'type' is {quoted(old)} in {rope.where}; which is it?")
    return new or old or "default"


def _scaling(rope: Config, config: Config, dims: int) -> RotaryScaling | None:
    kind = _kind(rope)
    match kind:
        case "default":
            return None
        case "linear":
            rope.optional_size("original_max_position_embeddings")  # all angles shrink, wherever training ended
            return LinearScaling(rope.get("factor", float))
        case "dynamic":
            return _dynamic(rope, config, dims)
        case "llama3":
            return Llama3Scaling(
                rope.get("factor", float),
                rope.get("low_freq_factor", float),
                rope.get("high_freq_factor", float),
                _original(rope, config),
            )
        case "yarn":
            return _yarn(rope, config)
        case "longrope":
            return _longrope(rope, config)
    raise CutawayError(
        f"{rope.where} ask for the kind {quoted(kind)}, which cannot be computed; "
        f"those that can are {', '.join(KINDS)}."
    )


def _original(rope: Config, config: Config) -> int:
    """The length of the first training: where both places state it, the configuration's own counts (Phi-3)."""
    inner = rope.optional_size("original_max_position_embeddings")
    outer = config.optional_size("original_max_position_embeddings")
    return outer or inner or config.size("max_position_embeddings")


def _dynamic(rope: Config, config: Config, dims: int) -> DynamicScaling:
    if dims < 4:
        raise CutawayError(
            f"Dynamic rotary scaling needs heads of 4 coordinates at least; in {config.where} {dims} turn."
        )
    longest = config.size("max_position_embeddings")
    rope.only("original_max_position_embeddings", longest, why="the angles grow past 'max_position_embeddings'")
    return DynamicScaling(rope.get("factor", float), longest)


def _yarn(rope: Config, config: Config) -> YarnScaling:
    original = _original(rope, config)
    factor = rope.optional("factor", float)
    if factor is None:
        factor = config.size("max_position_embeddings") / original
    rope.optional("finetuned", bool)  # says how the model came to be
    magnitude = rope.optional("attention_factor", float)
    over, under = rope.get("mscale", float, 0.0), rope.get("mscale_all_dim", float, 0.0)
    if magnitude is None:
        magnitude = YarnScaling.growth(factor)
        if over and under:
            magnitude = YarnScaling.growth(factor, over) / YarnScaling.growth(factor, under)
    return YarnScaling(
        factor,
        original,
        fast=rope.get("beta_fast", float, 32.0),
        slow=rope.get("beta_slow", float, 1.0),
        magnitude=magnitude,
        rounded=rope.get("truncate", bool, True),
    )


def _longrope(rope: Config, config: Config) -> FactorScaling:
    original = _original(rope, config)
    factor = rope.optional("factor", float)
    if factor is None:
        factor = config.size("max_position_embeddings") / original
    magnitude = rope.optional("attention_factor", float)
    if magnitude is None:
        magnitude = sqrt(1 + log(factor) / log(original)) if factor > 1 and original > 1 else 1.0
    return FactorScaling(_numbers(rope, "short_factor"), _numbers(rope, "long_factor"), original, magnitude)


def _numbers(rope: Config, key: str) -> tuple[float, ...]:
    values = rope.get(key, list)
    if not all(type(value) in (int, float) for value in values):
        raise CutawayError(f"{key!r} is {quoted(values)} in {rope.where}; it must be a list of numbers.")
    return tuple(map(float, values))
