"""What the kernels are compiled for, and the sizes that follow from it.

Numba's own settings are honoured (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES), without importing it: kernels that an earlier
process compiled are loaded without Numba, in a tenth of the time.
"""

import os
import platform
from functools import cache


@cache
def name_and_features() -> tuple[str, dict[str, bool]]:
    """The processor's name as LLVM has it, and its features: of the one here, or as Numba is told."""
    import llvmlite.binding as llvm

    name = os.environ.get("NUMBA_CPU_NAME", "").strip()
    told = os.environ.get("NUMBA_CPU_FEATURES", "").strip()
    if told or name == "generic":
        return name, {feature[1:]: feature[0] == "+" for feature in told.split(",") if feature}
    return name or llvm.get_host_cpu_name(), dict(llvm.get_host_cpu_features())


def has(feature: str) -> bool:
    """Whether kernels are compiled for a processor with this LLVM feature."""
    return bool(name_and_features()[1].get(feature))


ENTRY = "cutaway_kernel"  # the one symbol of a kernel's object file that others call
HALVES = "cutaway_halves"  # the one thing outside that a kernel refers to: every half as a single, by its bits
OF_A_HALF = 1 if has("avx512f") else 2  # numbers of that table for each half: itself, and a sixteenth where it is used
LANES = 16  # numbers of a vector: one AVX-512 register, two of AVX2, four of NEON; also the sums of a dot product


def _tile() -> tuple[int, int, int]:
    """How many lanes are summed in one pass, and how many rows of each side at once.

    A register's lanes, so that as many sums as there are registers run beside each other for as few loads as can be;
    the sixteen sums of a narrower processor are done in passes over the rows. Measured on one core with AVX-512, rows
    of 576 in the first-level cache: 8 × 3 ran at 92 GFLOP/s, 6 × 4 at 81, 4 × 3 at 73; OpenBLAS reached 74.
    """
    if has("avx512f"):
        return 16, 8, 3
    return (8, 4, 3) if has("avx2") else (4, 4, 3)


PASS_LANES, TILE_LEFT, TILE_RIGHT = _tile()
# Weight rows unpacked together. Measured with AVX2, whose tile is small: four tiles' rows are up to 1.3 times as fast
# as one's, since a row of x is fetched from the second-level cache less often; with AVX-512 there is no gain.
GROUP = TILE_LEFT if has("avx512f") else 4 * TILE_LEFT
UNDIVIDED = max(GROUP, LANES)  # weight rows whose results one thread works out: whole cache lines, which no two write
# Whether the rows of a tile are woven: sixteen numbers of each, then the next sixteen of each. One address then
# reaches them all; 1.3 times as fast with AVX-512, but slower with AVX2, which has no register to spare for it.
WEAVES = has("avx512f")
STRETCH = 768  # floats of a row multiplied at a time: TILE_LEFT such rows stay in the first-level cache
KEPT_BYTES = 4 * LANES * TILE_LEFT  # of the sums kept between stretches, for each right row
FEW = 6  # rows of x up to which stored rows are multiplied as they are read
# Registers that hold sums while stored rows are multiplied; with AVX2 the rest of its 16 is needed to unpack. Measured:
# two rows of x in one pass over the stored rows 1.1 times as fast as in two, five 1.12 times; three and four are not.
MOST_SUMS = 20 if has("avx512f") else 10
STRIP = 1 << 16  # numbers of x multiplied with all weights before the next: 256 kB, part of a second-level cache
PANEL = 64  # results of each row of x that are put down together: whole cache lines, whatever the steps of y
MIX_STEP = 32  # coordinates of a part of a single row's mix
MIX_KEYS = 64  # keys that many rows' mixes see before any sees the next
ACTIVATION_CODES = {"relu": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}

IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def strip(d_in: int, n_x: int) -> int:
    """Rows of x that are multiplied with all weights before the next: whole tiles."""
    most = max(TILE_RIGHT, STRIP // min(max(d_in, 1), STRETCH) // TILE_RIGHT * TILE_RIGHT)
    return min(most, n_x)


def padded(width: int) -> int:
    """A row's numbers, filled up to whole vectors."""
    return (width + LANES - 1) // LANES * LANES
