"""Each tiny model is built and saved once for all tests of a worker."""

from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import Tiny
from torch_reference import Case, Made, saved


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`made(case, dtype, **options of save_pretrained)` → its folder, and the float64 model of the saved numbers."""
    known: dict[tuple, tuple[Path, Any]] = {}

    def make(case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Path, Any]:
        key = (case.name, dtype, *sorted(options.items()))
        if key not in known:
            model = case.build(dtype)
            folder = saved(model, tmp_path_factory.mktemp(case.name.replace(" ", "_")), **options)
            known[key] = folder, model.to(torch.float64)
        return known[key]

    return make


@pytest.fixture(scope="session")
def made_tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`made_tiny(tiny, **options of save_pretrained)` → its folder, and what `transformers` loads from it."""
    known: dict[tuple, tuple[Path, Any]] = {}

    def make(tiny: Tiny, **options: Any) -> tuple[Path, Any]:
        key = (tiny.name, *sorted(options.items()))
        if key not in known:
            known[key] = tiny.save(tmp_path_factory.mktemp("tiny"), **options)
        return known[key]

    return make
