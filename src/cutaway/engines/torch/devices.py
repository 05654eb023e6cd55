"""What the torch engine computes on and in: devices and precisions, and which of them fit together."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cutaway.engines.protocol import Precision
from cutaway.errors import CutawayError

PRECISIONS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class BFloat16:
    """The half-size float with float32's range, which NumPy lacks."""

    name: str = "bfloat16"
    itemsize: int = 2


def devices() -> list[str]:
    """The devices that torch can compute on here, the fastest first."""
    found = (
        [f"cuda:{i}" if i else "cuda" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def described() -> list[str]:
    """The same, each with what it is: "cuda (NVIDIA H200, 150.0 GB)", "cpu (8 threads)"."""
    what = []
    for name in devices():
        if name.startswith("cuda"):
            properties = torch.cuda.get_device_properties(torch.device(name))
            what.append(f"{name} ({properties.name}, {properties.total_memory / 1e9:.1f} GB)")
        else:
            what.append(f"{name} ({torch.get_num_threads()} threads)" if name == "cpu" else f"{name} (Apple's GPU)")
    return what


def device_of(name: str | None) -> torch.device:
    """ "cuda", "cuda:1", "mps", "cpu"; None takes the fastest that is here. Raises CutawayError for any other."""
    here = devices()
    chosen = here[0] if name is None else name.removesuffix(":0")
    if chosen not in here:
        raise CutawayError(f"torch has no device {name!r} here; it has {', '.join(here)}.")
    return torch.device(chosen)


def precision_of(dtype: Any) -> tuple[Precision, torch.dtype]:
    """A precision by name, or as NumPy's or torch's own type; None is float32. Raises CutawayError for any other."""
    name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    if name not in PRECISIONS:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = ""
    if name not in PRECISIONS:
        raise CutawayError(f"The torch engine computes in {', '.join(PRECISIONS[:-1])} or float16, not in {dtype!r}.")
    return BFloat16() if name == "bfloat16" else np.dtype(name), getattr(torch, name)
