"""Values that do not fit into memory, kept in a file and read from there as if they did."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from cutaway.errors import CutawayError

ALIGNED = 64  # bytes; where an array starts in the file


class Spill:
    """A new file to which arrays are added. They stay readable as long as it is there; nothing removes it but a run
    that fails: `with` takes it away where what it encloses raises.

    Raises CutawayError where it exists, or cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | os.PathLike) or path == "":
            raise CutawayError(f"spill is {path!r}; it must be the name of a new file.")
        self.path, self._end = Path(path), 0
        if os.path.isdir(self.path):
            raise CutawayError(f"{self.path} is a folder; name a new file to spill into.")
        try:
            with self.path.open("xb"):
                pass
        except FileExistsError:
            raise CutawayError(f"There is a file {self.path} already; name a new one to spill into.") from None
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
            why = getattr(error, "strerror", None) or error
            raise CutawayError(f"The capture cannot be spilled to {self.path}: {why}.") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.path.unlink(missing_ok=True)

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """An array in the file, to be written into."""
        start = -(-self._end // ALIGNED) * ALIGNED
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size == 0:
            return np.empty(shape, dtype)
        try:
            with self.path.open("r+b") as file:
                if hasattr(os, "posix_fallocate"):  # a full disk is told now, not by a signal at the first write
                    os.posix_fallocate(file.fileno(), start, size)
                else:
                    file.truncate(start + size)
        except OSError as error:
            raise CutawayError(f"The capture does not fit into {self.path}: {error.strerror or error}.") from None
        self._end = start + size
        return np.memmap(self.path, dtype, "r+", start, tuple(shape))

    def store(self, value: np.ndarray) -> np.ndarray:
        """A copy of `value` in the file."""
        kept = self.empty(value.shape, value.dtype)
        kept[...] = value
        return kept
