"""Gradients at the points of a pass: against finite differences of the reference engine, and what they predict."""

from typing import Any

import numpy as np
import pytest
import torch

from cutaway import CutawayError, Trace
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.torch.engine import TorchEngine
from cutaway.errors import UnknownPoint
from cutaway.forward.transformer import transformer
from cutaway.model import Model
from cutaway.points import Point, Unwatched, points_of
from cutaway.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    QueryGrowth,
    RotarySpec,
    RouterSpec,
)
from cutaway.trace.gradients import attribution
from random_models import GPT2, LLAMA, POST, random_ids, random_model, random_parameters, random_weights

RMS = NormSpec("rms", 1e-6)
LATENT = ModelSpec(
    "small-latent",
    23,
    12,
    (
        LayerSpec(
            AttentionSpec(
                3, 3, 6, rotary=RotarySpec(1e4, 2, "adjacent"), latent=LatentSpec(5, 3, 4, 2, RMS), d_value=5
            ),
            ExpertsSpec(5, FeedForwardSpec(7, "silu", gated=True), RouterSpec(2, "sigmoid", renormalise=True)),
            RMS,
        ),
    ),
    final_norm=RMS,
    logit_cap=3.0,
)
CAPPED = ModelSpec(
    "small-capped",
    23,
    12,
    (
        LayerSpec(
            AttentionSpec(
                4, 2, 6, rotary=RotarySpec(1e4, 6), qk_norm=RMS, window=4, cap=2.0, growth=QueryGrowth(2, 0.5)
            ),
            FeedForwardSpec(9, "gelu_tanh", gated=True),
            RMS,
            out_norm=RMS,
        ),
        LayerSpec(AttentionSpec(2, 1, 6), FeedForwardSpec(9, "gelu"), RMS, parallel=True),
    ),
    token_types=2,
)
SPECS = (GPT2, LLAMA, POST, LATENT, CAPPED)
LENGTH = 9


class Nudged(Unwatched):
    """A tap that adds something at one point."""

    def __init__(self, point: Point, step: np.ndarray, layer: int | None = None) -> None:
        self.point, self.step, self.layer = point, step, layer
        self.altered = frozenset({point.name} if point.layer == layer else ())

    def __call__(self, name: str, value: Any) -> Any:
        return value + self.step if Point(name, self.layer) == self.point else value

    def rows(self, name: str, value: Any, segment: int, start: int) -> Any:
        if Point(name, self.layer) != self.point:
            return value
        return value + self.step[:, start : start + value.shape[1], : value.shape[2]]

    def at(self, layer: int) -> "Nudged":
        return Nudged(self.point, self.step, layer)


def surprise(logits: Any) -> Any:
    """How unlikely token 3 is, at all positions together: not linear in anything. Of NumPy arrays or tensors."""
    if isinstance(logits, torch.Tensor):
        return (torch.logsumexp(logits, -1) - logits[:, 3]).sum()
    return (np.log(np.exp(logits).sum(-1)) - logits[:, 3]).sum()


def on_torch(spec: ModelSpec, dtype: str = "float64") -> Model:
    return random_model(spec, engine=TorchEngine(dtype, "cpu"))


