"""Arrays that begin at a cache line, and keeping the memory that a pass gives back for the next one."""

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from math import prod

import numpy as np

from cutaway.engines.cpu.kernel import place

_LINE = 64  # bytes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for its settings
_KEPT = 256 << 20, (2 << 30) - 1  # bytes of freed memory that stay with the process: the least and the most
_LARGEST = 32 << 20  # arrays up to this size come from there; glibc allows no more


@cache
def keep_freed_memory() -> None:
    """Tell the C library not to give freed arrays back to the system, up to an eighth of the machine's memory.

    A pass makes and frees some hundred arrays of a few megabytes. Given back and asked for again, each comes as
    fresh pages, which the system fills with zeros one by one: measured, a fifth of a pass over 512 tokens, and two
    fifths of one of which all is kept, more than a gigabyte. The process never holds more than it has once needed.
    Where the library is another than glibc this does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_TRIM_THRESHOLD, min(max(_KEPT[0], _memory() // 8), _KEPT[1]))
    mallopt(_MMAP_THRESHOLD, _LARGEST)


def _memory() -> int:
    """Bytes of memory that the machine has; 0 where it does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def empty(shape: Sequence[int]) -> np.ndarray:
    """A float32 array to be written into, which begins at a cache line.

    NumPy's begin anywhere; then each vector of 64 bytes lies across two lines, and takes two turns to fetch.
    """
    size = prod(shape)
    room = np.empty(size + _LINE // 4, np.float32)
    skipped = -place(room) % _LINE // 4
    return room[skipped : skipped + size].reshape(shape)
