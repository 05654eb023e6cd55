"""Gradients of an edited pass: against finite differences of the same edits on the reference engine, in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gradients import CAPPED, LATENT, LENGTH, SPECS, surprise

from adapters import adaptable, of_llama, with_magnitudes, write_adapter
from cutaway import CutawayError, Trace
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.torch.engine import TorchEngine
from cutaway.model import Model
from cutaway.points import points_of
from cutaway.spec import ModelSpec
from cutaway.trace.edits import (
    PARTS,
    Adapter,
    Add,
    Drop,
    Edit,
    Freeze,
    Function,
    Keep,
    Knockout,
    Mean,
    Replace,
    Resample,
    Scale,
    Without,
    Zero,
)
from random_models import GPT2, LLAMA, POST, random_ids, random_model

ARRAY = np.random.default_rng(7).standard_normal((LENGTH, 12))
OTHER = random_model(LLAMA).trace(random_ids(LLAMA, LENGTH, 5), ["*"])
PLAIN = random_model(LLAMA).trace(random_ids(LLAMA, LENGTH), ["*"])


def on_torch(spec: ModelSpec, dtype: str = "float64") -> Model:
    return random_model(spec, engine=TorchEngine(dtype, "cpu"))


def bent(values: Any, place: Any) -> Any:
    """The same in NumPy and in torch, and no straight line."""
    return values * values * 0.5 + 0.25


EDITS: list[tuple[ModelSpec, list[Edit]]] = [
    (LLAMA, [Zero("layers.0.attn.z", heads=[2])]),
    (LLAMA, [Zero("layers.0.mlp.out")]),
    (LLAMA, [Zero("layers.*.attn.pattern", keys=[3], positions="4:")]),
    (LLAMA, [Zero("embed.tokens", positions=[0]), Add("embed.tokens", ARRAY[2], positions=[0, 3])]),
    (LLAMA, [Zero("layers.1.attn.head_out", heads=[1, 2], positions=[5, 8])]),
    (LLAMA, [Zero("layers.1.attn.z", heads=[1]), Zero("layers.1.attn.head_out", heads=[1])]),
    (LLAMA, [Mean("layers.*.mlp.act", neurons=[0, 4])]),
    (LLAMA, [Mean("layers.0.attn.v", positions=[2, 3], heads=[1])]),
    (LLAMA, [Mean("layers.0.resid_post", source=OTHER)]),
    (LLAMA, [Mean("logits", tokens=[3])]),
    (LLAMA, [Resample("layers.0.attn.k_rot", OTHER, seed=3)]),
    (LLAMA, [Replace("layers.0.resid_mid", ARRAY, positions=[0, -1])]),
    (LLAMA, [Replace("layers.1.attn.q", OTHER, positions=[1], source_positions=[4])]),
    (LLAMA, [Scale("layers.0.mlp.out", 3.0), Replace("layers.1.attn.z", PLAIN)]),
    (LLAMA, [Scale("layers.0.resid_post", 0.3), Freeze("layers.1.attn.pattern", PLAIN)]),
    (LLAMA, [Add("layers.0.resid_post", ARRAY[0], scale=-2.0), Scale("layers.0.resid_post", 1.5, positions="3:")]),
    (LLAMA, [Scale("layers.1.attn.scores", 0.25), Scale("logits", 0.5, tokens=[3])]),
    (LLAMA, [Knockout("layers.*.attn.masked", [[5, 2], [8, 0]], heads=[0, 3])]),
    (LLAMA, [Knockout("layers.1.attn.pattern", [[5, 2]])]),
    (LLAMA, [Drop("layers.*.attn.masked", keys=[3]), Keep("layers.0.attn.z", heads=[0, 1])]),
    (LLAMA, [Function("layers.0.mlp.up", bent), Function("layers.1.attn.pattern", bent)]),
    (LLAMA, [Function("layers.0.attn.q", lambda values, place: 0.5), Scale("layers.1.mlp.gate", 2)]),
    (GPT2, [Zero("embed.positions"), Mean("layers.0.attn.norm")]),
    (GPT2, [Function("layers.*.attn.head_out", bent, heads=[0])]),
    (POST, [Mean("layers.0.attn.sum", positions=[2]), Scale("layers.1.attn.masked", 0.5)]),
    (LATENT, [Scale("layers.0.moe.gates", 0.5), Zero("layers.0.attn.kv_latent", positions=[3])]),
    (LATENT, [Drop("layers.0.moe.expert_out", experts=[0, 3]), Add("layers.0.attn.k_shared", [0.5, -0.5])]),
    (CAPPED, [Scale("layers.0.attn.q_normed", 2.0), Zero("layers.1.mlp.raw", positions=[-1])]),
]
for _spec in (GPT2, LLAMA, POST, CAPPED):
    for _part in PARTS:
        try:
            random_model(_spec).trace([1, 2, 3], (), edits=[Without(_part)])
        except CutawayError:
            continue  # the model has no such part
        EDITS.append((_spec, [Without(_part)]))


def followed(run: Trace, edits: list[Edit], reference: Model | None = None) -> int:
    """Compare every gradient with the slope that the reference engine finds; how many of them were not 0."""
    [spec] = [spec for spec in SPECS if spec.name == run.spec.name]
    reference, ids = reference or random_model(spec, engine=NumpyEngine("float64")), random_ids(spec, LENGTH)
    felt = 0
    for point in points_of(spec):
        if point.name in ("tokens", "moe.chosen", "pooler.out"):
            continue
        found = run.grad[point]
        direction = np.random.default_rng(1).standard_normal(found.shape)
        if point.info.shape[-1] == "S":  # an edit reaches what a query may see
            direction[np.isneginf(run[f"layers.{point.layer}.attn.masked"])] = 0

        def measured(step: float, point: Any = point, direction: np.ndarray = direction) -> float:
            def nudged(values: np.ndarray, place: Any) -> np.ndarray:
                indices = [place.positions if i == place.axis("T") else own for i, own in enumerate(place.indices)]
                return values + step * direction[np.ix_(*indices)]

            return float(surprise(reference.trace(ids, ["logits"], edits=[*edits, Function(point, nudged)]).logits))

        change = (measured(1e-5) - measured(-1e-5)) / 2e-5
        assert float((found * direction).sum()) == pytest.approx(change, rel=2e-6, abs=2e-8), point
        felt += change != 0
    return felt


@pytest.mark.filterwarnings("ignore:.*changed nothing")
@pytest.mark.parametrize(("spec", "edits"), EDITS, ids=[f"{s.name}: {'; '.join(map(str, e))}" for s, e in EDITS])
def test_every_gradient_is_the_slope_of_the_edited_run(spec: ModelSpec, edits: list[Edit]) -> None:
    run = on_torch(spec).trace(random_ids(spec, LENGTH), ["*"], gradients=True, edits=edits)
    run.backward(lambda run: surprise(run.logits))
    assert followed(run, edits) > 5


@pytest.mark.filterwarnings("ignore:.*changed nothing")
@pytest.mark.parametrize(("spec", "edits"), EDITS, ids=[f"{s.name}: {'; '.join(map(str, e))}" for s, e in EDITS])
def test_its_values_and_reports_are_those_of_the_edited_run(spec: ModelSpec, edits: list[Edit]) -> None:
    model, ids = on_torch(spec), random_ids(spec, LENGTH)
    run, plain = model.trace(ids, ["*"], gradients=True, edits=edits), model.trace(ids, ["*"], edits=edits)
    assert run.points == plain.points
    for name in run:
        known = np.isfinite(plain[name]) & np.isfinite(run[name])
        np.testing.assert_allclose(run[name][known], plain[name][known], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(run.last_logits, plain.last_logits, rtol=1e-9, atol=1e-11)
    for mine, other in zip(run.edits, plain.edits, strict=True):
        assert mine.fired == other.fired and str(mine.edit) == str(other.edit)
        assert mine.moved.largest == pytest.approx(other.moved.largest, rel=1e-8)


def test_what_an_edit_replaced_has_no_gradient_and_what_replaced_it_has() -> None:
    run = on_torch(LLAMA).trace(
        random_ids(LLAMA, LENGTH),
        ["*"],
        gradients=True,
        edits=[Zero("layers.1.attn.z", heads=[1]), Zero("layers.0.mlp.out")],
    )
    run.backward(lambda run: surprise(run.logits))
    assert not run.grad["layers.0.mlp.act"].any() and not run.grad["layers.0.mlp.norm"].any()
    assert not run.grad["layers.1.attn.q"][1].any() and not run.grad["layers.1.attn.pattern"][1].any()
    assert run.grad["layers.1.attn.q"][0].any()
    # An address means the number that the trace shows there, which is the one that was used: a 0 that may grow.
    assert not run["layers.0.mlp.out"].any() and run.grad["layers.0.mlp.out"].all()
    assert run.grad["layers.1.attn.z"][1].any()


def test_an_edit_that_changes_no_number_cuts_all_the_same() -> None:
    model, ids = on_torch(LLAMA), random_ids(LLAMA, LENGTH)
    patch = Replace("layers.0.resid_post", model.trace(ids, ["*"], gradients=True))
    with pytest.warns(UserWarning, match="changed nothing"):
        run = model.trace(ids, ["*"], gradients=True, edits=[patch])
    run.backward(lambda run: run.logits[-1, 3])
    assert not run.grad["layers.0.mlp.out"].any() and not run.grad["embed.out"].any()
    assert run.grad["layers.1.resid_pre"].any()


def test_values_from_the_unedited_run_are_held_as_they_are() -> None:
    """Their own hanging on the prompt's vectors is no part of the edited run's gradient."""
    model, ids = on_torch(LLAMA), random_ids(LLAMA, LENGTH)
    edits = [Scale("layers.0.mlp.out", 2.0), Replace("layers.1.attn.z")]
    run = model.trace(ids, ["*"], gradients=True, edits=edits)
    run.backward(lambda run: surprise(run.logits))
    assert followed(run, [edits[0], Replace("layers.1.attn.z", PLAIN)]) > 5


@pytest.mark.parametrize("lengths", [False, True], ids=["LoRA", "DoRA"])
def test_gradients_go_back_through_an_adapter_too(lengths: bool, tmp_path: Path) -> None:
    tensors = with_magnitudes(of_llama()) if lengths else of_llama()
    folder = write_adapter(tmp_path / "adapter", tensors, use_dora=lengths)
    edits: list[Edit] = [Adapter(folder), Zero("layers.0.attn.z", heads=[2])]
    ids = random_ids(LLAMA, LENGTH)
    run = adaptable(engine="torch:cpu").trace(ids, ["*"], gradients=True, edits=edits)
    run.backward(lambda run: surprise(run.logits))
    plain = adaptable(engine="torch:cpu").trace(ids, ["*"], edits=edits)
    assert [report.fired for report in run.edits] == [report.fired for report in plain.edits]
    assert followed(run, edits, adaptable()) > 20


def test_gradients_of_vectors_in_the_place_of_tokens() -> None:
    vectors, edits = np.random.default_rng(3).standard_normal((LENGTH, 12)), [Mean("layers.0.mlp.out", positions=[4])]
    run = on_torch(LLAMA).trace(vectors, ["embed.tokens"], gradients=True, edits=edits)
    run.backward(lambda run: surprise(run.logits))
    reference, step = random_model(LLAMA), 1e-5 * np.random.default_rng(4).standard_normal(vectors.shape)
    up, down = (reference.trace(vectors + sign * step, ["logits"], edits=edits).logits for sign in (1, -1))
    assert float((run.grad["embed.tokens"] * step).sum()) * 2 == pytest.approx(surprise(up) - surprise(down), rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_edits_in_the_smaller_precisions_give_the_gradients_of_the_exact_run(dtype: str) -> None:
    edits = [
        Add("layers.0.resid_post", ARRAY[1]),
        Mean("layers.1.attn.z", heads=[0]),
        Function("layers.1.mlp.up", bent),
    ]
    grads = []
    for model in (on_torch(LLAMA, dtype), on_torch(LLAMA)):
        run = model.trace(random_ids(LLAMA, LENGTH), ["layers.0.resid_mid"], gradients=True, edits=edits)
        run.backward(lambda run: surprise(run.logits.double()))
        grads.append(run.grad["layers.0.resid_mid"])
    within = 1e-4 if dtype == "float32" else 0.1
    assert np.abs(grads[0] - grads[1]).max() < within * np.abs(grads[1]).max()


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (Function("layers.0.mlp.up", lambda values, place: np.tanh(values)), "must compute with torch, not with NumPy"),
        (Function("layers.0.mlp.up", lambda values, place: torch.ones(3, 4)), r"gives shape \[3, 4\] where"),
        (Function("layers.0.mlp.up", lambda values, place: "much"), "gave str instead of numbers"),
        (Add("layers.0.mlp.up", [1.0, 2.0]), "it must broadcast to that"),
        (Drop("layers.0.attn.masked", keys=[0, 1], positions=[1]), None),
        (Knockout("layers.0.attn.masked", [[0, 0]]), "leaves query 0 of head 0 no key to listen to"),
        (Scale("layers.0.resid_post", 1e300), "computes no usable numbers with these edits"),
        (Zero("layers.0.attn.q_normed"), "q_normed"),
    ],
)
def test_what_cannot_be_is_refused_as_without_gradients(edit: Edit, why: str | None) -> None:
    asked: dict[str, Any] = {"gradients": True, "edits": [edit]}
    if why is None:
        assert on_torch(LLAMA).trace(random_ids(LLAMA, LENGTH), (), **asked).edits
        return
    with pytest.raises(CutawayError, match=why):
        on_torch(LLAMA).trace(random_ids(LLAMA, LENGTH), (), **asked)


def test_an_edit_outlives_no_pass_with_gradients() -> None:
    model, ids = on_torch(LLAMA), random_ids(LLAMA, LENGTH)
    before = model.trace(ids, ["*"])
    model.trace(ids, ["*"], gradients=True, edits=[Zero("layers.*.attn.z"), Without("mask")]).backward(
        lambda run: run.logits.sum()
    )
    after = model.trace(ids, ["*"])
    assert all(np.array_equal(before[point], after[point], equal_nan=True) for point in before if point != "tokens")
