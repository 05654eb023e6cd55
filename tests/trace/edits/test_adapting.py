"""An adapter is an edit like the others: scoped to its run, counted, told, written down, and gone afterwards."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cutaway
from adapters import EXPERTS, adaptable, of_experts, of_llama, pair, write_adapter
from cutaway.errors import CutawayError
from cutaway.model import Model
from cutaway.trace.edits import Adapter, Zero, edit_from_json, edits_key
from random_models import LLAMA, random_ids, random_model

ENGINES = (("numpy", "float64"), ("cpu", "float32"), ("torch:cpu", "float64"))
every_engine = pytest.mark.parametrize(("engine", "dtype"), ENGINES, ids=[name for name, _ in ENGINES])
POINTS = ["layers.*.attn.q", "layers.*.attn.pattern", "layers.*.attn.head_out", "layers.*.attn.raw",
          "layers.*.mlp.raw", "layers.*.resid_post", "logits"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "french", of_llama())


def ids_of(length: int = 20, seed: int = 0) -> list[int]:
    return random_ids(LLAMA, length, seed).tolist()


def same(one: Any, other: Any, points: list[str] | None = None) -> None:
    for at in one.points if points is None else points:
        np.testing.assert_array_equal(one[at], other[at], err_msg=at)


@every_engine
def test_what_it_adds_is_scale_times_alpha_over_r_of_two_narrow_products(folder: Path, engine: str, dtype: str) -> None:
    model, ids = adaptable(engine=engine, dtype=dtype), ids_of()
    points = ["layers.0.attn.norm", "layers.0.attn.q"]
    plain = model.trace(ids, points)
    run = model.trace(ids, points, edits=[Adapter(folder, scale=0.5)])
    tensors = of_llama()
    down, up = (tensors[f"model.layers.0.self_attn.q_proj.lora_{side}.weight"].astype(np.float64) for side in "AB")
    delta = 0.5 * 3 / 2 * (plain["layers.0.attn.norm"] @ down.T) @ up.T  # [T, H · d_head]
    expected = plain["layers.0.attn.q"] + delta.reshape(20, 4, 6).swapaxes(0, 1)
    np.testing.assert_allclose(run["layers.0.attn.q"], expected, rtol=0, atol=1e-5 if dtype == "float32" else 1e-12)


@every_engine
def test_a_run_tells_where_it_fired_how_much_it_changed_and_how_far_the_logits_moved(
    folder: Path, engine: str, dtype: str
) -> None:
    model, ids = adaptable(engine=engine, dtype=dtype), ids_of()
    run, plain = model.trace(ids, edits=[Adapter(folder)]), model.trace(ids)
    (report,) = run.edits
    at = ["layers.0.attn.q", "layers.0.mlp.raw", "layers.1.attn.q", "layers.1.mlp.raw"]
    assert report.fired == dict(zip(at, (480, 240, 480, 240), strict=True))
    assert report.changed == report.elements == 1440
    assert str(report).startswith("adapter french: fired at layers.0.attn.q, layers.0.mlp.raw, layers.1.attn.q and 1")
    assert repr(report.edit).startswith("Adapter(source=")
    assert report.moved.largest == pytest.approx(np.abs(run.last_logits - plain.last_logits).max(), rel=1e-6)
    assert report.moved.largest > 0.01


@every_engine
def test_nothing_of_it_outlives_the_run(folder: Path, engine: str, dtype: str) -> None:
    model, ids = adaptable(engine=engine, dtype=dtype), ids_of()
    before = model.trace(ids, POINTS)
    model.trace(ids, POINTS, edits=[Adapter(folder)])
    model.generate(ids, max_tokens=3, temperature=0, edits=[Adapter(folder)])
    model.merged(folder).trace(ids)
    same(model.trace(ids, POINTS), before)
    fresh = adaptable(engine=engine, dtype=dtype)
    same(fresh.trace(ids, POINTS), before)


@every_engine
def test_looking_changes_nothing_and_the_identities_hold_under_it(folder: Path, engine: str, dtype: str) -> None:
    model, ids = adaptable(engine=engine, dtype=dtype), ids_of(70)
    seen, plain = (model.trace(ids, points, edits=[Adapter(folder)]) for points in (POINTS, ["logits"]))
    close = dict(rtol=0, atol=1e-5 if dtype == "float32" else 1e-12)
    if engine == "torch:cpu":
        np.testing.assert_allclose(seen["logits"], plain["logits"], **close)
    else:
        np.testing.assert_array_equal(seen["logits"], plain["logits"])
    for layer in range(2):
        parts = seen[f"layers.{layer}.attn.head_out"].sum(0)
        np.testing.assert_allclose(parts, seen[f"layers.{layer}.attn.raw"], **close)
    assert seen.edits[0].elements == 70 * 72  # what is worked out later is no part of the pass


def test_an_adapter_of_the_output_projection_and_the_head_is_in_all_that_is_worked_out_of_them(tmp_path: Path) -> None:
    tensors = pair("model.layers.1.self_attn.o_proj", 12, 24) | pair("lm_head", 23, 12)
    folder = write_adapter(tmp_path / "out", tensors, target_modules=r".*1\.self_attn\.o_proj|lm_head")
    model, ids = adaptable(), ids_of(30)
    run = model.trace(ids, POINTS, edits=[Adapter(folder)])
    merged = model.merged(folder).trace(ids, POINTS)
    for at in POINTS[2:]:
        for point in [p for p in run.points if p.endswith(at.split("*")[-1])]:
            np.testing.assert_allclose(run[point], merged[point], atol=1e-12, err_msg=point)
    assert set(run.edits[0].fired) == {"layers.1.attn.raw", "logits"}


@pytest.mark.parametrize(("engine", "dtype"), ENGINES[:2], ids=["numpy", "cpu"])
def test_a_generation_under_it_is_that_of_the_merged_model(folder: Path, engine: str, dtype: str) -> None:
    model, ids = adaptable(engine=engine, dtype=dtype), ids_of(9)
    out = model.generate(ids, max_tokens=8, temperature=0, edits=[Adapter(folder)], points=["logits"])
    assert out.tokens == model.merged(folder).generate(ids, max_tokens=8, temperature=0).tokens
    whole = model.trace(ids + out.tokens[:-1], ["logits"], edits=[Adapter(folder)])
    for step in out.steps:
        here = slice(step.trace.past, step.trace.past + len(step.trace.prompt.ids))
        np.testing.assert_allclose(
            step.trace.logits, whole.logits[here], rtol=0, atol=2e-5 if engine == "cpu" else 1e-11
        )
        assert step.trace.edits[0].elements == 72 * len(step.trace.prompt.ids)


@pytest.mark.parametrize(("engine", "dtype"), ENGINES[:2], ids=["numpy", "cpu"])
def test_a_sweep_gives_each_prompt_what_a_trace_of_it_gives_bit_for_bit(folder: Path, engine: str, dtype: str) -> None:
    model = adaptable(engine=engine, dtype=dtype)
    prompts = [ids_of(length, length) for length in (1, 17, 70, 30)]
    for ids, swept in zip(prompts, model.sweep(prompts, POINTS, edits=[Adapter(folder)]), strict=True):
        alone = model.trace(ids, POINTS, edits=[Adapter(folder)])
        same(swept, alone)
        assert swept.edits[0].fired == alone.edits[0].fired
        assert swept.edits[0].changed == alone.edits[0].changed == 72 * len(ids)


def test_a_sweep_into_files_knows_itself_by_the_adapter(folder: Path, tmp_path: Path) -> None:
    model, prompts = adaptable(), [ids_of(length, length) for length in (5, 12)]
    swept = model.sweep(prompts, ["layers.1.resid_post"], to=tmp_path / "swept", edits=[Adapter(folder)])
    again = model.sweep(prompts, ["layers.1.resid_post"], to=tmp_path / "swept", edits=[Adapter(folder)])
    expected = model.trace(prompts[1], ["layers.1.resid_post"], edits=[Adapter(folder)])["layers.1.resid_post"]
    for found in (swept, again):
        np.testing.assert_array_equal(found[1]["layers.1.resid_post"], expected)
    with pytest.raises(CutawayError):
        model.sweep(prompts, ["layers.1.resid_post"], to=tmp_path / "swept", edits=[Adapter(folder, 0.5)])


def test_of_the_fused_layers_only_the_adapted_ones_go_by_stages(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", of_llama((1,)), layers_to_transform=[1])
    model = adaptable(engine="cpu", dtype="float32")
    assert model.trace(ids_of(), []).fused_layers == {0, 1}
    assert model.trace(ids_of(), [], edits=[Adapter(folder)]).fused_layers == {0}
    assert model.trace(ids_of(), []).fused_layers == {0, 1}
    assert model.merged(folder).trace(ids_of(), []).fused_layers == {0, 1}


@every_engine
def test_experts_are_adapted_each_by_itself(tmp_path: Path, engine: str, dtype: str) -> None:
    folder = write_adapter(tmp_path / "experts", of_experts(), target_modules=["w1", "w2"])
    model = adaptable(EXPERTS, engine, dtype, family="mixtral")
    prompts = [ids_of(length, length) for length in (5, 18)]
    merged = model.merged(folder)
    for ids, swept in zip(prompts, model.sweep(prompts, ["logits"], edits=[Adapter(folder)]), strict=True):
        run = model.trace(ids, ["logits"], edits=[Adapter(folder)])
        np.testing.assert_allclose(run["logits"], merged.trace(ids, ["logits"])["logits"], atol=2e-5)
        assert run.edits[0].fired == {f"layers.{i}.moe.expert_out": len(ids) * 2 * 32 for i in range(2)}
        assert swept.edits[0].fired == run.edits[0].fired


def test_an_adapter_of_experts_that_come_later_waits_for_them(tmp_path: Path) -> None:
    model = adaptable(EXPERTS, family="mixtral")
    ids = ids_of(1)
    busy = set(model.trace(ids, ["layers.0.moe.chosen"])["layers.0.moe.chosen"].ravel().tolist())
    idle = min({0, 1, 2, 3} - busy)
    module = f"model.layers.0.block_sparse_moe.experts.{idle}.w2"
    folder = write_adapter(tmp_path / "idle", pair(module, 12, 20), target_modules=rf"model\.layers\.0\..*\.{idle}\.w2")
    with pytest.raises(CutawayError, match="adapter idle fired nowhere: none of the matrices"):
        model.trace(ids, edits=[Adapter(folder)])
    with pytest.warns(UserWarning, match="adapter idle never acted in this generation"):
        model.generate(ids, max_tokens=1, edits=[Adapter(folder)])


def test_it_goes_with_other_edits_in_one_run(folder: Path) -> None:
    model, ids = adaptable(), ids_of()
    zero = Zero("layers.1.mlp.out", positions=[3])
    both = model.trace(ids, POINTS, edits=[zero, Adapter(folder)])
    merged = model.merged(folder).trace(ids, POINTS, edits=[zero])
    for point in both.points:
        np.testing.assert_allclose(both[point], merged[point], atol=1e-12)
    assert [report.changed > 0 for report in both.edits] == [True, True]
    assert both.edits[0].moved.largest != both.edits[1].moved.largest


def test_no_scale_changes_nothing_and_is_told(folder: Path) -> None:
    model, ids = adaptable(), ids_of()
    with pytest.warns(UserWarning, match="adapter french, 0 times changed nothing"):
        run = model.trace(ids, POINTS, edits=[Adapter(folder, scale=0)])
    same(run, model.trace(ids, POINTS))


def test_it_is_written_down_and_read_back(folder: Path) -> None:
    edit = Adapter(folder, scale=0.25)
    assert edit.to_json() == {"adapter": str(folder), "scale": 0.25}
    assert edit_from_json(json.dumps(edit.to_json())) == edit
    assert Adapter(folder).to_json() == {"adapter": str(folder)}
    assert edit != Adapter(folder)
    model, ids = adaptable(), ids_of()
    run = model.trace(ids, POINTS, edits=edit.to_json())
    same(run, model.trace(ids, POINTS, edits=[edit]))
    assert run.edits[0].edit == edit
    assert run.edits[0].edit.to_json() == edit.to_json()


def test_its_key_changes_with_its_files(folder: Path) -> None:
    before = edits_key([Adapter(folder)])
    assert edits_key([Adapter(folder)]) == before
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    assert edits_key([Adapter(folder)]) != before


def test_one_file_beside_its_configuration_is_the_same_adapter(folder: Path) -> None:
    model, ids = adaptable(), ids_of()
    named = (folder / "adapter_model.safetensors").rename(folder / "step-100.safetensors")
    run = model.trace(ids, edits=[Adapter(named)])
    assert str(run.edits[0].edit) == "adapter step-100.safetensors"
    assert run.edits[0].changed == 1440


def test_it_is_planned_like_any_run(folder: Path) -> None:
    model = adaptable()
    assert model.plan(ids_of(), edits=[Adapter(folder)]).bytes == model.plan(ids_of()).bytes


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda folder: {"adapter": 3}, "An adapter is a folder, or a .safetensors file, not 3"),
        (lambda folder: {"adapter": ""}, "An adapter is a folder"),
        (lambda folder: {"adapter": str(folder), "scale": "much"}, "must be a number; it is 'much'"),
        (lambda folder: {"adapter": str(folder), "scale": float("nan")}, "must be finite; it is nan"),
        (lambda folder: {"adapter": str(folder), "factor": 2}, "'adapter' takes scale; 'factor' is none of them"),
        (lambda folder: {"adapter": str(folder / "nowhere")}, "There is no folder .*nowhere"),
    ],
)
def test_what_is_no_adapter_is_refused(folder: Path, edit: Any, said: str) -> None:
    with pytest.raises(CutawayError, match=said):
        adaptable().trace(ids_of(), edits=[edit(folder)])


def test_a_model_without_names_of_hugging_face_cannot_be_adapted(folder: Path) -> None:
    with pytest.raises(CutawayError, match="small-llama has no Hugging Face names"):
        random_model(LLAMA).trace(ids_of(), edits=[Adapter(folder)])
    with pytest.raises(CutawayError, match="has no Hugging Face names"):
        cutaway.load("toy").merged(folder)


def test_models_are_adapted_from_several_threads_at_once(folder: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model: Model = adaptable(engine="cpu", dtype="float32")
    expected = {n: model.trace(ids_of(n), ["logits"], edits=[Adapter(folder)])["logits"] for n in range(1, 9)}
    plain = {n: model.trace(ids_of(n), ["logits"])["logits"] for n in range(1, 9)}

    def both(n: int) -> tuple[np.ndarray, np.ndarray, int]:
        run = model.trace(ids_of(n), ["logits"], edits=[Adapter(folder)])
        return run["logits"], model.trace(ids_of(n), ["logits"])["logits"], run.edits[0].elements

    with ThreadPoolExecutor(4) as pool:
        for n, (adapted, other, elements) in zip(range(1, 9), pool.map(both, range(1, 9)), strict=True):
            np.testing.assert_array_equal(adapted, expected[n])
            np.testing.assert_array_equal(other, plain[n])
            assert elements == 72 * n
