"""All that a trace can do, on the torch engine: the reference's values, and nothing that would fail on a GPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cutaway.engines.torch.engine import TorchEngine
from cutaway.trace.edits import Add, Function, Knockout, Scale, Zero
from random_models import GPT2, LLAMA, random_ids, random_model

WITHIN = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 0.05}
PLANS: dict[str, dict[str, Any]] = {
    "everything": {"points": ["*"]},
    "some positions": {"points": ["*"], "positions": [-1, 2]},
    "some heads": {"points": ["*"], "heads": [1]},
    "reduced": {"points": ["layers.*.attn.pattern | mean", "layers.*.mlp.out | norm", "logits | last"]},
    "a head zeroed": {"points": ["*"], "edits": [Zero("layers.0.attn.z", heads=[1])]},
    "an edge cut": {"points": ["*"], "edits": [Knockout("layers.1.attn.masked", edges=[[7, 3]])]},
    "steered and scaled": {
        "points": ["*"],
        "edits": [Add("layers.0.resid_mid", np.arange(12.0)), Scale("layers.1.attn.pattern", 0.5, positions=[4])],
    },
    "a part of the output of a head": {"points": ["*"], "edits": [Zero("layers.1.attn.head_out", heads=[0])]},
    "a function": {"points": ["logits"], "edits": [Function("layers.1.mlp.act", lambda value, place: value**2)]},
}


@pytest.fixture(autouse=True)
def tensors_that_numpy_cannot_look_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: NumPy gets at a tensor's numbers only where the engine hands them over."""

    def refuse(tensor: torch.Tensor, dtype: Any = None) -> np.ndarray:
        raise TypeError("a tensor of a GPU is no NumPy array")

    monkeypatch.setattr(torch.Tensor, "__array__", refuse)


def off(found: np.ndarray, expected: np.ndarray) -> float:
    known = np.isfinite(expected)
    assert found.shape == expected.shape and np.array_equal(np.isfinite(found), known)
    return float(
        np.abs(found[known] - expected[known]).max(initial=0) / max(np.abs(expected[known]).max(initial=0), 1e-9)
    )


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_plan_and_edit_gives_the_values_of_the_reference(plan: dict[str, Any], dtype: str) -> None:
    ids = random_ids(LLAMA, 11)
    found = random_model(LLAMA, engine=TorchEngine(dtype, "cpu")).trace(ids, **plan)
    expected = random_model(LLAMA).trace(ids, **plan)
    assert found.points == expected.points
    for name in expected:
        assert off(found[name], expected[name]) < WITHIN[dtype], name


def test_a_trace_is_saved_spilled_and_checked_as_elsewhere(tmp_path: Path) -> None:
    model, ids = random_model(GPT2, engine=TorchEngine("bfloat16", "cpu")), random_ids(GPT2, 70)
    spilled, held = model.trace(ids, ["*"], spill=tmp_path / "spill"), model.trace(ids, ["*"])
    assert all(np.array_equal(spilled[name], held[name], equal_nan=True) for name in held)
    assert held.save(tmp_path / "held.safetensors").stat().st_size > 0
    assert (held.engine, held.dtype) == ("torch:cpu", "bfloat16")
    assert all(check.holds for check in model.verify())


def test_generating_and_embedding_give_what_they_give_elsewhere() -> None:
    model, reference = random_model(LLAMA, engine=TorchEngine("float64", "cpu")), random_model(LLAMA)
    prompts = [random_ids(LLAMA, 11).tolist(), random_ids(LLAMA, 3).tolist()]
    settings: dict[str, Any] = {"max_tokens": 6, "seed": 3}
    expected = [one.tokens for one in reference.generate_many(prompts, **settings)]
    assert [one.tokens for one in model.generate_many(prompts, **settings)] == expected
    edits = [Zero("layers.0.attn.z", heads=[1])]
    for name in ("layers.0.attn.pattern", "layers.1.resid_post"):
        steps = [m.generate(prompts[0], points=[name], edits=edits, **settings).steps for m in (model, reference)]
        for one, other in zip(*steps, strict=True):
            assert one.token == other.token and one.trace is not None and other.trace is not None
            assert off(one.trace[name], other.trace[name]) < 1e-10
    assert off(model.embed(prompts), reference.embed(prompts)) < 1e-10
