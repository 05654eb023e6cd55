"""Engines compute; the stages of the forward pass say what. `make_engine` chooses one."""

from typing import Any

import numpy as np

from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Engine
from cutaway.errors import CutawayError

ENGINES = ("auto", "cpu", "numpy")


def make_engine(name: str = "auto", dtype: Any = None) -> Engine:
    """An engine by name: "numpy", "cpu", or "auto", the fastest that can do `dtype` here.

    "auto" is `cpu` for float32 (or no dtype), `numpy` for float64. Where Numba cannot be imported it is
    `numpy` in float32, and the engine's `note` says so; otherwise `note` is None.

    Raises CutawayError for an unknown engine, or a dtype that it cannot compute in.
    """
    if name == "torch":
        raise CutawayError("The torch engine is not in this version; the engines are auto, cpu and numpy.")
    if name not in ENGINES:
        raise CutawayError(f"There is no engine {name!r}; the engines are {', '.join(ENGINES)}.")
    wanted = _dtype(dtype)
    if name == "numpy" or (name == "auto" and wanted == np.float64):
        return NumpyEngine(wanted)
    try:
        from cutaway.engines.cpu.engine import CpuEngine
    except ImportError as error:
        # Numba refuses a NumPy that is newer than itself in the same way as it is missing.
        if name == "cpu":
            raise CutawayError(f"The cpu engine needs Numba, which cannot be imported ({error}).") from error
        engine = NumpyEngine("float32")
        engine.note = f"Numba cannot be imported ({error}), so NumPy computes, several times slower."
        return engine
    return CpuEngine(wanted)


def _dtype(dtype: Any) -> np.dtype | None:
    """What was asked for as NumPy's own; None where nothing was."""
    if dtype is None:
        return None
    try:
        wanted = np.dtype(dtype)
    except TypeError:
        wanted = None
    if wanted not in (np.float32, np.float64):
        raise CutawayError(f"There is no computing in {dtype!r}; the choices are float32 and float64.")
    return wanted
