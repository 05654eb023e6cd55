"""What is still in the draw at one point of the chain: ids, logits, and the shares that follow from them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.generate.scratch import Fresh, Scratch
from cutaway.generate.search import IN_QUESTION, largest, smallest_set

WORTH = 64  # leading candidates that are looked for at once: more cost no more, and spare the next search
STRETCH = 256  # a drawn number is looked up among the sums of stretches so long, then within one of them
NOWHERE = np.empty(0, dtype=np.intp)


class Candidates:
    """The tokens that may still be drawn: `ids [n]` ascending, their `logits` float64 `[n]`, none of which is −∞.

    Values are worked out when they are asked for, and kept. Never changed: a stage makes another.
    """

    def __init__(self, count: int, scratch: Scratch, row: np.ndarray | None = None) -> None:
        self._count, self._scratch = count, scratch
        self._row = row  # the logits in the precision they came in; None: those of `_source`
        self._source: tuple[Candidates, Callable[[np.ndarray], np.ndarray]] | None = None  # whose, and what of each row
        self._ids: np.ndarray | None = None  # None: all from 0 on, but for the `_missing`
        self._missing = NOWHERE
        self._weights: np.ndarray | None = None
        self._total: float | None = None
        self._best: int | None = None
        self._highest: float | None = None
        self._leading = NOWHERE

    @classmethod
    def of(cls, logits: np.ndarray, scratch: Scratch | None = None) -> "Candidates":
        """Every token of a row of logits `[V]`, without those of −∞; worked out in `scratch` where one is given.

        The row is not copied: it has to stay as it is for as long as they are in use.
        Raises CutawayError for logits that hold NaN or +∞, nothing but −∞, or are no row.
        """
        logits = np.asarray(logits)
        if logits.ndim != 1 or len(logits) == 0:
            raise CutawayError(f"Sampling needs one row of logits [V], not an array of shape {list(logits.shape)}.")
        if logits.dtype != np.float32:
            logits = logits.astype(np.float64, copy=False)
        return cls(len(logits), Fresh() if scratch is None else scratch, logits)._sound("logits")

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> np.ndarray:
        if self._ids is None:
            self._ids = np.delete(np.arange(self._count + len(self._missing)), self._missing)
        return self._ids

    @property
    def logits(self) -> np.ndarray:
        row = self._given
        if row.dtype != np.float64:
            self._row = self._scratch.row(self._count)
            self._row[:] = row
        return self._given

    @property
    def best(self) -> int:
        """Where the likeliest stands in `ids`; the lowest id among equals."""
        if self._best is None:
            self._best = int(self._given.argmax())
        return self._best

    @property
    def highest(self) -> float:
        """The largest logit."""
        if self._highest is None:
            self._highest = float(self._given[self.best])
        return self._highest

    @property
    def weights(self) -> np.ndarray:
        """e^(logit − highest) `[n]`: probabilities before they are divided by their sum."""
        if self._weights is None:
            if self._source is not None and self._source[0].highest == self.highest:
                before, of_row = self._source
                self._weights = of_row(before.weights)
            else:
                weights = self._gaps()
                self._weights = np.exp(weights, out=weights)
        return self._weights

    @property
    def total(self) -> float:
        """Σ weights."""
        if self._total is None:
            self._total = float(self.weights.sum())
        return self._total

    @property
    def entropy(self) -> float:
        """−Σ p ln p in nats: 0 where one token is certain, ln n where all n are alike."""
        gaps = self._gaps()
        np.maximum(gaps, -1e9, out=gaps)  # a weight that far down is 0, and 0 · −∞ would be NaN
        np.multiply(gaps, self.weights, out=gaps)  # no BLAS, whose threads would cost more than they save
        return max(0.0, float(np.log(self.total) - gaps.sum() / self.total))

    def at(self, places: np.ndarray) -> np.ndarray:
        """The logits of those that stand at some places of `ids`, float64: no more of the row is worked out."""
        return self._given[places].astype(np.float64)

    def ids_at(self, places: Any) -> Any:
        """The ids that stand at some places of `ids`, or at one: `ids` as a whole is not made for them.

        Of some they are an array of the caller's own.
        """
        if self._ids is not None:
            return self._ids[places]
        return places + (self._missing - np.arange(len(self._missing))).searchsorted(places, side="right")

    def positions(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where those of `ids` that are still in the draw stand in `self.ids`, and which of `ids` they are."""
        if self._ids is None:
            inside = ((ids >= 0) & (ids < self._count + len(self._missing))).nonzero()[0]
            if len(self._missing) == 0:
                return ids[inside], inside
            inside = inside[~np.isin(ids[inside], self._missing)]
            return ids[inside] - self._missing.searchsorted(ids[inside]), inside
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        inside = np.flatnonzero(self._ids[at] == ids)
        return at[inside], inside

    def probability(self, id: int) -> float:
        """The share of one token; 0 where it is out of the draw."""
        place = self._place(id)
        return 0.0 if place is None else float(self.weights[place]) / self.total

    def log_probability(self, id: int) -> float:
        """ln of that, exact also where the share is too small for a number; −∞ where it is out of the draw."""
        place = self._place(id)
        return -np.inf if place is None else float(self._given[place]) - self.highest - float(np.log(self.total))

    def leading(self, count: int) -> np.ndarray:
        """Places in `ids` of the `count` likeliest (fewer where there are fewer), likeliest first, the lowest id
        first among equals."""
        count = min(count, self._count)
        if len(self._leading) < count:
            row = self._given
            places = largest(row, min(max(count, WORTH), self._count))
            self._leading = places[np.argsort(-row[places], kind="stable")]
        return self._leading[:count]

    def whole(self, vocab_size: int) -> np.ndarray:
        """Probabilities `[V]`, 0 for what is out of the draw."""
        shares = np.zeros(vocab_size)
        shares[self.ids] = self.weights / self.total
        return shares

    # What stages make of it

    def changed(self, places: np.ndarray, logits: np.ndarray, stage: str) -> "Candidates":
        """With other logits at some places; one that became −∞ leaves the draw."""
        stay = logits != -np.inf
        banned = places[~stay]
        banned.sort()
        made = self._with(places[stay], logits[stay], stage) if len(banned) < len(places) else self
        return made._without(banned, stage) if len(banned) else made

    def _with(self, places: np.ndarray, logits: np.ndarray, stage: str) -> "Candidates":
        """With other logits at some places, none of them −∞."""
        row = self._scratch.row(self._count)
        row[:] = self._given
        row[places] = logits

        def of_row(weights: np.ndarray) -> np.ndarray:  # no weight has changed but these
            changed = self._scratch.row(self._count)
            changed[:] = weights
            with np.errstate(over="ignore"):
                changed[places] = np.exp(logits - self.highest)
            return changed

        made = self._alike(row)
        made._source = self, of_row
        made._refuse_infinite(stage)
        made._leading = self._leading_among(places, row)
        return made

    def _leading_among(self, places: np.ndarray, row: np.ndarray) -> np.ndarray:
        """The leading of `row`, which differs from ours at `places` only, as far down as ours were known."""
        known = self._leading
        stayed = known[row[known] == self._given[known]]
        if not len(stayed):
            return known[:0]
        either = np.union1d(stayed, places)
        either = either[np.argsort(-row[either], kind="stable")]
        return either[: int(np.flatnonzero(either == stayed[-1])[0]) + 1]  # below that, others may lie between

    def heated(self, temperature: float, stage: str) -> "Candidates":
        """Every logit divided by a temperature above 0: the order stays."""
        if temperature == 1:
            return self
        with np.errstate(over="ignore"):
            row = np.divide(self._given, temperature, out=self._scratch.row(self._count), dtype=np.float64)
            if not np.isfinite(row[self.best]) or not np.isfinite(row.min()):  # shifted first: the largest is then 0
                made = self._alike((self.logits - self.highest) / temperature)._sound(stage)
            else:
                made = self._alike(row)
                made._highest = float(row[self.best])
        if len(made) == len(self):
            made._leading = self._leading
        return made

    def only(self, places: np.ndarray) -> "Candidates":
        """Those at `places` (ascending)."""
        if len(places) == self._count:
            return self
        made = Candidates(len(places), self._scratch)
        made._source = self, lambda row: row[places]
        made._ids = self.ids_at(places)
        return made

    def _without(self, places: np.ndarray, stage: str) -> "Candidates":
        """All but those at `places` (ascending), whose logits a stage made −∞."""
        if len(places) == self._count:
            where = "Every logit is −∞" if stage == "logits" else f"After the stage {stage} every logit is −∞"
            raise CutawayError(f"{where}: no token is left to draw.")
        made = Candidates(self._count - len(places), self._scratch)
        made._source = self, lambda row: np.delete(row, places)
        if self._ids is None and len(self._missing) == 0:
            made._missing = places
        else:
            made._ids = np.delete(self.ids, places)
        before = int(places.searchsorted(self.best))
        if before == len(places) or places[before] != self.best:
            made._best, made._highest = self.best - before, self.highest
        return made

    def first(self, count: int) -> "Candidates":
        """The `count` likeliest."""
        if count >= self._count:
            return self
        if count > len(self._leading) and count > IN_QUESTION:
            return self.only(largest(self._given, count))
        best = self.leading(count)
        places = np.sort(best)
        made = self.only(places)
        made._leading = np.searchsorted(places, best)
        return made

    def reaching(self, share: float, order: np.ndarray | None = None) -> "Candidates":
        """The smallest set whose shares sum to `share` or more, taken from the top of `order` (`[n]`, by default
        the logits), the lowest id first among equals. At least one."""
        if share >= 1:
            return self
        if order is None:
            best = self.leading(IN_QUESTION)
            reached = np.cumsum(self.weights[best])
            if reached[-1] >= share * self.total:
                return self.first(int(np.searchsorted(reached, share * self.total, side="left")) + 1)
            order = self.logits
        return self.only(smallest_set(order, self.weights, share * self.total, self._scratch))

    def surprise(self) -> np.ndarray:
        """How far each token's information, −ln p, lies from the entropy: `[n]`."""
        level = self.highest + float(np.log(self.total)) - self.entropy
        with np.errstate(over="ignore"):
            gaps = np.subtract(level, self._given, out=self._scratch.row(self._count), dtype=np.float64)
        return np.abs(gaps, out=gaps)

    def draw(self, number: float) -> tuple[int, float, float]:
        """Where a number from [0, 1) falls on the line of shares laid end to end by ascending id: the token's id,
        and the two ends of its piece of the line."""
        if self._count == 1:
            return int(self.ids[0]), 0.0, 1.0
        weights = self.weights
        line = np.add.reduceat(weights, np.arange(0, self._count, STRETCH)).cumsum()
        end = float(line[-1])
        at = number * end
        stretch = int(line.searchsorted(at, side="right"))
        begun = float(line[stretch - 1]) if stretch else 0.0
        inside = weights[stretch * STRETCH : (stretch + 1) * STRETCH]
        ends = begun + inside.cumsum()
        place = int(ends.searchsorted(at, side="right"))
        if place >= len(inside):  # both sums are rounded, not alike: the number lies at the very end of the stretch
            place = int(np.flatnonzero(inside)[-1])
        low = float(ends[place - 1]) if place else begun
        return int(self.ids_at(np.intp(stretch * STRETCH + place))), low / end, float(ends[place]) / end

    @property
    def _given(self) -> np.ndarray:
        """The logits, float32 or float64: exact in either, but for sums."""
        if self._row is None:
            assert self._source is not None
            before, of_row = self._source
            self._row = of_row(before._given)
        return self._row

    def _alike(self, row: np.ndarray) -> "Candidates":
        """The same tokens with other logits."""
        made = Candidates(self._count, self._scratch, row)
        made._ids, made._missing = self._ids, self._missing
        return made

    def _place(self, id: int) -> int | None:
        if self._ids is None and len(self._missing) == 0:
            return id if 0 <= id < self._count else None
        places, _ = self.positions(np.array([id]))
        return int(places[0]) if len(places) else None

    def _gaps(self) -> np.ndarray:
        """logit − highest `[n]`, in a row of its own; −∞, whose weight is 0, where that is beyond a float."""
        with np.errstate(over="ignore"):
            return np.subtract(self._given, self.highest, out=self._scratch.row(self._count), dtype=np.float64)

    def _sound(self, stage: str) -> "Candidates":
        """Itself, without tokens of −∞. Raises CutawayError, naming the stage, where no token can be drawn."""
        self._refuse_infinite(stage)
        if self._given.min() > -np.inf:
            return self
        return self._without(np.flatnonzero(self._given == -np.inf), stage)

    def _refuse_infinite(self, stage: str) -> None:
        if self.highest < np.inf:  # it is NaN where any logit is
            return
        row = self._given
        place = np.flatnonzero(~(row < np.inf))[0]
        where = "The logit" if stage == "logits" else f"After the stage {stage} the logit"
        raise CutawayError(
            f"{where} of token {int(self.ids_at(place))} is {row[place]}; nothing can be drawn from that."
        )
