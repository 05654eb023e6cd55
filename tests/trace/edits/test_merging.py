"""A model with adapters in its weights: the sum in float32, the rest as it lies in the file, the base untouched."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from adapters import adaptable, of_llama, with_magnitudes, write_adapter
from cutaway.errors import CutawayError
from cutaway.trace.edits import Adapter, Zero, merging
from random_models import LLAMA, random_ids

IDS = random_ids(LLAMA, 20).tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "french", of_llama())


def test_a_merged_matrix_is_the_sum_rounded_once_to_float32(folder: Path) -> None:
    model = adaptable(dtype="float32")
    merged = model.merged(folder, scale=0.5)
    tensors = {name: array.astype(np.float64) for name, array in of_llama().items()}
    down, up = (tensors[f"model.layers.1.mlp.down_proj.lora_{side}.weight"] for side in "AB")
    base = model.parameters.stored["layers.1.mlp.down.weight"].dequantise(np.float64)
    found = merged.parameters.stored["layers.1.mlp.down.weight"]
    assert found.kind == "F32"
    np.testing.assert_array_equal(found.dequantise(np.float32), (base + 0.5 * 1.5 * (up @ down)).astype(np.float32))


def test_matrices_of_many_rows_are_summed_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = adaptable().merged(folder).parameters.stored
    monkeypatch.setattr(merging, "AT_ONCE", 50)  # 2 rows of 20
    parts = adaptable().merged(folder).parameters.stored
    for name, weight in whole.items():
        np.testing.assert_allclose(parts[name].dequantise(np.float64), weight.dequantise(np.float64), rtol=1e-14)


def test_all_other_weights_are_the_very_same(folder: Path) -> None:
    model = adaptable(dtype="float32")
    merged = model.merged(folder)
    changed = {name for name, w in merged.parameters.stored.items() if w is not model.parameters.stored[name]}
    assert changed == {f"layers.{i}.{part}.weight" for i in (0, 1) for part in ("attn.q", "mlp.down")}
    size = sum(merged.parameters.stored[name].nbytes for name in changed)
    assert merged.origin == f"made for a test; adapter french merged into 4 matrices ({size / 1e6:,.1f} MB in memory)"
    assert model.origin == "made for a test"
    assert merged.spec == model.spec


def test_several_are_summed_each_with_its_own_scale(folder: Path, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "german", of_llama(seed=1))
    model = adaptable()
    run = model.trace(IDS, ["logits"], edits=[Adapter(folder, 0.5), Adapter(other, -1)])
    merged = model.merged([Adapter(folder, 0.5), Adapter(other, -1)])
    np.testing.assert_allclose(merged.trace(IDS, ["logits"])["logits"], run["logits"], atol=1e-11)
    twice = model.merged([folder, other], scale=2)
    again = model.trace(IDS, ["logits"], edits=[Adapter(folder, 2), Adapter(other, 2)])
    np.testing.assert_allclose(twice.trace(IDS, ["logits"])["logits"], again["logits"], atol=1e-11)


def test_taking_it_away_again_is_the_same_to_rounding_and_the_base_is_the_same_to_the_bit(folder: Path) -> None:
    model = adaptable()
    before = model.trace(IDS, ["logits"])["logits"]
    back = model.merged(folder).merged(folder, scale=-1)
    np.testing.assert_allclose(back.trace(IDS, ["logits"])["logits"], before, atol=1e-11)
    np.testing.assert_array_equal(model.trace(IDS, ["logits"])["logits"], before)


def test_what_the_torch_engine_was_trained_to_is_what_is_merged_into(folder: Path) -> None:
    import torch

    model = adaptable(engine="torch:cpu")
    with torch.no_grad():
        model.parameters.held["layers.0.attn.q.weight"].mul_(2.0)
    run = model.trace(IDS, ["logits"], edits=[Adapter(folder)])
    np.testing.assert_allclose(model.merged(folder).trace(IDS, ["logits"])["logits"], run["logits"], atol=1e-11)


def test_rows_get_their_lengths_from_what_the_torch_engine_was_trained_to(tmp_path: Path) -> None:
    import torch

    folder = write_adapter(tmp_path / "dora", with_magnitudes(of_llama()), use_dora=True)
    model, name = adaptable(engine="torch:cpu"), "layers.0.attn.q.weight"
    with torch.no_grad():
        model.parameters.held[name].mul_(2.0)
    run = model.trace(IDS, ["logits"], edits=[Adapter(folder)])
    merged = model.merged(folder)
    np.testing.assert_allclose(merged.trace(IDS, ["logits"])["logits"], run["logits"], atol=1e-11)
    lengths = np.linalg.norm(merged.parameters.held[name].detach().numpy(), axis=1)
    told = load_file(folder / "adapter_model.safetensors")
    magnitudes = told["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"]
    np.testing.assert_allclose(lengths, np.abs(magnitudes), rtol=1e-6)


def test_a_merged_model_is_a_model_like_any_other(folder: Path) -> None:
    merged = adaptable(engine="cpu", dtype="float32").merged(folder)
    assert all(check.holds for check in merged.verify())
    assert merged.trace(IDS, edits=[Adapter(folder)]).edits[0].changed > 0
    with pytest.raises(CutawayError, match="lacks what was merged in here: adapter french"):
        merged.compare(IDS)


def test_what_cannot_be_merged_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adaptable()
    with pytest.raises(CutawayError, match="merged takes adapters"):
        model.merged([])
    with pytest.raises(CutawayError, match="other edits have no weights to stay in"):
        model.merged([Adapter(folder), Zero("layers.0.mlp.out")])
    with pytest.raises(CutawayError, match="There is no folder"):
        model.merged(folder / "nowhere")
    with pytest.raises(CutawayError, match="Adapters are folders"):
        model.merged(3)
    with pytest.raises(CutawayError, match="would hold numbers that float32 cannot"):
        adaptable(dtype="float32").merged(folder, scale=1e39)
    monkeypatch.setattr(merging, "free_memory", lambda: 100)
    with pytest.raises(CutawayError, match="Merging makes 8,448 bytes of matrices, and 100 are free"):
        model.merged(folder)


def test_base_and_merged_take_turns_on_one_engine_each_with_its_own_weights(folder: Path) -> None:
    model = adaptable(engine="cpu", dtype="float32")
    merged = model.merged(folder)
    ids = IDS[:7]  # few rows: layers are fused
    assert merged.trace(ids, []).fused_layers == model.trace(ids, []).fused_layers == {0, 1}
    expected = adaptable(engine="cpu", dtype="float32").merged(folder).trace(ids, []).last_logits
    plain = adaptable(engine="cpu", dtype="float32").trace(ids, []).last_logits
    assert np.abs(expected - plain).max() > 0.01
    for _ in range(3):
        np.testing.assert_array_equal(model.trace(ids, []).last_logits, plain)
        np.testing.assert_array_equal(merged.trace(ids, []).last_logits, expected)
