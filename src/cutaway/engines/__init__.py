"""Engines compute; the stages of the forward pass say what. `make_engine` chooses one."""

from typing import Any

import numpy as np

from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Engine
from cutaway.errors import CutawayError

ENGINES = ("auto", "cpu", "numpy", "torch")


def make_engine(name: str = "auto", dtype: Any = None) -> Engine:
    """An engine by name: "numpy", "cpu", "torch", or "auto", the fastest of the first two that can do `dtype` here.

    "torch" takes the fastest device that torch has here; "torch:cpu", "torch:cuda", "torch:cuda:1" or "torch:mps" say
    which. "auto" is `cpu` for float32 (or no dtype), `numpy` for float64. Where Numba cannot be imported it is
    `numpy` in float32, and the engine's `note` says so; otherwise `note` is None.

    Raises CutawayError for an unknown engine, or a dtype that it cannot compute in.
    """
    kind, _, device = name.partition(":")
    if kind not in ENGINES or (device and kind != "torch"):
        raise CutawayError(f"There is no engine {name!r}; the engines are {', '.join(ENGINES)}.")
    if kind == "torch":
        return _torch_engine(dtype, device or None)
    wanted = _dtype(dtype)
    if name == "numpy" or (name == "auto" and wanted == np.float64):
        return NumpyEngine(wanted)
    try:
        from cutaway.engines.cpu.compiling import require_compiler
        from cutaway.engines.cpu.engine import CpuEngine

        require_compiler()
    except ImportError as error:
        # Numba refuses a NumPy that is newer than itself in the same way as it is missing.
        if name == "cpu":
            raise CutawayError(f"The cpu engine needs Numba, which cannot be imported ({error}).") from error
        engine = NumpyEngine("float32")
        engine.note = f"Numba cannot be imported ({error}), so NumPy computes, several times slower."
        return engine
    return CpuEngine(wanted)


def _torch_engine(dtype: Any, device: str | None) -> Engine:
    try:
        from cutaway.engines.torch.engine import TorchEngine
    except ImportError as error:
        raise CutawayError(
            f'The torch engine needs torch, which cannot be imported ({error}); `pip install "cutaway[torch]"`.'
        ) from error
    return TorchEngine(dtype, device)


def _dtype(dtype: Any) -> np.dtype | None:
    """What was asked for as NumPy's own; None where nothing was."""
    if dtype is None:
        return None
    try:
        wanted = np.dtype(dtype)
    except TypeError:
        wanted = None
    if wanted not in (np.float32, np.float64):
        raise CutawayError(
            f"There is no computing in {dtype!r}; the choices are float32 and float64 "
            "(and, on the torch engine, bfloat16 and float16)."
        )
    return wanted