def connected(model: Model, points: Any = ("*",)) -> Trace:
    return model.trace(random_ids(model.spec, LENGTH), points, gradients=True)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_gradient_is_the_slope_that_finite_differences_find_on_the_reference_engine(spec: ModelSpec) -> None:
    run = connected(on_torch(spec))
    run.backward(lambda run: surprise(run.logits))
    reference, ids = NumpyEngine("float64"), random_ids(spec, LENGTH)
    parameters = random_parameters(spec, reference)

    def measured(point: Point, step: np.ndarray) -> float:
        tap = Nudged(point, step)
        ran = transformer(reference, spec, parameters, [ids], tap=tap, rows=range(LENGTH))
        return float(surprise(ran.logits))

    compared = 0
    for point in points_of(spec):
        if point.name in ("tokens", "moe.chosen", "attn.head_out", "pooler.out"):
            continue
        slope = run.grad[point]
        assert slope.shape == run[point].shape
        direction = np.random.default_rng(1).standard_normal(slope.shape)
        change = (measured(point, 1e-5 * direction) - measured(point, -1e-5 * direction)) / 2e-5
        assert float((slope * direction).sum()) == pytest.approx(change, rel=1e-6, abs=1e-8), point
        compared += change != 0
    assert compared > 10


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_pass_with_gradients_has_the_values_of_one_without(spec: ModelSpec) -> None:
    model = on_torch(spec)
    run, plain = connected(model), model.trace(random_ids(spec, LENGTH), ["*"])
    assert run.points == plain.points
    for name in run:
        known = np.isfinite(plain[name]) & np.isfinite(run[name])  # dots that no query may use are not in a pass
        np.testing.assert_allclose(run[name][known], plain[name][known], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(run.last_logits, plain.last_logits, rtol=1e-10, atol=1e-12)


def test_each_heads_part_of_the_output_has_the_gradient_of_the_sum() -> None:
    run = connected(on_torch(GPT2), ["layers.1.attn.head_out", "layers.1.attn.raw"])
    run.backward(lambda run: run.logits[-1, 3])
    for head in range(3):
        assert np.array_equal(run.grad["layers.1.attn.head_out"][head], run.grad["layers.1.attn.raw"])
    alone = connected(on_torch(GPT2), ["layers.1.attn.head_out"])
    alone.backward(lambda run: run.logits[-1, 3])
    assert np.array_equal(alone.grad["layers.1.attn.head_out"], run.grad["layers.1.attn.head_out"])
    assert list(alone.grad) == ["layers.1.attn.head_out"]


def test_a_metric_may_be_a_tensor_and_each_call_replaces_the_gradients() -> None:
    run = connected(on_torch(LLAMA), ["layers.*.resid_post"])
    run.backward(run.tensors.logits[-1, 3] - run.tensors.last_logits[4])
    first = {name: slope.copy() for name, slope in run.grad.items()}
    run.backward(lambda run: run.last_logits[3] - run.last_logits[4])
    second = dict(run.grad)
    run.backward(lambda run: 2 * (run.last_logits[3] - run.last_logits[4]))
    for name, slope in first.items():
        assert np.array_equal(second[name], slope) and slope.any()
        assert np.array_equal(run.grad[name], 2 * slope)


def test_a_metric_of_points_inside_the_pass_reaches_what_is_before_them_and_nothing_after() -> None:
    run = connected(on_torch(LLAMA), ["layers.*.attn.pattern", "layers.*.resid_pre", "logits"])
    run.backward(lambda run: run["layers.0.attn.pattern"][2, 6, 3])
    expected = np.zeros((4, LENGTH, LENGTH))
    expected[2, 6, 3] = 1
    assert np.array_equal(run.grad["layers.0.attn.pattern"], expected)
    assert run.grad["layers.0.resid_pre"][:7].any() and not run.grad["layers.0.resid_pre"][7:].any()
    assert not run.grad["layers.1.resid_pre"].any() and not run.grad["logits"].any()


def test_gradients_are_read_only_and_of_the_half_sizes_too() -> None:
    exact = connected(on_torch(LLAMA), ["layers.0.attn.z"])
    exact.backward(lambda run: surprise(run.logits))
    run = connected(on_torch(LLAMA, "bfloat16"), ["layers.0.attn.z"])
    run.backward(lambda run: surprise(run.logits.float()))
    slope = run.grad["layers.0.attn.z"]
    assert slope.dtype == np.float32
    np.testing.assert_allclose(slope, exact.grad["layers.0.attn.z"], atol=0.05 * np.abs(slope).max())
    with pytest.raises(ValueError, match="read-only"):
        slope[0] = 1


def test_gradients_are_found_inside_no_grad_too() -> None:
    with torch.no_grad():
        run = connected(on_torch(LLAMA), ["embed.out"])
        run.backward(lambda run: run.last_logits[3])
    assert run.grad["embed.out"].any()


# What it refuses


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (lambda run: run.logits[-1], r"a tensor of shape \[23\]; it must be one number"),
        (lambda run: 3.5, "The metric is float; it must be one number"),
        (np.float64(2), "The metric is float64; it must be one number"),
        (torch.tensor(1.0), "made from nothing of this pass"),
        (torch.tensor(1.0, requires_grad=True), "depends on none of the points that this trace kept"),
        (lambda run: run["layers.0.attn.v"].sum(), "layers.0.attn.v was not captured in this trace"),
        (lambda run: run["tokens"].sum(), "tokens holds whole numbers"),
        (lambda run: run["layers.0.attn.head_out"].sum(), "compute the metric from attn.z or attn.raw"),
        (lambda run: run["layers.0.attn.zz"].sum(), "No point 'layers.0.attn.zz'"),
    ],
)
def test_what_is_no_metric_is_refused(metric: Any, told: str) -> None:
    run = connected(on_torch(LLAMA), ["layers.0.attn.z", "layers.0.attn.head_out", "tokens"])
    with pytest.raises(CutawayError, match=told):
        run.backward(metric)


def test_gradients_that_are_not_there_are_told_apart() -> None:
    run = connected(on_torch(LLAMA), ["tokens", "layers.0.attn.z"])
    with pytest.raises(CutawayError, match="no gradients yet"):
        _ = run.grad
    run.backward(lambda run: run.last_logits[3])
    assert "layers.0.attn.z" in run.grad and "tokens" not in run.grad
    with pytest.raises(UnknownPoint, match="whole numbers, at which nothing has a gradient"):
        run.grad["tokens"]
    with pytest.raises(UnknownPoint, match="was not captured"):
        run.grad["layers.1.attn.z"]


