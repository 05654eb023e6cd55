"""What is still in the draw at one point of the chain: ids, logits, and the shares that follow from them.

Nothing here sorts a vocabulary. The leading candidates come from a partition, and a set that has to reach a
share is found by parting what is in question, so that a stage over 49,152 tokens costs tens of microseconds.
"""

import numpy as np

from cutaway.errors import CutawayError

WORTH = 64  # leading candidates that are looked for at once: more cost no more, and spare the next search
IN_QUESTION = 256  # so few candidates are sorted; more are parted first
BINS = 2048
STRETCH = 256  # a drawn number is looked up among the sums of stretches so long, then within one of them


class Scratch:
    """Rows `[V]` that one sequence's draws are worked out in, used again for every token.

    Asking the system for fresh memory costs more than any arithmetic here. What was worked out in them holds
    until the next `begin`.
    """

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._used = 0

    def begin(self) -> None:
        """Another token: all rows are free."""
        self._used = 0

    def row(self, length: int) -> np.ndarray:
        """A row that nobody uses, float64 `[length]`, with anything in it."""
        if self._used == len(self._rows):
            self._rows.append(np.empty(length))
        elif len(self._rows[self._used]) < length:
            self._rows[self._used] = np.empty(length)
        self._used += 1
        return self._rows[self._used - 1][:length]


class Fresh(Scratch):
    """New memory every time, which nobody overwrites."""

    def row(self, length: int) -> np.ndarray:
        return np.empty(length)


