"""Compiling kernels once for each machine: where the compiled code is kept and when it is out of date."""

import hashlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba

from cutaway.engines.cpu import threads
from cutaway.errors import CutawayError
from cutaway.places import cache_folder


class Kernel:
    """A compiled function of integers (addresses, sizes) and floats; called, it computes.

    `name` is what a first use says on the terminal while it compiles.
    """

    def __init__(self, function: Callable[..., None], name: str, parallel: bool) -> None:
        self.name = name
        self._parallel = parallel
        self._compiled = _compile(function, parallel)
        self._used = False

    def __call__(self, *arguments: int | float) -> None:
        if not self._used:
            self._announce()
            self._used = True
        if self._parallel:
            threads.launch(self._compiled, *arguments)
        else:
            self._compiled(*arguments)

    def _announce(self) -> None:
        """Say on a terminal, once for a machine and kernel, why the first use takes a while."""
        folder = _kernel_folder()
        mark = Path(folder, self.name.replace(" ", "_") + ".used") if folder else None
        if mark is not None and mark.exists():
            return
        if sys.stderr.isatty():
            print(f"Compiling the kernel for {self.name}, once for this machine …", file=sys.stderr)
        if mark is not None:
            try:
                mark.touch()
            except OSError:
                return


def _compile(function: Callable[..., None], parallel: bool) -> Any:
    """Numba's dispatcher: it compiles, or loads what an earlier process compiled, at the first call.

    No fast-math: every sum keeps the order in which it is written, so that its bits never depend on how
    many rows are computed together. The GIL is released.
    """
    folder = _kernel_folder()
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = folder or before
    try:
        return numba.njit(cache=folder is not None, parallel=parallel, nogil=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before


@cache
def _kernel_folder() -> str | None:
    """Where this version's compiled kernels are kept; None where nothing can be written.

    Numba looks only at the file in which a kernel stands, not at the functions that it calls. So the
    folder carries a digest of all that goes into a kernel, and an older version's code is never loaded.
    """
    digest = hashlib.sha256(f"{sys.version_info[:2]} {numba.__version__}".encode())
    here = Path(__file__).parent
    for source in [*sorted(here.glob("*.py")), here.parent / "blocks.py"]:
        digest.update(source.read_bytes())
    try:
        folder = cache_folder() / "kernels" / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
    except (CutawayError, OSError):
        return None
    return str(folder)


def place(array: Any) -> int:
    """Where an array's first element lies."""
    return array.__array_interface__["data"][0]
