"""The stages between logits and a token, each a small piece of data with one function (chapter 14).

A stage takes the candidates that are left and the text so far, and leaves candidates. In which order they
stand is a list: ours and that of other engines are written down in `ORDERS`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, isinf
from numbers import Real
from typing import ClassVar, Protocol

import numpy as np

from cutaway.errors import CutawayError
from cutaway.generate.candidates import Candidates
from cutaway.spec.check import is_whole


class History:
    """The ids that penalties look at: the prompt's, and those of the response so far."""

    def __init__(self, prompt: Iterable[int] = (), response: Iterable[int] = ()) -> None:
        self.prompt = tuple(map(int, prompt))
        self.response: list[int] = []
        self._present = dict.fromkeys(self.prompt)
        self._counts: dict[int, int] = {}
        for token in response:
            self.append(token)

    def append(self, token: int) -> None:
        """One more token of the response."""
        self.response.append(token)
        self._present[token] = None
        self._counts[token] = self._counts.get(token, 0) + 1

    def until(self, length: int) -> "History":
        """As it was when the response had `length` tokens."""
        return History(self.prompt, self.response[:length])

    def present(self) -> np.ndarray:
        """Every id of prompt and response, each once."""
        return np.fromiter(self._present, dtype=np.intp, count=len(self._present))

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the response, each once, and how often each is there."""
        ids = np.fromiter(self._counts, dtype=np.intp, count=len(self._counts))
        return ids, np.fromiter(self._counts.values(), dtype=np.float64, count=len(self._counts))


class Stage(Protocol):
    """One step between logits and token."""

    name: ClassVar[str]

    def __call__(self, candidates: Candidates, history: History) -> Candidates:
        """What is left; the same object where the stage changes nothing."""


@dataclass(frozen=True)
class LogitBias:
    """Adds to the logits of named tokens; −∞ bans one. Ids outside the vocabulary are refused."""

    name: ClassVar[str] = "logit_bias"
    biases: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        for token, bias in self.biases:
            if not is_whole(token) or token < 0:
                raise CutawayError(f"logit_bias names token {token!r}; a token id is a whole number from 0 on.")
            if not _is_number(bias) or bias != bias or bias == float("inf"):
                raise CutawayError(
                    f"The logit_bias of token {token} is {bias!r}; it must be a number, or −∞ to ban it."
                )

    def __call__(self, candidates: Candidates, history: History) -> Candidates:
        ids, added = self._rows
        places, which = candidates.positions(ids)
        if not len(places):
            return candidates
        return candidates.changed(places, candidates.at(places) + added[which], self.name)

    @cached_property
    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids and their biases, for every token alike."""
        return np.array([token for token, _ in self.biases], dtype=np.intp), np.array(
            [float(bias) for _, bias in self.biases]
        )


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divides the positive logits of tokens that stand in the prompt or the response, multiplies the negative ones.

    Above 1 it discourages, below 1 it encourages. (Keskar et al. 2019, 4.1)
    """

    name: ClassVar[str] = "repetition_penalty"
    penalty: float

    def __post_init__(self) -> None:
        if not _is_number(self.penalty) or not isfinite(self.penalty) or self.penalty <= 0:
            raise CutawayError(
                f"repetition_penalty is {self.penalty!r}; it must be a number above 0 (1 changes nothing)."
            )
        _settle(self, "penalty")

    def __call__(self, candidates: Candidates, history: History) -> Candidates:
        places, _ = candidates.positions(history.present())
        if not len(places):
            return candidates
        logits = candidates.at(places)
        with np.errstate(over="ignore"):
            return candidates.changed(
                places, np.where(logits > 0, logits / self.penalty, logits * self.penalty), self.name
            )


@dataclass(frozen=True)
class PresencePenalty:
    """Subtracts once from the logit of every token that stands in the response."""

    name: ClassVar[str] = "presence_penalty"
    penalty: float

    def __post_init__(self) -> None:
        _finite(self.name, self.penalty)
        _settle(self, "penalty")

    def __call__(self, candidates: Candidates, history: History) -> Candidates:
        places, _ = candidates.positions(history.counts()[0])
        if not len(places):
            return candidates
        return candidates.changed(places, candidates.at(places) - self.penalty, self.name)


@dataclass(frozen=True)
class FrequencyPenalty:
    """Subtracts from the logit of a token as often as it stands in the response."""

    name: ClassVar[str] = "frequency_penalty"
    penalty: float

    def __post_init__(self) -> None:
        _finite(self.name, self.penalty)
        _settle(self, "penalty")

    def __call__(self, candidates: Candidates, history: History) -> Candidates:
        ids, counts = history.counts()
        places, which = candidates.positions(ids)
        if not len(places):
            return candidates
        return candidates.changed(places, candidates.at(places) - self.penalty * counts[which], self.name)


@dataclass(frozen=True)
class Temperature:
    """Divides every logit by T; 0 leaves the likeliest alone, the lowest id among equals (greedy)."""

    name: ClassVar[str] = "temperature"
    temperature: float

    def __post_init__(self) -> None:
        if not _is_number(self.temperature):
            raise CutawayError(f"temperature is {self.temperature!r}; it must be a number.")
        if not isfinite(self.temperature) or self.temperature < 0:
            raise CutawayError(f"The temperature is {self.temperature}; it must be 0 (greedy) or a positive number.")
        _settle(self, "temperature")

    def __call__(self, candidates: Candidates, history: History) -> Candidates:
        if self.temperature == 0:
            return candidates.only(np.array([candidates.best]))
        return candidates.heated(self.temperature, self.name)


@dataclass(frozen=True)
class TopK:
    """Keeps exactly the k likeliest, the lowest ids among equals. (Fan et al. 2018)"""

    name: ClassVar[str] = "top_k"
    k: int

    def __post_init__(self) -> None:
        if not is_whole(self.k):
            raise CutawayError(f"top_k is {self.k!r}; it must be a whole number, or left out to keep every token.")
        if self.k < 1:
            raise CutawayError(f"top_k is {self.k}; it must be at least 1, or left out to keep every token.")

    def __call__(self, candidates: Candidates, history: History) -> Candidates:
        return candidates.first(self.k)


@dataclass(frozen=True)
class TopP:
    """Keeps the smallest set of the likeliest whose probabilities sum to p or more, the one that crosses included.

    (Holtzman et al. 2020)
    """

    name: ClassVar[str] = "top_p"
    p: float

    def __post_init__(self) -> None:
        _share(self.name, self.p)
        _settle(self, "p")

    def __call__(self, candidates: Candidates, history: History) -> Candidates:
        return candidates.reaching(self.p)


@dataclass(frozen=True)
class MinP:
    """Keeps what is at least so many times as likely as the likeliest. (Nguyen et al. 2024)"""

    name: ClassVar[str] = "min_p"
    share: float

    def __post_init__(self) -> None:
        if not _is_number(self.share):
            raise CutawayError(f"min_p is {self.share!r}; it must be a number.")
        if not 0 <= self.share <= 1:
            raise CutawayError(f"min_p is {self.share}; it must lie between 0 and 1, or be left out.")
        _settle(self, "share")

    def __call__(self, candidates: Candidates, history: History) -> Candidates:
        if self.share == 0:
            return candidates
        return candidates.only(np.flatnonzero(candidates.weights >= self.share))  # the likeliest weighs 1


@dataclass(frozen=True)
class Typical:
    """Keeps the smallest set that reaches p, taken from those whose information −ln p lies nearest to the entropy.

    The likeliest of all may leave. (Meister et al. 2023)
    """

    name: ClassVar[str] = "typical_p"
    p: float

    def __post_init__(self) -> None:
        _share(self.name, self.p)
        _settle(self, "p")

    def __call__(self, candidates: Candidates, history: History) -> Candidates:
        return candidates if self.p >= 1 else candidates.reaching(self.p, -candidates.surprise())


def _is_number(value: object) -> bool:
    """Whether it is one, of any kind, that a float has room for."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _settle(stage: Stage, name: str) -> None:
    """A number of another kind (a fraction, NumPy's) becomes one that arrays can be multiplied with."""
    value = getattr(stage, name)
    if not isinstance(value, int | float):
        object.__setattr__(stage, name, float(value))


def _finite(name: str, value: float) -> None:
    if not _is_number(value) or isinf(value) or value != value:
        raise CutawayError(f"{name} is {value!r}; it must be a number (0 changes nothing).")


def _share(name: str, value: float) -> None:
    if not _is_number(value):
        raise CutawayError(f"{name} is {value!r}; it must be a number.")
    if not 0 < value <= 1:
        raise CutawayError(f"{name} is {value}; it must be above 0 and at most 1, or left out.")
