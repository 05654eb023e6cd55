"""Compiling kernels once for each machine: where the machine code is kept, and when it is out of date.

Numba compiles a kernel the first time that it is needed on a machine; its object file is kept in the user's cache. A
later process loads that with LLVM alone: importing Numba takes longer than a whole pass.
"""

import ctypes
import hashlib
import os
import re
import struct
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cutaway.engines.cpu import threads
from cutaway.engines.cpu.processor import name_and_features
from cutaway.errors import CutawayError
from cutaway.places import cache_folder


class Kernel:
    """A compiled function that does one of `parts` equal shares of some work; called, it does all of it.

    `source` says where its code stands: "products.few_rows" is a function of `code/products.py`; with `constants` it is
    one that makes the function from them. It takes the address of its packed arguments, its part and the number of
    parts. `layout` gives the types of the arguments as `struct` has them (q: integer or address, d: float).
    """

    def __init__(self, source: str, layout: str, *constants: str) -> None:
        self.name = " ".join((source, *constants))
        self._source = source
        self._constants = constants
        self._pack = struct.Struct(layout).pack_into
        self._address = 0
        self._one_at_a_time = threading.Lock()

    def __call__(self, *arguments: int | float, parts: int = 1) -> None:
        buffer, packed = _argument_buffer()
        self._pack(buffer, 0, *arguments)
        threads.launch(self._address or self.address, packed, parts)

    @property
    def address(self) -> int:
        """Where the machine code lies; at the first use it is loaded as an earlier process left it, or compiled."""
        with self._one_at_a_time:
            if not self._address:
                self._address = _load(_kept(self.name) or self._compile())
        return self._address

    def _compile(self) -> bytes:
        _announce()
        module, _, name = self._source.rpartition(".")
        function = getattr(import_module(f"cutaway.engines.cpu.code.{module}"), name)
        if self._constants:
            function = function(*self._constants)
        from cutaway.engines.cpu.code.native import object_of

        code = object_of(function)
        _keep(self.name, code)
        return code


_local = threading.local()


def _argument_buffer() -> tuple[Any, int]:
    """Where this Python thread packs the arguments of its kernels."""
    try:
        kept: tuple[Any, int] = _local.buffer
    except AttributeError:
        buffer = ctypes.create_string_buffer(256)
        kept = _local.buffer = (buffer, ctypes.addressof(buffer))
    return kept


def _announce() -> None:
    """Say on a terminal, in one line for all kernels of a run, why their first use on a machine takes a while."""
    global _announced
    if not _announced and sys.stderr.isatty():
        print("Compiling kernels for this processor, once: about ten seconds …", file=sys.stderr)
    _announced = True


_announced = False
_alive: list[Any] = []  # what holds the loaded code
_ENTRY = "cutaway_kernel"  # as in code.native, which is imported only to compile


def _load(code: bytes) -> int:
    """Where the kernel of an object file lies once it is in memory."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _alive.append(engine)
    return engine.get_function_address(_ENTRY)


def _kept(name: str) -> bytes | None:
    """The object file that an earlier process kept; None where there is none, or it is damaged."""
    folder = kernel_folder()
    if folder is None:
        return None
    try:
        stored = (folder / _file_name(name)).read_bytes()
    except OSError:
        return None
    digest, code = stored[:32], stored[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(name: str, code: bytes) -> None:
    """Leave an object file for later processes; where that cannot be, they compile again."""
    folder = kernel_folder()
    if folder is None:
        return
    target = folder / _file_name(name)
    partial = target.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        partial.write_bytes(hashlib.sha256(code).digest() + code)
        partial.replace(target)
    except OSError:  # a full disk, or a folder that went away
        with suppress(OSError):
            partial.unlink()


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "-", name) + ".kernel"


@cache
def kernel_folder() -> Path | None:
    """Where the compiled kernels of this version are kept; None where nothing can be written.

    Its name is a digest of all that goes into a kernel: our sources, the compiler's versions, the processor.
    """
    processor, features = name_and_features()
    versions = [_version(package) for package in ("llvmlite", "numba", "numpy")]
    digest = hashlib.sha256(f"{versions} {sys.platform} {processor} {sorted(features.items())}".encode())
    here = Path(__file__).parent
    shared = (here / "processor.py", here / "shared_words.py", here.parent / "blocks.py")
    for source in [*sorted((here / "code").glob("*.py")), *shared]:
        digest.update(source.read_bytes())
    try:
        folder = cache_folder() / "kernels" / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
    except (CutawayError, OSError):
        return None
    return folder


def require_compiler() -> None:
    """Raise ImportError where kernels are yet to be compiled and Numba cannot be imported, or refuses this NumPy.

    Kernels that these very versions have compiled before show that they can.
    """
    folder = kernel_folder()
    if folder is None or not any(folder.glob("*.kernel")):
        import numba  # noqa: F401


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def place(array: Any) -> int:
    """Where an array's first element lies."""
    return array.__array_interface__["data"][0]
