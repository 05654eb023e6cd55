"""The compiled kernels: every format exactly, every sum in one order, in one thread or many."""

import os
import platform
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway.engines.blocks import BLOCKS, dequantise
from cutaway.engines.cpu import compiling, elementwise, threads
from cutaway.engines.cpu.code.native import object_of
from cutaway.engines.cpu.code.unpack import stored_row, unpack_row
from cutaway.engines.cpu.code.vectors import address, arguments
from cutaway.engines.cpu.kernel import Kernel, place
from cutaway.engines.cpu.processor import GROUP, STRETCH, TILE_LEFT, TILE_RIGHT
from cutaway.engines.cpu.products import FEW, few_rows, many_rows, many_rows_scratch
from cutaway.errors import CutawayError

KINDS = sorted(BLOCKS)


def random_rows(kind: str, n: int, d_in: int, seed: int) -> np.ndarray:
    """Any bytes at all are a weight of any kind: infinities, NaNs and denormals come along."""
    block = BLOCKS[kind]
    size = d_in // block.weights * block.bytes
    return np.random.default_rng(seed).integers(0, 256, (n, size), dtype=np.uint8)


@cache
def unpack_tile(kind: str) -> Kernel:
    """A kernel that only unpacks rows, so that it can be seen what the products multiply."""

    def unpack_kernel(given: int, part: int, parts: int) -> None:
        rows, row_bytes, order, d_in, n, out = arguments(given, 6)
        for row in range(n * part // parts, n * (part + 1) // parts):
            unpack_row(kind, stored_row(rows, row_bytes, order, row), address(out) + row * d_in * 4, d_in, 64)

    kernel = Kernel("unpack", "q" * 6, kind)
    kernel._address = compiling.load(object_of(unpack_kernel))
    return kernel


def unpacked(kind: str, rows: np.ndarray, d_in: int, order: np.ndarray | None = None, parts: int = 1) -> np.ndarray:
    """What a kernel unpacks; its target is poisoned first."""
    out = np.full((len(rows), d_in), 12345.0, np.float32)
    where = 0 if order is None else place(order)
    unpack_tile(kind)(place(rows), rows.strides[0], where, d_in, len(rows), place(out), parts=parts)
    return out


def exactly(kind: str, rows: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return dequantise(rows, kind).astype(np.float32)


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Equal bit for bit; a NaN equals a NaN."""
    numbers = ~np.isnan(b)
    assert np.array_equal(np.isnan(a), ~numbers)
    assert np.array_equal(a[numbers].view(np.uint32), b[numbers].view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 9), blocks=st.integers(1, 5), seed=st.integers(0, 2**32 - 1), parts=st.integers(1, 3))
def test_each_format_unpacks_to_exactly_the_reference_values(kind, n, blocks, seed, parts):
    # Rows of the plain formats need not be a multiple of the kernels' sixteen lanes.
    d_in = blocks * BLOCKS[kind].weights if BLOCKS[kind].weights > 1 else blocks * 7 + seed % 16
    rows = random_rows(kind, n, d_in, seed)
    assert_same_bits(unpacked(kind, rows, d_in, parts=parts), exactly(kind, rows))


@pytest.mark.parametrize("kind", KINDS)
def test_a_permuted_weight_is_read_in_its_order(kind):
    rows = random_rows(kind, 12, 512, 3)
    order = np.random.default_rng(1).permutation(12).astype(np.int64)
    assert_same_bits(unpacked(kind, rows, 512, order), exactly(kind, rows[order]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extreme", [0x00, 0xFF, 0x80, 0x7F, 0x01])
def test_constant_bytes_unpack_exactly(kind, extreme):
    """All bytes alike: zeros, NaN scales, the most negative numbers, denormal scales."""
    rows = np.full_like(random_rows(kind, 2, 256, 0), extreme)
    assert_same_bits(unpacked(kind, rows, 256), exactly(kind, rows))


@pytest.mark.parametrize("half", ["<f2", "bf16"])
def test_every_sixteen_bit_number_unpacks_exactly(half):
    rows = np.arange(65536, dtype="<u2").view(np.uint8).reshape(256, 512)
    kind = "BF16" if half == "bf16" else "F16"
    assert_same_bits(unpacked(kind, rows, 256), exactly(kind, rows))


def multiplied(kind: str, rows: np.ndarray, d_in: int, x: np.ndarray, parts: int = 1, *, few: bool) -> np.ndarray:
    """y of one product, by the kernel for few rows of x or by the one for many; what it writes is poisoned first."""
    y = np.full((len(x) + 2, len(rows)), np.nan, np.float32)
    given = (place(rows), rows.strides[0], 0, len(rows), d_in, place(x), len(x), place(y[1:]))
    if few:
        few_rows(kind)(*given, parts=parts)
    else:
        size = many_rows_scratch(d_in, len(x))
        scratch = np.full((parts, size), np.nan, np.float32)
        many_rows(kind)(*given, place(scratch), size, parts=parts)
    assert np.isnan(y[0]).all() and np.isnan(y[-1]).all()  # nothing else is written
    return y[1:-1]


@pytest.mark.parametrize("n_x", [1, 2, 3, 4, 5, 6, 7, 11, 900])
@pytest.mark.parametrize("d_out", [1, 2, 7, 8, 17, 64, 77])
def test_products_agree_with_float64_and_write_nothing_else(n_x, d_out):
    d_in = 77
    rng = np.random.default_rng(0)
    w = rng.normal(size=(d_out, d_in)).astype(np.float32)
    x = rng.normal(size=(n_x, d_in)).astype(np.float32)
    rows = w.view(np.uint8)
    results = [multiplied("F32", rows, d_in, x, parts, few=False) for parts in (1, 2, 5)]
    if n_x <= FEW:
        results += [multiplied("F32", rows, d_in, x, parts, few=True) for parts in (1, 2, 5)]
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)  # a sum may cancel to nearly nothing
    assert (np.abs(results[0] - exact) <= 1e-6 * lengths).all()
    assert all(np.array_equal(results[0], other) for other in results)


@pytest.mark.parametrize("d_in", [5, 16, 77, 576, STRETCH, STRETCH + 1, 2 * STRETCH + 40])
def test_many_products_at_once_have_the_bits_of_one_alone(d_in):
    """Every shape of tile, what is left over at its edges, and long rows taken in stretches sum in the one order."""
    rng = np.random.default_rng(d_in)
    d_out, n_x = 2 * GROUP + TILE_LEFT + 1, 3 * TILE_RIGHT + 1
    w = rng.normal(size=(d_out, d_in)).astype(np.float32).view(np.uint8)
    x = rng.normal(size=(n_x, d_in)).astype(np.float32)
    pairs = [(t, o) for t in range(n_x) for o in range(d_out)]
    alone = [multiplied("F32", w[o : o + 1], d_in, x[t : t + 1], few=True)[0, 0] for t, o in pairs]
    assert np.array_equal(multiplied("F32", w, d_in, x, few=False).ravel(), alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_x", [1, 2, 5])
def test_a_stored_row_multiplied_as_it_is_read_gives_the_bits_of_its_unpacked_numbers(kind, n_x):
    """Random bytes of every format: extreme scales, denormals and NaNs come along."""
    d_in = 512
    rows = random_rows(kind, 11, d_in, 5)
    x = np.random.default_rng(6).normal(size=(n_x, d_in)).astype(np.float32)
    plain = exactly(kind, rows)
    direct = multiplied(kind, rows, d_in, x, 2, few=True)
    assert_same_bits(direct, multiplied("F32", plain.view(np.uint8), d_in, x, few=False))


@given(st.lists(st.floats(-200, 100, width=32), min_size=1, max_size=70))
def test_softmax_is_exact_to_a_few_units_in_the_last_place(values):
    scores = np.array([values], np.float32)
    exact = np.exp(scores.astype(np.float64) - scores.max())
    exact /= exact.sum()
    elementwise.softmax(scores)
    assert np.allclose(scores, exact, rtol=2e-6, atol=1e-37)


def test_softmax_gives_hidden_keys_exactly_nothing_and_keeps_nan_visible():
    scores = np.array([[-np.inf] * 20 + [3.0] + [-np.inf] * 20, [0.0] * 40 + [np.nan]], np.float32)
    elementwise.softmax(scores)
    assert scores[0, 20] == 1 and not scores[0, :20].any() and not scores[0, 21:].any()
    assert np.isnan(scores[1]).all()


@pytest.mark.parametrize("kind", ["relu", "silu", "gelu", "gelu_tanh"])
def test_activations_keep_nan_visible_and_end_where_they_should(kind):
    x = np.array([np.nan, np.inf, 0.0, -1000.0, 1000.0, -1e-30], np.float32)
    out = np.empty_like(x)
    elementwise.activate(x, out, kind)
    assert np.isnan(out[0]) and out[1] == np.inf and out[2] == 0
    assert out[3] == 0 and out[4] == 1000 and abs(out[5]) <= 1e-30


def test_parts_change_no_bit():
    x = np.random.default_rng(0).normal(size=70001).astype(np.float32) * 4
    whole, alone = np.empty_like(x), np.empty_like(x)
    elementwise.activate(x, whole, "silu")  # large enough for all threads
    for start in range(0, len(x), 9973):
        elementwise.activate(x[start : start + 9973], alone[start : start + 9973], "silu")
    assert np.array_equal(whole, alone)


@pytest.mark.parametrize("asked", ["0", "-1", "two", "1.5", "100000"])
def test_a_wrong_number_of_threads_is_refused(asked, monkeypatch):
    monkeypatch.setenv("CUTAWAY_THREADS", asked)
    threads.thread_count.cache_clear()
    try:
        with pytest.raises(CutawayError, match="CUTAWAY_THREADS"):
            threads.thread_count()
    finally:
        monkeypatch.undo()
        threads.thread_count.cache_clear()


@pytest.mark.parametrize(
    ("files", "own", "share"),
    [
        ({"a/b/cpu.max": "150000 100000", "a/cpu.max": "max 100000"}, "0::/a/b", 1.5),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, "0::/a/b", 2.0),
        ({"cpu/c/cpu.cfs_quota_us": "50000", "cpu/c/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/c", 0.5),
        ({"cpu/c/cpu.cfs_quota_us": "-1", "cpu/c/cpu.cfs_period_us": "100000"}, "4:cpu:/c", float("inf")),
        ({}, "0::/", float("inf")),
    ],
)
def test_a_control_group_limits_the_threads(files, own, share, tmp_path):
    for name, content in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(content + "\n")
    (tmp_path / "own").write_text(own + "\n")
    assert threads._control_group_share(tmp_path / "root", tmp_path / "own") == share


def test_describe_names_what_computes():
    facts = threads.describe()
    assert facts["threads"] == threads.thread_count() >= 1
    assert str(facts["blas"]) and facts["numba"] and facts["numpy"] == np.__version__


def test_several_python_threads_may_compute_at_once():
    w = random_rows("Q8_0", 300, 512, 0)
    w.reshape(300, -1, 34)[:, :, 1] = 0x2C  # scales of a usual size
    x = np.random.default_rng(0).normal(size=(4, 3, 512)).astype(np.float32)

    def product_of(i: int) -> np.ndarray:
        return multiplied("Q8_0", w, 512, x[i], 8, few=False)

    alone = [product_of(i) for i in range(4)]
    wrong: list[int] = []

    def repeat(i: int) -> None:
        wrong.extend(i for _ in range(100) if not np.array_equal(product_of(i), alone[i]))

    workers = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


COMPUTE = """
import os, sys
import numpy as np
from cutaway.engines import make_engine
from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Linear
from cutaway.engines.weights import Weight

def compute():
    w = Weight.of(np.arange(300 * 96, dtype=np.float32).reshape(300, 96) / 1e4)
    x = np.ones((80, 96), np.float32)
    y = engine.linear(x, Linear(w), Layout.of([80]))
    one = engine.linear(x[:1], Linear(w), Layout.of([1]))
    return float(engine.activate(y, "silu").sum() + one.sum())

engine = make_engine("cpu")
first = compute()
"""


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMPUTE + script],
        capture_output=True, text=True, timeout=300, env={**os.environ, **variables},
    )  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_computes_the_same():
    script = """
child = os.fork()
if child == 0:
    os._exit(0 if compute() == first else 9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert compute() == first
print("both")
"""
    result = run(script, CUTAWAY_THREADS="2")
    assert result.stdout == "both\n", result.stderr


def test_one_thread_and_two_give_the_same_bits():
    results = {n: run("print(first.hex())", CUTAWAY_THREADS=n).stdout for n in ("1", "2")}
    assert results["1"] == results["2"] != ""


def test_kernels_are_compiled_once_and_kept_in_the_users_cache(tmp_path):
    first = run("print(first)", CUTAWAY_CACHE=str(tmp_path))
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("kernels/*/*.kernel")}
    assert first.returncode == 0 and kept
    again = run("print(first)", CUTAWAY_CACHE=str(tmp_path))
    assert again.stdout == first.stdout
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("kernels/*/*.kernel")} == kept


def test_a_damaged_kernel_is_compiled_anew(tmp_path):
    first = run("print(first)", CUTAWAY_CACHE=str(tmp_path))
    for file in tmp_path.glob("kernels/*/*.kernel"):
        file.write_bytes(file.read_bytes()[:-9])
    again = run("print(first)", CUTAWAY_CACHE=str(tmp_path))
    assert again.returncode == 0 and again.stdout == first.stdout != "", again.stderr


def test_kernels_that_are_kept_are_loaded_without_numba(tmp_path):
    run("", CUTAWAY_CACHE=str(tmp_path))
    again = run("print('numba' in sys.modules)", CUTAWAY_CACHE=str(tmp_path))
    assert again.stdout == "False\n", again.stderr


def test_kernels_of_another_processor_are_not_loaded(tmp_path):
    run("", CUTAWAY_CACHE=str(tmp_path))
    run("", CUTAWAY_CACHE=str(tmp_path), NUMBA_CPU_NAME="generic")
    assert len(list(tmp_path.glob("kernels/*"))) == 2


def test_a_home_that_cannot_be_written_still_computes(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")  # so that no folder can be made in it, not even by root
    result = run("print(first)", CUTAWAY_CACHE=str(blocked / "cache"), TMPDIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout == run("print(first)").stdout
    assert not Path(blocked / "cache").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_a_first_use_says_so_in_one_line_on_a_terminal_and_a_second_says_nothing(tmp_path):
    import pty

    told = []
    for _ in range(2):
        ours, theirs = pty.openpty()
        try:
            environment = {**os.environ, "CUTAWAY_CACHE": str(tmp_path)}
            subprocess.run([sys.executable, "-c", COMPUTE], stderr=theirs, check=True, env=environment)
            os.write(theirs, b"end\n")
            said = b""
            while not said.endswith(b"end\r\n"):  # a terminal may hand over one line at a time
                said += os.read(ours, 10000)
            told.append(said.decode())
        finally:
            os.close(ours)
            os.close(theirs)
    assert told[0].count("Compiling kernels") == 1 and told[0].count("\n") == 2
    assert told[1].strip() == "end"


ELSEWHERE = """
import numpy as np
from cutaway.engines.blocks import BLOCKS, dequantise
from cutaway.engines.cpu.engine import CpuEngine
from cutaway.engines.cpu.processor import TILE_LEFT, TILE_RIGHT
from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Linear
from cutaway.engines.weights import Weight

rng = np.random.default_rng(0)
for kind in ("F16", "Q4_1", "Q6_K"):
    block, d_in = BLOCKS[kind], 512
    rows = rng.integers(0, 256, (21, d_in // block.weights * block.bytes), dtype=np.uint8)
    for at in range(0, rows.shape[1], block.bytes):  # halves of a usual size, wherever the format keeps them
        if kind == "F16":
            rows[:, at + 1] = rows[:, at + 1] & 0x83 | 0x38
        else:
            rows[:, at + block.bytes - 1 if kind == "Q6_K" else at + 1] = 0x2C
            rows[:, at + 3 if kind == "Q4_1" else at] = 0x2C
    w = dequantise(rows, kind).astype(float)
    x = rng.normal(size=(30, d_in)).astype(np.float32)
    y = CpuEngine().linear(x, Linear(Weight(kind, (21, d_in), rows)), Layout.of([30]))
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)
    assert np.isfinite(y).all() and (np.abs(y - x.astype(float) @ w.T) <= 1e-6 * lengths).all(), kind
print(TILE_LEFT, TILE_RIGHT)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="these are names of x86 processors")
@pytest.mark.parametrize(
    ("name", "features", "tile"), [("generic", "", "4 3"), ("haswell", "+avx,+avx2,+fma,+f16c", "4 3")]
)
def test_products_are_right_on_processors_with_less(name, features, tile, tmp_path):
    environment = {**os.environ, "CUTAWAY_CACHE": str(tmp_path), "NUMBA_CPU_NAME": name}
    environment |= {"NUMBA_CPU_FEATURES": features} if features else {}
    ran = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == tile