class Candidates:
    """The tokens that may still be drawn: `ids [n]` ascending, their `logits` float64 `[n]`, none of which is −∞.

    Values are worked out when they are asked for, and kept. Never changed: a stage makes another.
    """

    def __init__(self, ids: np.ndarray | None, logits: np.ndarray, scratch: Scratch) -> None:
        self._ids = ids
        self.logits = logits
        self._scratch = scratch
        self._weights: np.ndarray | None = None
        self._total: float | None = None
        self._highest: float | None = None
        self._leading = np.empty(0, dtype=np.intp)

    @classmethod
    def of(cls, logits: np.ndarray, scratch: Scratch | None = None) -> "Candidates":
        """Every token of a row of logits `[V]`, without those of −∞; worked out in `scratch` where one is given.

        Raises CutawayError for logits that hold NaN or +∞, nothing but −∞, or are no row.
        """
        logits = np.asarray(logits)
        if logits.ndim != 1 or len(logits) == 0:
            raise CutawayError(f"Sampling needs one row of logits [V], not an array of shape {list(logits.shape)}.")
        scratch = Fresh() if scratch is None else scratch
        row = scratch.row(len(logits))
        row[:] = logits
        return cls(None, row, scratch)._sound("logits")

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def ids(self) -> np.ndarray:
        if self._ids is None:
            self._ids = np.arange(len(self.logits))
        return self._ids

    @property
    def highest(self) -> float:
        """The largest logit."""
        if self._highest is None:
            self._highest = float(self.logits.max())
        return self._highest

    @property
    def weights(self) -> np.ndarray:
        """e^(logit − highest) `[n]`: probabilities before they are divided by their sum."""
        if self._weights is None:
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

    def positions(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where those of `ids` that are still in the draw stand in `self.ids`, and which of `ids` they are."""
        if self._ids is None:
            inside = np.flatnonzero((ids >= 0) & (ids < len(self.logits)))
            return ids[inside], inside
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        inside = np.flatnonzero(self._ids[at] == ids)
        return at[inside], inside

    def probability(self, id: int) -> float:
        """The share of one token; 0 where it is out of the draw."""
        at, _ = self.positions(np.array([id]))
        return float(self.weights[at[0]]) / self.total if len(at) else 0.0

    def log_probability(self, id: int) -> float:
        """ln of that, exact also where the share is too small for a number; −∞ where it is out of the draw."""
        at, _ = self.positions(np.array([id]))
        return float(self.logits[at[0]]) - self.highest - float(np.log(self.total)) if len(at) else -np.inf

    def leading(self, count: int) -> np.ndarray:
        """Places in `ids` of the `count` likeliest (fewer where there are fewer), likeliest first, the lowest id
        first among equals."""
        count = min(count, len(self.logits))
        if len(self._leading) < count:
            places = _largest(self.logits, min(max(count, WORTH), len(self.logits)), self._scratch)
            self._leading = places[np.argsort(-self.logits[places], kind="stable")]
        return self._leading[:count]

    def whole(self, vocab_size: int) -> np.ndarray:
        """Probabilities `[V]`, 0 for what is out of the draw."""
        shares = np.zeros(vocab_size)
        shares[self.ids] = self.weights / self.total
        return shares

    # What stages make of it

    def changed(self, places: np.ndarray, logits: np.ndarray, stage: str) -> "Candidates":
        """With other logits at some places; one that became −∞ leaves the draw."""
        row = self._scratch.row(len(self.logits))
        row[:] = self.logits
        row[places] = logits
        made = Candidates(self._ids, row, self._scratch)
        stays = logits.max() <= self.highest and row[self.leading(1)[0]] == self.highest
        if not stays or logits.min() == -np.inf:
            return made._sound(stage)
        made._highest = self.highest
        if self._weights is not None:  # no weight has changed but these
            made._weights = self._scratch.row(len(row))
            made._weights[:] = self._weights
            with np.errstate(over="ignore"):
                made._weights[places] = np.exp(logits - self.highest)
        made._leading = self._leading_among(places, row)
        return made

    def _leading_among(self, places: np.ndarray, row: np.ndarray) -> np.ndarray:
        """The leading of `row`, which differs from ours at `places` only, as far down as ours were known."""
        known = self._leading
        stayed = known[row[known] == self.logits[known]]
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
            row = np.divide(self.logits, temperature, out=self._scratch.row(len(self.logits)))
            if not np.isfinite(row.max()) or not np.isfinite(row.min()):  # shifted first: the largest is then 0
                row = (self.logits - self.highest) / temperature
        made = Candidates(self._ids, row, self._scratch)._sound(stage)
        if len(made) == len(self):
            made._leading = self._leading
        return made

    def only(self, places: np.ndarray) -> "Candidates":
        """Those at `places` (ascending)."""
        if len(places) == len(self):
            return self
        ids = places if self._ids is None else self._ids[places]
        made = Candidates(ids, self._taken(self.logits, places), self._scratch)
        if made.highest == self.highest:
            made._weights = self._taken(self.weights, places)
        return made

    def first(self, count: int) -> "Candidates":
        """The `count` likeliest."""
        if count >= len(self):
            return self
        if count > len(self._leading) and count > IN_QUESTION:
            return self.only(_largest(self.logits, count, self._scratch))
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
        return self.only(_smallest_set(order, self.weights, share * self.total, self._scratch))

    def surprise(self) -> np.ndarray:
        """How far each token's information, −ln p, lies from the entropy: `[n]`."""
        level = self.highest + float(np.log(self.total)) - self.entropy
        with np.errstate(over="ignore"):
            gaps = np.subtract(level, self.logits, out=self._scratch.row(len(self)))
        return np.abs(gaps, out=gaps)

    def draw(self, number: float) -> tuple[int, float, float]:
        """Where a number from [0, 1) falls on the line of shares laid end to end by ascending id: the token's id,
        and the two ends of its piece of the line."""
        weights = self.weights
        sums = np.add.reduceat(weights, np.arange(0, len(weights), STRETCH))
        line = np.cumsum(sums)
        at = number * line[-1]
        stretch = int(np.searchsorted(line, at, side="right"))
        begun = float(line[stretch - 1]) if stretch else 0.0
        inside = weights[stretch * STRETCH : (stretch + 1) * STRETCH]
        ends = begun + np.cumsum(inside)
        place = int(np.searchsorted(ends, at, side="right"))
        if place >= len(inside):  # both sums are rounded, not alike: the number lies at the very end of the stretch
            place = int(np.flatnonzero(inside)[-1])
        low = float(ends[place - 1]) if place else begun
        return int(self.ids[stretch * STRETCH + place]), low / float(line[-1]), float(ends[place]) / float(line[-1])

    def _gaps(self) -> np.ndarray:
        """logit − highest `[n]`, in a row of its own; −∞, whose weight is 0, where that is beyond a float."""
        with np.errstate(over="ignore"):
            return np.subtract(self.logits, self.highest, out=self._scratch.row(len(self.logits)))

    def _taken(self, values: np.ndarray, places: np.ndarray) -> np.ndarray:
        return np.take(values, places, out=self._scratch.row(len(places)), mode="clip")

    def _sound(self, stage: str) -> "Candidates":
        """Itself, without tokens of −∞. Raises CutawayError, naming the stage, where no token can be drawn."""
        highest, lowest = self.logits.max(), self.logits.min()  # NaN where one of them is
        if not highest < np.inf:
            place = int(np.flatnonzero(~(self.logits < np.inf))[0])
            where = "The logit" if stage == "logits" else f"After the stage {stage} the logit"
            raise CutawayError(
                f"{where} of token {int(self.ids[place])} is {self.logits[place]}; nothing can be drawn from that."
            )
        if highest == -np.inf:
            where = "Every logit is −∞" if stage == "logits" else f"After the stage {stage} every logit is −∞"
            raise CutawayError(f"{where}: no token is left to draw.")
        if lowest > -np.inf:
            return self
        left = np.flatnonzero(self.logits > -np.inf)
        return Candidates(left if self._ids is None else self._ids[left], self.logits[left], self._scratch)


def _largest(values: np.ndarray, count: int, scratch: Scratch) -> np.ndarray:
    """Places, ascending, of the `count` largest; the lowest places among equals."""
    if count >= len(values):
        return np.arange(len(values))
    least = _least_of(values, count, scratch)
    places = np.flatnonzero(values >= least)
    if len(places) == count:
        return places
    surplus = len(places) - count
    return np.delete(places, np.flatnonzero(values[places] == least)[-surplus:])


def _least_of(values: np.ndarray, count: int, scratch: Scratch) -> float:
    """The smallest of the `count` largest."""
    row = scratch.row(len(values))
    row[:] = values
    row.partition(len(row) - count)
    return float(row[len(row) - count])


def _smallest_set(order: np.ndarray, weights: np.ndarray, target: float, scratch: Scratch) -> np.ndarray:
    """Places, ascending, of the smallest set of the largest of `order` whose weights sum to `target` or more.

    All are thrown into bins by their place between smallest and largest; the sum crosses the target in one of
    the bins, and only what lies in that one is looked at again.
    """
    chosen = np.zeros(len(order), dtype=bool)
    places, reached = np.arange(0), 0.0
    keys, shares, whole = order, weights, True
    while len(keys) > IN_QUESTION:
        low, width = float(keys.min()), float(keys.max()) - float(keys.min())
        if not 0 < width < np.inf or not BINS / width < np.inf:  # all alike, or so far apart that no bins can be
            break
        height = np.subtract(keys, low, out=scratch.row(len(keys)))
        bins = np.multiply(height, BINS / width, out=height).astype(np.int32)
        from_top = reached + np.cumsum(np.bincount(bins, shares, minlength=BINS + 1)[::-1])
        crossed = min(int(np.searchsorted(from_top, target, side="left")), BINS)
        above, inside = bins > BINS - crossed, np.flatnonzero(bins == BINS - crossed)
        reached = float(from_top[crossed - 1]) if crossed else reached
        if whole:
            chosen, places, whole = above, inside, False
        else:
            chosen[places[above]] = True
            places = places[inside]
        keys, shares = keys[inside], shares[inside]
    if whole:
        places = np.arange(len(order))
    ranked = places[np.argsort(-keys, kind="stable")]
    sums = reached + np.cumsum(weights[ranked])
    chosen[ranked[: int(np.searchsorted(sums, target, side="left")) + 1]] = True
    return np.flatnonzero(chosen)


def margin(row: Candidates) -> float:
    """By how much the likeliest is likelier than the second: p₁ − p₂; 1 where there is one token only."""
    best = row.weights[row.leading(2)] / row.total
    return float(best[0] - best[1]) if len(best) > 1 else 1.0
