"""`verify` on the torch engine: every identity holds to its rounding, and a fault in the engine is found."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cutaway.engines.protocol import Scoring
from cutaway.engines.torch.engine import TorchEngine
from cutaway.spec import ModelSpec
from random_models import GPT2, LLAMA, POST, random_model


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spec", [GPT2, LLAMA, POST], ids=lambda spec: spec.name)
def test_every_identity_holds_in_every_precision(spec: ModelSpec, dtype: str) -> None:
    checks = list(random_model(spec, engine=TorchEngine(dtype, "cpu")).verify())
    assert len(checks) > 15
    assert all(check.holds for check in checks), [check for check in checks if not check.holds]
    promised = {check.name for check in checks[:2]}
    assert promised == {
        "looking changes nothing but the rounding",
        "values patched in from the same pass change nothing but the rounding",
    }


class Unscaled(TorchEngine):
    def scale(self, dots: torch.Tensor, factor: float) -> torch.Tensor:
        return dots


class Untwisted(TorchEngine):
    def rotate(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, pairing: str) -> torch.Tensor:
        return x * 1


class Peeping(TorchEngine):
    """Fused attention that sees one key too many."""

    def attend(self, q: Any, keys: Any, values: Any, scoring: Scoring) -> torch.Tensor | None:
        return super().attend(q, keys, values, replace(scoring, last=(scoring.last + 1).clip(max=keys.shape[1])))


@pytest.mark.parametrize(
    ("engine", "noticed"),
    [
        (Unscaled, "q · k, scaled, = the scores, query heads beside their key head"),
        (Untwisted, "each pair of q and k is turned by its position's angle"),
        (Peeping, "looking changes nothing but the rounding"),
    ],
)
def test_an_engine_that_computes_something_else_is_found_out(engine: type[TorchEngine], noticed: str) -> None:
    failed = {check.name for check in random_model(LLAMA, engine=engine("float32", "cpu")).verify() if not check.holds}
    assert noticed in failed


def test_parameters_that_were_replaced_are_the_ones_that_are_checked() -> None:
    model = random_model(LLAMA, engine=TorchEngine("float64", "cpu"))
    model.parameters.held["layers.1.mlp.down"].weight.data.mul_(2)
    assert all(check.holds for check in model.verify())
