"""Each tiny model is built and saved once for all tests of a worker."""

from pathlib import Path
from typing import Any

import pytest
import torch
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
