"""Compiling kernels once for each machine: where the machine code is kept, and when it is out of date.

Numba compiles a kernel the first time that it is needed on a machine; its object file is kept in the user's cache. A
later process loads that with LLVM alone: importing Numba takes longer than a whole pass.
"""

import hashlib
import os
import re
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.engines.cpu.processor import ENTRY, HALVES, OF_A_HALF, name_and_features
from cutaway.errors import CutawayError
from cutaway.places import cache_folder


def machine_code(source: str, *constants: str) -> int:
    """Where the machine code of a kernel lies: loaded as an earlier process left it, or compiled now.

    "products.few_rows" is a function of `code/products.py`; with `constants` it is one that makes the kernel from them.
    """
    _provide_halves()
    name = " ".join((source, *constants))
    return load(_kept(name) or _compile(name, source, constants))


@cache
def _provide_halves() -> np.ndarray:
    """A table for kernels, of each half as a single and of what else OF_A_HALF says.

    To look a scale up takes no arithmetic, to convert it takes a tenth of a block's.
    """
    import llvmlite.binding as llvm

    with np.errstate(invalid="ignore"):
        halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
        table = np.stack([halves / np.float32(16**power) for power in range(OF_A_HALF)], axis=1)
    llvm.add_symbol(HALVES, table.ctypes.data)
    return table


def _compile(name: str, source: str, constants: tuple[str, ...]) -> bytes:
    _announce()
    module, _, function_name = source.rpartition(".")
    function = getattr(import_module(f"cutaway.engines.cpu.code.{module}"), function_name)
    if constants:
        function = function(*constants)
    from cutaway.engines.cpu.code.native import object_of

    code = object_of(function)
    _keep(name, code)
    return code


def _announce() -> None:
    """Say on a terminal, in one line for all kernels of a run, why their first use on a machine takes a while."""
    global _announced
    if not _announced and sys.stderr.isatty():
        print("Compiling kernels for this processor, once: about ten seconds …", file=sys.stderr)
    _announced = True


_announced = False
_alive: list[Any] = []  # what holds the loaded code


def load(code: bytes) -> int:
    """Where the kernel of an object file lies once it is in memory."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _alive.append(engine)
    return engine.get_function_address(ENTRY)


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
