"""Products with stored weights against float64: every format, any number of rows, the largest and smallest scales.

`ROUNDING` times the lengths of both rows bounds how far a dot product may be off: a sum may cancel to nearly nothing.
"""

import os
import subprocess
import sys

import numpy as np
import pytest

from cutaway.engines.blocks import BLOCKS, dequantise
from cutaway.engines.cpu.kernel import place
from cutaway.engines.cpu.products import FEW, few_rows, many_rows, many_rows_scratch

KINDS = sorted(BLOCKS)
ROUNDING = 5e-7
SMALLEST = 2.0**-149  # what a float32 is rounded to where nothing smaller exists
# Where a block keeps its float16 scales and offsets; the other formats are rows of numbers, or have a float32 scale.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
SCALES = {"usual": 0.01, "largest": 65504.0, "denormal": 3 * 2.0**-24, "zero": 0.0}


def rows_of(kind: str, n: int, d_in: int, scale: float) -> np.ndarray:
    """Random stored rows whose blocks all have this scale: half of them minus it."""
    rng = np.random.default_rng(n + d_in)
    if kind in ("F64", "F32", "F16"):
        values = rng.uniform(-1, 1, (n, d_in)) * scale
        return np.ascontiguousarray(values.astype({"F64": "f8", "F32": "f4", "F16": "f2"}[kind])).view(np.uint8)
    if kind == "BF16":
        values = (rng.uniform(-1, 1, (n, d_in)) * scale).astype(np.float32)
        return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    block = BLOCKS[kind]
    blocks = rng.integers(0, 256, (n, d_in // block.weights, block.bytes), dtype=np.uint8)
    signed = np.where(rng.random(blocks.shape[:2]) < 0.5, -scale, scale)
    if kind == "F8_E4M3_128":
        codes = blocks[..., 4:]
        codes[codes & 0x7F == 0x7F] = 0  # not a number
        blocks[..., :4] = signed.astype(np.float32)[..., None].view(np.uint8)
    for at in HALVES.get(kind, ()):
        blocks[..., at : at + 2] = signed.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(n, -1)


def products(
    kind: str, rows: np.ndarray, d_in: int, x: np.ndarray, order: np.ndarray | None = None
) -> list[np.ndarray]:
    """y by each kernel that may serve this many rows, in one part and in three; what they write is poisoned first."""
    d_out, n_x, found = len(rows) if order is None else len(order), len(x), []
    size = many_rows_scratch(d_in, n_x)
    for parts in (1, 3):
        for few in (True, False)[n_x > FEW :]:
            y = np.full((n_x + 2, d_out), np.nan, np.float32)
            where = 0 if order is None else place(order)
            given = (place(rows), rows.strides[0], where, d_out, d_in, place(x), n_x, place(y[1:]))
            if few:
                few_rows(kind)(*given, parts=parts)
            else:
                scratch = np.full((parts, size), np.nan, np.float32)
                many_rows(kind)(*given, place(scratch), size, parts=parts)
            assert np.isnan(y[0]).all() and np.isnan(y[-1]).all()  # nothing beside the result is written
            found.append(y[1:-1])
    return found


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_with_stored_weights_is_that_of_float64(kind: str, scale: float) -> None:
    """One, few and many rows; numbers of outputs that no tile divides; rows of plain formats with an odd end."""
    d_in = 512 if BLOCKS[kind].weights > 1 else 77
    for d_out, size in ((13, 1.0), (3, 1e-38), (2, 1e25)):
        rows = rows_of(kind, d_out, d_in, scale)
        w = dequantise(rows, kind).astype(np.float64)
        for n_x in (1, 2, 3, 4, 6, 7, 40):
            x = (np.random.default_rng(n_x).normal(size=(n_x, d_in)) * size).astype(np.float32)
            exact = x.astype(np.float64) @ w.T
            lengths = np.linalg.norm(x.astype(np.float64), axis=1)[:, None] * np.linalg.norm(w, axis=1)
            found = products(kind, rows, d_in, x)
            assert (np.abs(found[0] - exact) <= ROUNDING * lengths + d_in * SMALLEST).all()
            assert all(np.array_equal(found[0], other) for other in found)
            assert scale or not found[0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_in_another_order_takes_the_rows_that_it_names(kind: str) -> None:
    d_in = 512 if BLOCKS[kind].weights > 1 else 45
    rows = rows_of(kind, 9, d_in, 0.01)
    order = np.array([8, 0, 3, 3, 7, 1, 2], np.int64)
    for n_x in (1, 5, 9):
        x = np.random.default_rng(n_x).normal(size=(n_x, d_in)).astype(np.float32)
        plain = products(kind, rows, d_in, x)[0]
        assert all(np.array_equal(found, plain[:, order]) for found in products(kind, rows, d_in, x, order))


AT_THE_END = """
import ctypes, mmap, sys
import numpy as np
sys.path[:0] = PATHS
from test_cpu_products import KINDS, BLOCKS, rows_of, products
from cutaway.engines.cpu import attend, elementwise

PAGE = mmap.PAGESIZE
system = ctypes.CDLL(None, use_errno=True)

def at_the_end(values):
    '''A copy whose last byte is the last that may be read: the next page belongs to nobody.'''
    size = -(-values.nbytes // PAGE) * PAGE
    memory = mmap.mmap(-1, size + PAGE)
    whole = np.frombuffer(memory, np.uint8)
    assert system.mprotect(ctypes.c_void_p(whole.ctypes.data + size), PAGE, 0) == 0
    copy = whole[size - values.nbytes : size].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy

rng = np.random.default_rng(0)
for kind in KINDS:
    for d_in in (256, 512) if BLOCKS[kind].weights > 1 else (1, 17, 45):
        rows = at_the_end(rows_of(kind, 5, d_in, 0.01))
        for n_x in (1, 2, 5, 9):
            assert np.isfinite(products(kind, rows, d_in, at_the_end(rng.normal(size=(n_x, d_in)).astype("f4")))).all()
for width in (1, 5, 16, 37, 64, 70):
    for rows, keys in ((1, 3), (1, 40), (5, 20), (20, 33)):
        q, k, v, out = (at_the_end(rng.normal(size=(2, n, width)).astype("f4")) for n in (rows, keys, keys, rows))
        first, last = (at_the_end(np.full(rows, n)) for n in (0, keys))
        scores = at_the_end(np.empty((2, rows, keys), "f4"))
        attend.dots(q, k, scores)
        elementwise.softmax(scores)
        attend.mix(scores, v, out)
        stages = out.copy()
        scratch = at_the_end(np.empty(attend.attend_scratch(2, rows, keys), "f4"))
        attend.attend(q, k, v, 1.0, first, last, 0.0, None, out, scratch)
        assert np.array_equal(out, stages)
        whole = at_the_end(np.empty((2, rows, keys), "f4"))
        attend.square(3, q, k, 1.0, first, last, 0.0, None, whole)
        assert np.array_equal(whole, scores)
        for kind in ("relu", "silu", "gelu", "gelu_tanh"):
            elementwise.activate(q, out, kind)
        gain = at_the_end(np.ones(width, "f4"))
        elementwise.norm(q, gain, gain, 1e-5, True, out)
print("all")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it asks Linux for a page that nobody may read")
def test_no_kernel_reads_or_writes_beyond_the_end_of_its_arrays() -> None:
    """A mapped file may end with the last weight; one byte more and the process would be ended."""
    script = AT_THE_END.replace("PATHS", repr([os.path.dirname(__file__)]))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (ran.stdout, ran.returncode) == ("all\n", 0), ran.stderr
