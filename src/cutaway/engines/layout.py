"""How the rows of a pass are laid out: sequences packed one after another, and the blocks they are computed in.

BLAS rounds differently with the number of rows it is given. So that a sequence gets the same bits alone, in
a batch and under load, its rows are always cut in the same places: at absolute multiples of a fixed size
of its *own* positions, each block padded full and multiplied by itself. What is left over and short goes
row by row, in one fixed order whatever stands beside it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from cutaway.errors import CutawayError

CHUNK = 256  # rows of the largest product: large enough for BLAS to run at full speed
BLOCK = 64  # rows of a smaller one, and of a block of attention queries
FEW = 16  # up to this many left-over rows are computed row by row


@dataclass(frozen=True)
class Segment:
    """One sequence's rows in a packed pass: rows `start : start + length` of x.

    `position` is the position of its first row: 0, or the number of tokens that its cache already holds.
    `slot` says which of the pass's caches belongs to it.
    """

    start: int
    length: int
    position: int = 0
    slot: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def end(self) -> int:
        """The position after its last row: how many keys its last query may look back on."""
        return self.position + self.length


@dataclass(frozen=True)
class RowBlock:
    """Rows `start:stop` of a packed array, computed as one product of `size` rows with the first at `offset`.

    `size` 0 means row by row. Rows of the padded product before `offset` and after the last are zero.
    """

    start: int
    stop: int
    offset: int = 0
    size: int = 0


def row_blocks(segment: Segment, largest: int = CHUNK) -> Iterator[RowBlock]:
    """Cut one segment at absolute multiples of `largest`, then of BLOCK, then row by row."""
    row, position = segment.start, segment.position
    while row < segment.stop:
        left = segment.stop - row
        if position % largest == 0 and left >= largest:
            taken, block = largest, RowBlock(row, row + largest, 0, largest)
        elif left > FEW:
            taken = min(BLOCK - position % BLOCK, left)
            block = RowBlock(row, row + taken, position % BLOCK, BLOCK)
        else:
            taken, block = left, RowBlock(row, row + left)
        yield block
        row, position = row + taken, position + taken


@dataclass(frozen=True)
class Layout:
    """The segments of a pass in the order of their rows, and the blocks that products with a weight are cut in."""

    segments: tuple[Segment, ...]
    blocks: tuple[RowBlock, ...]

    @classmethod
    def of(cls, lengths: Iterable[int], positions: Iterable[int] | None = None) -> "Layout":
        """Sequences of these lengths, one after another; each starting at `positions` (0 where not given)."""
        lengths = list(lengths)
        starts = accumulate(lengths[:-1], initial=0)
        firsts = list(positions) if positions is not None else [0] * len(lengths)
        segments = tuple(
            Segment(start, length, first, slot)
            for slot, (start, length, first) in enumerate(zip(starts, lengths, firsts, strict=bool(lengths)))
        )
        return cls(segments, tuple(block for segment in segments for block in row_blocks(segment)))

    @property
    def rows(self) -> int:
        """T: the tokens of all sequences together."""
        return self.blocks[-1].stop if self.blocks else 0

    @property  # not kept: up to Python 3.11 a forked child may wait for ever for the lock of a cached one
    def positions(self) -> np.ndarray:
        """The position of every row in its own sequence, `int64 [T]`."""
        return np.concatenate([np.arange(s.position, s.end) for s in self.segments])

    @property
    def last_rows(self) -> list[int]:
        """The last row of each sequence: the one that predicts what comes next."""
        return [segment.stop - 1 for segment in self.segments]

    def only(self, rows: Sequence[int]) -> "Layout":
        """How these rows alone are multiplied so that they come out as they would among all the others.

        `rows` ascend. Each keeps its place in a block of at most BLOCK rows, whoever is left out around it;
        what is multiplied is `x[rows]`. Raises CutawayError for rows that do not ascend, or are not there.
        """
        asked_rows = list(rows)
        if asked_rows != sorted(set(asked_rows)) or (
            asked_rows and not 0 <= asked_rows[0] <= asked_rows[-1] < self.rows
        ):
            raise CutawayError(
                f"The rows asked for are {asked_rows}; they must be ascending, each from 0 to {self.rows - 1}."
            )
        asked, blocks, at = set(asked_rows), [], 0
        for block in (block for segment in self.segments for block in row_blocks(segment, BLOCK)):
            run: list[int] = []
            for row in range(block.start, block.stop + 1):
                if row < block.stop and row in asked:
                    run.append(row)
                elif run:
                    offset = block.offset + run[0] - block.start if block.size else 0
                    blocks.append(RowBlock(at, at + len(run), offset, block.size))
                    at, run = at + len(run), []
        return Layout((), tuple(blocks))
