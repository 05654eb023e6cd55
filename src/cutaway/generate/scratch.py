"""Memory that draws are worked out in."""

import numpy as np


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
