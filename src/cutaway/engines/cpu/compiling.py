"""Compiling kernels once for each machine: where the compiled code is kept and when it is out of date."""

import ctypes
import hashlib
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import types

from cutaway.engines.cpu import threads
from cutaway.errors import CutawayError
from cutaway.places import cache_folder


class Kernel:
    """A compiled function that does one of `parts` equal shares of some work; called, it does all of it.

    The function takes the address of its packed arguments, its part and the number of parts. `name` marks in
    the cache that it was compiled; `layout` gives the types of the arguments as
    `struct` has them (q: integer or address, d: float).
    """

    def __init__(self, function: Callable[[int, int, int], None], name: str, layout: str) -> None:
        self.name = name
        self._function = function
        self._pack = struct.Struct(layout).pack_into
        self._address = 0
        self._one_at_a_time = threading.Lock()

    def __call__(self, *arguments: int | float, parts: int = 1) -> None:
        buffer, packed = _argument_buffer()
        self._pack(buffer, 0, *arguments)
        threads.launch(self._address or self.address, packed, parts)

    @property
    def address(self) -> int:
        """Where the compiled function lies; it is compiled at the first use."""
        with self._one_at_a_time:
            if not self._address:
                _announce(self.name)
                self._address = compile_native(self._function)
        return self._address


_local = threading.local()


def _argument_buffer() -> tuple[Any, int]:
    """Where this Python thread packs the arguments of its kernels."""
    try:
        kept: tuple[Any, int] = _local.buffer
    except AttributeError:
        buffer = ctypes.create_string_buffer(256)
        kept = _local.buffer = (buffer, ctypes.addressof(buffer))
    return kept


def _announce(name: str) -> None:
    """Say on a terminal, in one line for all kernels of a run, why their first use on a machine takes a while."""
    global _announced
    folder = _kernel_folder()
    mark = Path(folder, name.replace(" ", "_") + ".used") if folder else None
    if mark is not None and mark.exists():
        return
    if not _announced and sys.stderr.isatty():
        print("Compiling kernels for this processor, once: about ten seconds …", file=sys.stderr)
    _announced = True
    if mark is not None:
        with suppress(OSError):
            mark.touch()


_announced = False
_alive: list[Any] = []  # compiled functions; their code goes when they do


def compile_native(function: Callable[[int, int, int], None]) -> int:
    """Where the compiled function lies; compiled now, or loaded as an earlier process left it.

    No fast-math: every sum keeps the order in which it is written, so that its bits never depend on how
    many rows are computed together.
    """
    folder = _kernel_folder()
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = folder or before
    try:
        compiled = numba.cfunc(_SIGNATURE, cache=folder is not None, error_model="numpy")(function)
    except OSError:  # a full disk, or a folder that went away
        compiled = numba.cfunc(_SIGNATURE, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before
    _alive.append(compiled)
    return compiled.address


_SIGNATURE = types.void(types.int64, types.int64, types.int64)


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
