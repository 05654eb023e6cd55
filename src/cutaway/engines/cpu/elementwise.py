"""Norms, non-linearities, rotation, masks and softmax, row by row, in float32.

Every sum runs in a fixed order and every element is worked out by the same instructions, in one thread or
many, so that a row's bits depend on its own values alone.
"""

from functools import cache

import numpy as np

from cutaway.engines.cpu.kernel import Kernel, place
from cutaway.engines.cpu.processor import ACTIVATION_CODES
from cutaway.engines.cpu.threads import thread_count

_PARALLEL_FROM = 1 << 14  # elements; below, starting the threads costs more than it saves


@cache
def kernels() -> dict[str, Kernel]:
    """All of them; each compiles at its first use."""
    return {
        "activation": Kernel("elementwise.activation_kernel", "qqqqq"),
        "softmax": Kernel("elementwise.softmax_kernel", "qqq"),
        "norm": Kernel("elementwise.norm_kernel", "qqqqqqdq"),
        "mask": Kernel("elementwise.mask_kernel", "qqqqqq"),
        "cap": Kernel("elementwise.cap_kernel", "qqd"),
        "add": Kernel("elementwise.add_kernel", "qqqqq"),
        "rotate": Kernel("elementwise.rotate_kernel", "q" * 13),
    }


def parts_of(n: int) -> int:
    """In how many parts the work on so many elements is done."""
    return thread_count() if n >= _PARALLEL_FROM else 1


def activate(x: np.ndarray, out: np.ndarray, kind: str, times: np.ndarray | None = None) -> None:
    """The non-linearity `kind` of every element, times those of another array; all contiguous and of one size."""
    factor = 0 if times is None else place(times)
    kernels()["activation"](place(x), factor, place(out), x.size, ACTIVATION_CODES[kind], parts=parts_of(x.size))


def softmax(scores: np.ndarray) -> None:
    """Each row of a contiguous array to weights that sum to 1, in place."""
    width = scores.shape[-1]
    kernels()["softmax"](place(scores), scores.size // width, width, parts=parts_of(scores.size))


def mask(scores: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
    """−∞ outside `first[r] <= key < last[r]` of contiguous scores `[H, R, S]`; int64 `[R]` each."""
    heads, rows, width = scores.shape
    kernels()["mask"](place(scores), heads, rows, width, place(first), place(last))


def norm(x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, centre: bool, out: np.ndarray) -> None:
    """LayerNorm (`centre`) or RMSNorm of each row of `[T, d]`, all contiguous."""
    width = x.shape[-1]
    shift = 0 if bias is None else place(bias)
    kernels()["norm"](
        place(x), place(gain), shift, place(out), x.size // width, width, eps, int(centre), parts=parts_of(x.size)
    )


def cap(x: np.ndarray, limit: float) -> None:
    """limit · tanh(x / limit) of every element of a contiguous array, in place."""
    kernels()["cap"](place(x), x.size, limit, parts=parts_of(x.size))


def rotate(x: np.ndarray, cosines: np.ndarray, sines: np.ndarray, adjacent: bool, out: np.ndarray) -> None:
    """Turn pairs of coordinates of `[H, T, d_head]`, whose rows may lie anywhere, into contiguous `out`."""
    heads, rows, width = x.shape
    kernels()["rotate"](
        *(place(x), *x.strides[:2], place(cosines), place(sines), place(out), *out.strides[:2]),
        *(heads, rows, width, cosines.shape[-1], int(adjacent)),
        parts=parts_of(x.size),
    )
