"""What may be kept of a value in its place: `layers.*.attn.pattern | top(5)`; worked out while the pass runs.

A reduction eats blocks of rows, as attention makes them, so that of a T × T point no more than one block is ever
there. `last` is the last row, `mean` the mean of all rows, `norm` the length of each row, `top(k)` the k largest
numbers of each row and `argtop(k)` where they stand, largest first; `pool(n)` is a pattern in at most n × n cells.
"""

import re
from dataclasses import dataclass

import numpy as np

from cutaway.errors import CutawayError
from cutaway.points import Point

_WRITTEN = re.compile(r"(last|mean|norm|(?:top|argtop|pool)\((\d+)\))")
_EXAMPLES = "last, mean, norm, top(5), argtop(5) or, of attn.pattern, pool(64)"
_GROUP = 32  # numbers of a row that are looked at together
_BY_KEY = ("attn.dots", "attn.scores", "attn.masked")  # cells that no query may see hold no usable numbers


@dataclass(frozen=True)
class Reduction:
    """`name` is one of last, mean, norm, top, argtop, pool; the last three have a `count`."""

    name: str
    count: int | None = None

    def __str__(self) -> str:
        return self.name if self.count is None else f"{self.name}({self.count})"

    def check(self, point: Point) -> None:
        """Raise CutawayError where this reduction has no meaning at this point."""
        shape = point.info.shape
        if self.name == "pool" and point.name != "attn.pattern":
            raise CutawayError(f"pool is for attn.pattern, whose rows sum to 1 in larger cells too; {point} is not.")
        if self.name in ("mean", "norm") and point.name in _BY_KEY:
            raise CutawayError(f"{point} has −∞, or nothing, at keys that may not be seen: it has no {self.name}.")
        if self.name in ("top", "argtop") and point.name in ("attn.dots", "attn.scores"):
            raise CutawayError(
                f"{point} is not computed for all keys that may not be seen; ask for attn.masked | {self}."
            )
        if "T" not in shape or len(shape) < 2 or point.name == "moe.chosen":
            raise CutawayError(f"{point} is [{', '.join(shape)}]; there is nothing in it to reduce by {self.name}.")

    def shape(self, whole: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """What is left of a value of shape `whole`, whose axis `rows` counts the rows."""
        if self.name in ("last", "mean"):
            return whole[:rows] + whole[rows + 1 :]
        if self.name == "norm":
            return whole[:-1]
        if self.name == "pool":
            return (*whole[:-2], *(len(_bins(size, self.count or 1)[1]) for size in whole[-2:]))
        return (*whole[:-1], min(self.count or 1, whole[-1]))


@dataclass(frozen=True)
class Reduced:
    """A point of which only this is kept; `str` is its address in the trace."""

    point: Point
    reduction: Reduction

    def __str__(self) -> str:
        return f"{self.point} | {self.reduction}"


def parse_reduction(text: str) -> Reduction:
    """ "mean" or "top(5)". Raises CutawayError for anything else."""
    written = _WRITTEN.fullmatch(text.strip().replace(" ", ""))
    if written is None or written[2] == "0":
        raise CutawayError(f"{text.strip()!r} is no reduction; it may be {_EXAMPLES}.")
    return Reduction(written[1].partition("(")[0], int(written[2]) if written[2] else None)


class Accumulator:
    """Takes a value block of rows by block of rows and gives what is left of it.

    `whole` is the shape of the value, `rows` its axis of rows; `unseen` stands in cells that no block reached.
    """

    def __init__(self, reduction: Reduction, whole: tuple[int, ...], rows: int, dtype: np.dtype, unseen: float = 0.0):
        self._reduction, self._whole, self._rows, self._unseen = reduction, whole, rows, unseen
        self._due = whole[rows]
        self._dtype = np.dtype(np.int64) if reduction.name == "argtop" else dtype
        adding = reduction.name in ("mean", "pool")
        shape = reduction.shape(whole, rows)
        self._made = np.zeros(shape, np.float64) if adding else np.full(shape, unseen, self._dtype)
        if reduction.name == "pool":
            self._queries, _ = _bins(whole[-2], reduction.count or 1)
            self._keys, self._starts = _bins(whole[-1], reduction.count or 1)

    def take(self, block: np.ndarray, where: np.ndarray) -> None:
        """A block, and which of the value's rows its rows are."""
        if len(where) == 0:
            return
        self._due -= len(where)
        name, rows = self._reduction.name, self._rows
        if name == "last":
            final = np.flatnonzero(where == self._whole[rows] - 1)
            if len(final):
                row = np.take(block, final[0], axis=rows)
                self._made[..., : row.shape[-1]] = row
        elif name == "mean":
            self._made[..., : block.shape[-1]] += block.sum(axis=rows, dtype=np.float64)
        elif name == "norm":
            self._place(np.sqrt(np.einsum("...i,...i->...", block, block, dtype=np.float64)), where)
        elif name == "pool":
            reach = int(np.searchsorted(self._starts, block.shape[-1]))
            for cells, part in zip(self._made, block, strict=True):  # head by head: it adds up in a wider copy
                mass = np.add.reduceat(part, self._starts[:reach], axis=-1, dtype=np.float64)  # [R, cells]
                for index, row in enumerate(where):
                    cells[self._queries[row], :reach] += mass[index]
        else:
            self._place(self._largest(block), where)

    @property
    def complete(self) -> bool:
        """Whether all rows were taken."""
        return self._due == 0

    def result(self) -> np.ndarray:
        """What is left, once all rows were taken."""
        if self._reduction.name == "mean":
            self._made /= self._whole[self._rows]
        if self._reduction.name == "pool":
            self._made /= np.bincount(self._queries)[:, None]
        return self._made.astype(self._dtype, copy=False)

    def _place(self, value: np.ndarray, where: np.ndarray) -> None:
        at = (slice(None),) * self._rows + (where,)
        self._made[at] = value

    def _largest(self, block: np.ndarray) -> np.ndarray:
        """The largest of each row, head by head, so that little stands beside the block."""
        if block.ndim > 2:
            return np.stack([self._largest(part) for part in block])
        count = self._made.shape[-1]
        if block.shape[-1] < count:  # an early block, which sees fewer keys than are asked for
            wider = np.full((*block.shape[:-1], count), self._unseen, block.dtype)
            wider[..., : block.shape[-1]] = block
            block = wider
        largest = _where_largest(block, count)
        values = np.take_along_axis(block, largest, axis=-1)
        order = np.lexsort((largest, -values), axis=-1)  # equal ones by where they stand
        chosen = largest if self._reduction.name == "argtop" else values
        return np.take_along_axis(chosen, order, axis=-1)


def _where_largest(rows: np.ndarray, count: int) -> np.ndarray:
    """Where the `count` largest numbers of each row `[R, S]` stand, `[R, count]`, in any order.

    They lie in those groups of a row's numbers whose own largest is among the `count` largest of all groups: of long
    rows only these are sorted, which is several times as fast. A group is every n-th number, so that n maxima are found
    at once.
    """
    groups = rows.shape[-1] // _GROUP
    if groups < 4 * count:
        return np.argpartition(rows, -count, axis=-1)[:, -count:]
    whole = rows[:, : groups * _GROUP].reshape(len(rows), _GROUP, groups)
    best = np.argpartition(whole.max(axis=1), -count, axis=-1)[:, -count:]
    at = (best[:, :, None] + groups * np.arange(_GROUP)).reshape(len(rows), -1)
    rest = np.arange(groups * _GROUP, rows.shape[-1])  # what is left over at the end is always looked at
    at = np.concatenate([at, np.broadcast_to(rest, (len(rows), len(rest)))], axis=-1)
    found = np.argpartition(np.take_along_axis(rows, at, axis=-1), -count, axis=-1)[:, -count:]
    return np.take_along_axis(at, found, axis=-1)


def reduced(value: np.ndarray, reduction: Reduction, rows: int) -> np.ndarray:
    """A whole value, reduced at once."""
    taker = Accumulator(reduction, value.shape, rows, value.dtype)
    taker.take(value, np.arange(value.shape[rows]))
    return taker.result()


def _bins(size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`size` indices in at most `count` runs of nearly equal length: the run of each, and where the runs start."""
    runs = np.arange(size) * min(count, size) // size
    return runs, np.searchsorted(runs, np.arange(runs[-1] + 1))
