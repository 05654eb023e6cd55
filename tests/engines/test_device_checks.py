"""The script that checks the torch engine on a machine with a GPU: it runs anywhere, and finds a fault."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cutaway.engines.torch.engine import TorchEngine

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_checks.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("device_checks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_checks_hold_on_the_cpu(script: Any, tmp_path: Path, capsys: Any) -> None:
    assert script.main(["--device", "cpu", "--quick", "--dtypes", "float64", "--json", str(tmp_path / "told")]) == 0
    told = json.loads((tmp_path / "told").read_text())
    assert told["device"] == "cpu" and len(told["checks"]) == 10
    assert capsys.readouterr().out.count("ok   ") == len(told["checks"])


def test_a_wrong_engine_ends_with_status_1(script: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(TorchEngine, "softmax", lambda self, x: torch.softmax(1.01 * x, -1))
    assert script.main(["--device", "cpu", "--quick", "--dtypes", "float32"]) == 1
    assert "WRONG gpt2" in capsys.readouterr().out


def test_mixtures_in_16_bits_are_checked_up_to_their_router(script: Any) -> None:
    spec = script.specs()["mixtral-8x7b"]
    [[what, off, within]] = list(script.checks("mixtral", spec, "cpu", "bfloat16"))
    assert what.startswith("points up to the router") and 0 < off < within


def test_every_shape_of_the_catalog_is_among_them_in_small(script: Any) -> None:
    found = script.specs()
    assert all(spec.count().total < 200_000 for spec in found.values())
    attentions = [layer.attention for spec in found.values() for layer in spec.layers]
    for feature in ("window", "chunk", "cap", "qk_norm", "growth", "latent", "rotary", "qkv_bias"):
        assert any(getattr(attention, feature) for attention in attentions), feature
    assert {spec.causal for spec in found.values()} == {True, False}
