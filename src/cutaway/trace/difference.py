"""Two runs held against each other, address by address: where they part, and how far."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace


@dataclass(frozen=True)
class Moved:
    """How far the logits of the last position are from those of the unedited run.

    `largest` is the largest change of a logit; `divergence` the Kullback-Leibler divergence of the two distributions
    of the next token, Σ p ln(p / q) in nats, p being the unedited one.
    """

    largest: float
    divergence: float

    @classmethod
    def between(cls, unedited: np.ndarray, edited: np.ndarray) -> "Moved":
        one, other = unedited.astype(np.float64), edited.astype(np.float64)
        p, q = _log_softmax(one), _log_softmax(other)
        return cls(float(np.abs(other - one).max()), max(0.0, float((np.exp(p) * (p - q)).sum())))

    def __str__(self) -> str:
        return f"logits moved by up to {self.largest:.3g}, divergence {self.divergence:.3g} nats"


@dataclass(frozen=True)
class PointDifference:
    """How far two values at one address are apart.

    `largest` is the largest difference, `relative` that divided by the largest number of the second value; `different`
    counts the numbers that are not the same, of `elements`.
    """

    address: str
    largest: float
    relative: float
    different: int
    elements: int


class Difference:
    """One run minus another, at every address that both hold: iterate, or index by address.

    `only_first` and `only_second` are addresses that one of them does not hold.
    """

    def __init__(self, first: "Trace", second: "Trace") -> None:
        if len(first.rows) != len(second.rows) or first.past != second.past:
            raise CutawayError(
                f"The runs hold {len(first.rows)} and {len(second.rows)} rows, from positions {first.past} and "
                f"{second.past} on; only runs of equally many tokens can be held against each other row by row."
            )
        if not np.array_equal(first.rows, second.rows) or first.heads != second.heads:
            raise CutawayError("The runs were captured at other positions or heads; capture both in the same way.")
        self._first, self._second = first, second
        shared = [address for address in first.points if address in second]
        if not shared:
            raise CutawayError("The runs share no address; capture the same points in both.")
        self.only_first = [address for address in first.points if address not in second]
        self.only_second = [address for address in second.points if address not in first]
        self._found = {address: self._at(address) for address in shared}

    def __iter__(self) -> Iterator[PointDifference]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, address: str) -> PointDifference:
        """Raises CutawayError for an address that the runs do not share."""
        found = self._found.get(str(address))
        if found is None:
            some = next(iter(self._found))
            raise CutawayError(f"{address!r} is not in both runs; {len(self)} addresses are, {some} for one.")
        return found

    @property
    def first_change(self) -> str | None:
        """The earliest address of the pass at which a number differs; None where none does."""
        return next((one.address for one in self if one.different), None)

    @property
    def moved(self) -> Moved | None:
        """How far the first run's last logits are from the second's; None where there are none of equal length."""
        logits = [run._last_logits for run in (self._second, self._first)]
        if logits[0] is None or logits[1] is None or logits[0].shape != logits[1].shape:
            return None
        return Moved.between(logits[0], logits[1])

    def __str__(self) -> str:
        """In short: the layer in which the runs part in full, of each other one what it leaves, and what is outside."""
        same = sum(not one.different for one in self)
        lines = [f"{same} of {len(self)} addresses hold the same numbers" + (":" if same < len(self) else ".")]
        shown = self._worth_a_line()
        wide = max((len(one.address) for one in shown), default=0)
        for one in shown:
            lines.append(
                f"{one.address:<{wide}}  {one.different:>10,} of {one.elements:>10,} differ, by up to {one.largest:.3g}"
                f" ({one.relative:.2g} of the largest)"
            )
        if self.moved is not None:
            lines.append(str(self.moved))
        return "\n".join(lines)

    def _worth_a_line(self) -> list[PointDifference]:
        different = [one for one in self if one.different]
        if not different:
            return []
        where = [_layer(one.address) for one in different]
        last_of = {layer: index for index, layer in enumerate(where)}
        return [
            one
            for index, (one, layer) in enumerate(zip(different, where, strict=True))
            if layer in (None, where[0]) or last_of[layer] == index
        ]

    def show(self) -> None:
        """Print where the runs part, and how far; iterate over the difference for every address."""
        print(self)

    def _at(self, address: str) -> PointDifference:
        one, other = self._first[address], self._second[address]
        if one.shape != other.shape:
            raise CutawayError(f"{address} is {list(one.shape)} in one run and {list(other.shape)} in the other.")
        unlike = one != other
        if one.dtype.kind == "f" and other.dtype.kind == "f":
            unlike &= ~(np.isnan(one) & np.isnan(other))
        different = int(np.count_nonzero(unlike))
        if not different:
            return PointDifference(address, 0.0, 0.0, 0, one.size)
        largest = float(np.abs(one[unlike].astype(np.float64) - other[unlike].astype(np.float64)).max())
        finite = np.abs(other[np.isfinite(other)].astype(np.float64))
        scale = float(finite.max()) if finite.size else 0.0
        return PointDifference(address, largest, largest / scale if scale else float("inf"), different, one.size)


def _layer(address: str) -> str | None:
    """The layer that an address stands in, as it is written; None outside the layers."""
    parts = address.split(".")
    return parts[1] if parts[0] == "layers" else None


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return result
