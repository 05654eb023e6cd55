"""How to pick a token: the settings, the order of the stages that follow from them, and the draw (chapter 14).

Our order is penalties → logit bias → temperature → top-k → top-p → min-p → typical → draw. Nothing is
filtered unless asked: the defaults draw from the model's own distribution.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from cutaway.errors import CutawayError
from cutaway.generate.candidates import Candidates
from cutaway.generate.stages import (
    FrequencyPenalty,
    History,
    LogitBias,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Stage,
    Temperature,
    TopK,
    TopP,
    Typical,
)

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

# Which stage follows which, here and in other engines. Only the order is theirs; at its edges (ties, the token
# that crosses, how far back a penalty looks) a stage does what it does here.
ORDERS: dict[str, tuple[str, ...]] = {
    "cutaway": (*_PENALTIES, "logit_bias", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    "hf": ("logit_bias", *_PENALTIES, "temperature", "top_k", "top_p", "min_p", "typical_p"),
    "vllm": ("logit_bias", *_PENALTIES, "temperature", "min_p", "top_k", "top_p", "typical_p"),
    "llama.cpp": ("logit_bias", *_PENALTIES, "top_k", "typical_p", "top_p", "min_p", "temperature"),
}


@dataclass(frozen=True)
class Sampling:
    """How to pick. `temperature` 0 is greedy: the likeliest token, the lowest id among equals.

    Each of the others is a stage (`generate.stages` says what each does) that is there only if it is set, and
    only if it does anything: a penalty of 0, a repetition penalty of 1 and an empty bias are left out.
    `order` is "cutaway", the name of another engine's order, or the names of the stages one after another.
    Raises CutawayError for a setting that cannot be, and for one whose stage is not in the order.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    order: str | Sequence[str] = "cutaway"

    def __post_init__(self) -> None:
        assert self.stages  # made now, so that what is wrong is said now

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in their order."""
        made = {stage.name: stage for stage in self._wanted()}
        order = _order(self.order)
        if left_out := [name for name in made if name not in order]:
            raise CutawayError(
                f"The order of the stages leaves out {left_out[0]}, which is set; name it, or do not set it."
            )
        return tuple(made[name] for name in order if name in made)

    def _wanted(self) -> list[Stage]:
        wanted: list[Stage] = []
        if self.repetition_penalty is not None:
            wanted += [RepetitionPenalty(self.repetition_penalty)] if self.repetition_penalty != 1 else []
        if self.presence_penalty is not None:
            wanted += [PresencePenalty(self.presence_penalty)] if self.presence_penalty != 0 else []
        if self.frequency_penalty is not None:
            wanted += [FrequencyPenalty(self.frequency_penalty)] if self.frequency_penalty != 0 else []
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise CutawayError(
                    f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers, as in {{5: -1.5}}."
                )
            wanted += [LogitBias(tuple(self.logit_bias.items()))] if self.logit_bias else []
        wanted.append(Temperature(self.temperature))
        if self.top_k is not None:
            wanted.append(TopK(self.top_k))
        if self.top_p is not None:
            wanted.append(TopP(self.top_p))
        if self.min_p is not None:
            wanted.append(MinP(self.min_p))
        if self.typical_p is not None:
            wanted.append(Typical(self.typical_p))
        return wanted


class Numbers(Protocol):
    """Where random numbers come from; NumPy's Generator is one."""

    def random(self) -> float:
        """A number from [0, 1)."""


def run_stages(candidates: Candidates, stages: Sequence[Stage], history: History) -> Candidates:
    """What the last stage leaves."""
    for stage in stages:
        candidates = stage(candidates, history)
    return candidates


def sample(logits: np.ndarray, sampling: Sampling, random: Numbers, history: History | None = None) -> int:
    """Pick one token from the logits `[V]`. The same logits, settings, history and seed give the same token.

    One random number is taken for each token, whatever the settings.
    """
    last = run_stages(Candidates.of(logits), sampling.stages, history or History())
    return last.draw(random.random())[0]


def _order(order: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(order, str):
        if order not in ORDERS:
            raise CutawayError(f"There is no order {order!r}; there are {', '.join(ORDERS)}, or name the stages.")
        return ORDERS[order]
    if not isinstance(order, Sequence):
        raise CutawayError(f"order is {order!r}; it must be one of {', '.join(ORDERS)}, or a list of stages.")
    for name in order:
        if name not in ORDERS["cutaway"]:
            raise CutawayError(f"There is no stage {name!r}; there are {', '.join(ORDERS['cutaway'])}.")
    if len(set(order)) != len(order):
        raise CutawayError(f"The order names a stage twice: {', '.join(order)}.")
    return tuple(order)
