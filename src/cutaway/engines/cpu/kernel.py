"""A compiled function, and how it is called."""

import ctypes
import struct
import threading
from typing import Any

from cutaway.engines.cpu import threads
from cutaway.engines.cpu.compiling import machine_code


class Kernel:
    """A compiled function that does one of `parts` equal shares of some work; called, it does all of it.

    `source` and `constants` say where its code stands (`compiling.machine_code`). It takes the address of its packed
    arguments, its part and the number of parts. `layout` gives the types of the arguments as `struct` has them (q:
    integer or address, d: float).
    """

    def __init__(self, source: str, layout: str, *constants: str) -> None:
        self.name = " ".join((source, *constants))
        self._code = (source, *constants)
        self._pack = struct.Struct(layout).pack_into
        self._address = 0
        self._one_at_a_time = threading.Lock()

    def __call__(self, *arguments: int | float, parts: int = 1) -> None:
        buffer, packed = _argument_buffer()
        self._pack(buffer, 0, *arguments)
        threads.launch(self._address or self.address, packed, parts)

    @property
    def address(self) -> int:
        """Where the machine code lies; at the first use it is loaded, or compiled."""
        with self._one_at_a_time:
            if not self._address:
                self._address = machine_code(*self._code)
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


def place(array: Any) -> int:
    """Where an array's first element lies."""
    return array.__array_interface__["data"][0]