def test_a_pass_that_kept_no_gradients_says_how_to_get_them() -> None:
    plain = on_torch(LLAMA).trace([1, 2, 3])
    with pytest.raises(CutawayError, match=r"run model.trace\(prompt, points, gradients=True\)"):
        plain.backward(lambda run: run.last_logits[3])
    model = random_model(LLAMA)
    for refused in (
        lambda: model.trace([1, 2, 3], gradients=True),
        lambda: model.trace([1, 2, 3]).backward(lambda run: run.last_logits[3]),
        lambda: model.trace([1, 2, 3]).grad,
    ):
        with pytest.raises(
            CutawayError, match=r'The numpy engine keeps no gradients\. Load the model with engine="torch"'
        ):
            refused()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"positions": [0]}, "positions cannot be given as well"),
        ({"heads": [0]}, "heads cannot be given as well"),
        ({"limit": 10**9}, "limit cannot be given as well"),
        ({"spill": "somewhere"}, "spill cannot be given as well"),
        ({"points": ["layers.0.attn.pattern | mean"]}, r"pattern \| mean is a reduction, which has no gradient"),
    ],
    ids=str,
)
def test_what_does_not_go_with_gradients_is_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(CutawayError, match=told):
        on_torch(LLAMA).trace([1, 2, 3], **asked, gradients=True)


def test_broken_weights_are_told() -> None:
    model = on_torch(LLAMA)
    model.parameters.held["layers.1.mlp.down"].weight.data[0, 0] = torch.nan
    with pytest.raises(CutawayError, match=r"computes no usable numbers: layers\.1\.mlp\.raw is nan"):
        model.trace([1, 2, 3], gradients=True)


# Attribution patching


def test_attribution_is_exact_where_all_that_follows_is_linear() -> None:
    """From the final norm on there is one product; so the estimate is the very change that patching makes."""
    model, clean, corrupt = on_torch(LLAMA), [1, 2, 3, 4], [1, 7, 3, 5]
    change = model.trace(clean).last_logits[3] - model.trace(corrupt).last_logits[3]
    found = attribution(model, clean, corrupt, lambda run: run.last_logits[3], ["final.norm", "logits"])
    for address in ("final.norm", "logits"):
        assert found[address].sum() == pytest.approx(change, rel=1e-9)
        assert not found[address][:-1].any()


def test_attribution_at_every_head_tends_to_what_patching_does_as_the_prompts_draw_near() -> None:
    """With prompts whose embeddings differ by ε, estimate and true effect part by ε² only."""
    spec, gaps = LLAMA, []
    for size in (1e-3, 1e-4):
        table = random_weights(spec)["embed.tokens"].dequantise(np.float64).copy()
        table[7] = table[2] + size * np.random.default_rng(0).standard_normal(12)
        model = on_torch(spec)
        model.parameters.held["embed"].tokens.data = torch.tensor(table)
        clean, corrupt = [1, 2, 3, 4], [1, 7, 3, 4]
        found = attribution(model, clean, corrupt, lambda run: surprise(run.logits), ["layers.1.attn.z"])
        clean_z, corrupt_z = (model.trace(ids, ["layers.1.attn.z"])["layers.1.attn.z"] for ids in (clean, corrupt))
        for head in range(4):
            step = np.zeros_like(clean_z)
            step[head] = (clean_z - corrupt_z)[head]
            tap = Nudged(Point("attn.z", 1), torch.tensor(step))
            ran = [
                transformer(model.engine, spec, model.parameters, [np.array(corrupt)], tap=tap, rows=range(4)).logits
                for tap in (tap, None)
            ]
            change = float(surprise(ran[0]) - surprise(ran[1]))
            gaps.append(abs(found["layers.1.attn.z"][head].sum() - change) / size)
    assert max(gaps[:4]) < 0.05 and max(gaps[4:]) < max(gaps[:4]) / 5


def test_attribution_has_no_nan_where_both_passes_mask_and_refuses_unequal_lengths() -> None:
    model = on_torch(CAPPED)
    found = attribution(model, [1, 2, 3, 4, 5], [1, 7, 3, 5, 5], lambda run: run.last_logits[3], ["*"])
    assert "layers.0.attn.masked" in found and all(np.isfinite(values).all() for values in found.values())
    with pytest.raises(CutawayError, match="clean prompt has 2 tokens and the corrupt one 3"):
        attribution(model, [1, 2], [1, 2, 3], lambda run: run.last_logits[3])
