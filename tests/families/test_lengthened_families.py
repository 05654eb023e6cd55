"""A model with a DoRA adapter, which says how long each changed row is, computes what PEFT computes with it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from compared import deviation, prompt
from gguf_files import QTYPE, write_gguf
from llama_like import SCALED
from test_adapted_families import EXACT, SINGLE, TARGETS, base, every_family, logits_of, off, with_adapter
from test_families_gguf import WIDE

import cutaway

DORA = {"r": 3, "lora_alpha": 5, "use_dora": True}


@every_family
def test_every_target_computes_what_peft_computes_as_an_edit_and_merged(family: str, tmp_path: Path) -> None:
    tiny, targets = TARGETS[family]
    theirs = with_adapter(base(tiny, tmp_path / "base"), tmp_path / "adapter", target_modules=targets, **DORA)
    model = cutaway.load(tmp_path / "base", engine="numpy", dtype="float64")
    merged = model.merged(tmp_path / "adapter")
    adapter = cutaway.edits.Adapter(tmp_path / "adapter")
    for length in (1, 41, 273):  # one row, padded blocks, past a chunk of 256 rows
        ids = prompt(67, length)
        expected = logits_of(theirs, ids)
        plain = model.trace(ids, ["logits"])["logits"]
        assert deviation(plain, expected) > 0.1  # the adapter is felt
        assert off(model, expected, ids, adapter) < EXACT
        assert off(merged, expected, ids) < EXACT
        np.testing.assert_array_equal(model.trace(ids, ["logits"])["logits"], plain)  # and off again, to the bit
    out = model.generate(ids[:9], 5, temperature=0, edits=[adapter])
    assert out.tokens == merged.generate(ids[:9], 5, temperature=0).tokens


@every_family
@pytest.mark.parametrize("engine", ("cpu", "torch:cpu", "numpy"))
def test_every_engine_computes_it_in_single_precision(family: str, engine: str, tmp_path: Path) -> None:
    tiny, targets = TARGETS[family]
    theirs = with_adapter(base(tiny, tmp_path / "base"), tmp_path / "adapter", target_modules=targets, **DORA)
    model = cutaway.load(tmp_path / "base", engine=engine, dtype="float32")
    merged = model.merged(tmp_path / "adapter")
    ids = prompt(67, 65)
    expected = logits_of(theirs, ids)
    assert off(model, expected, ids, cutaway.edits.Adapter(tmp_path / "adapter")) < SINGLE
    assert off(merged, expected, ids) < SINGLE


@pytest.mark.parametrize("family", ("llama", "gpt2"))
@pytest.mark.parametrize("kind", (QTYPE.Q8_0, QTYPE.Q4_0), ids=lambda kind: kind.name)
def test_the_rows_of_a_quantised_base_have_their_lengths_as_they_are_stored(
    family: str, kind: QTYPE, tmp_path: Path
) -> None:
    reference = WIDE[family].build(torch.float64)
    path = write_gguf(tmp_path / "base.gguf", reference, {"": kind})
    targets = [name for name in TARGETS[family][1] if name != "lm_head"]
    theirs = with_adapter(reference, tmp_path / "adapter", target_modules=targets, **DORA)
    ids = prompt(50, 40)
    expected = logits_of(theirs, ids)
    adapter = cutaway.edits.Adapter(tmp_path / "adapter")
    exact = cutaway.load(path, engine="numpy", dtype="float64")
    assert off(exact, expected, ids, adapter) < EXACT
    for engine in ("numpy", "cpu"):
        model = cutaway.load(path, engine=engine, dtype="float32")
        assert off(model, expected, ids, adapter) < SINGLE
        assert off(model.merged(adapter), expected, ids) < SINGLE


def test_with_another_adapter_each_adds_what_it_makes_of_the_base(tmp_path: Path) -> None:
    made = with_adapter(base(SCALED[2], tmp_path / "base"), tmp_path / "one", target_modules=["q_proj"], **DORA)
    fresh = base(SCALED[2], tmp_path / "base")
    with_adapter(fresh, tmp_path / "two", seed=1, r=2, target_modules=["q_proj", "o_proj"])
    made.load_adapter(tmp_path / "two", adapter_name="two", autocast_adapter_dtype=False)
    made.base_model.set_adapter(["default", "two"])
    model = cutaway.load(tmp_path / "base", engine="numpy", dtype="float64")
    both = [cutaway.edits.Adapter(tmp_path / name) for name in ("one", "two")]
    ids = prompt(67, 30)
    expected = logits_of(made, ids)
    for order in (both, both[::-1]):
        assert off(model, expected, ids, *order) < EXACT
        assert off(model.merged(order), expected, ids) < EXACT
