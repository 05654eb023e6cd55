"""A layer in one operation computes what the stages compute, bit for bit, shows the same, and says when it ran."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from both_ways import (
    NOT_SHOWN,
    ByStages,
    Poisoned,
    Side,
    assert_both_ways_agree,
    assert_same_bits,
    can_fuse,
    same_bits,
    showable,
)
from cutaway.engines.cpu.engine import CpuEngine
from cutaway.engines.weights import Weight
from cutaway.forward.parameters import Parameters
from cutaway.forward.transformer import transformer
from cutaway.points import Point, points_of
from cutaway.spec import (
    ACTIVATIONS,
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
    YarnScaling,
)
from cutaway.trace.edits import Scale
from random_models import (
    GPT2,
    LLAMA,
    POST,
    NotingTap,
    random_ids,
    random_model,
    random_weights,
    specs,
    with_attention,
    with_layers,
)

LAYER_NORM, RMS_NORM = NormSpec("layer", 1e-5, bias=True), NormSpec("rms", 1e-6)
ROTARY = RotarySpec(10_000.0, 6)
EXPERTS = ExpertsSpec(4, FeedForwardSpec(6, "silu", gated=True), RouterSpec(2))
LATENT = AttentionSpec(
    4, 4, 6, rotary=RotarySpec(10_000.0, 2, "adjacent"), latent=LatentSpec(6, 5, 4, 2, NormSpec("rms", 1e-6)), d_value=5
)
SPECS: dict[str, ModelSpec] = {
    "rotary, RMSNorm, gated": LLAMA,
    "learned positions, LayerNorm, biases": GPT2,
    "encoder, post-norm": POST,
    "encoder in chunks, rotary": with_attention(LLAMA, causal=False, chunk=4),
    "post-norm decoder": with_layers(GPT2, placement="post"),
    "RMSNorm after": with_layers(LLAMA, placement="post"),
    "RMSNorm with a shift": with_layers(LLAMA, norm=NormSpec("rms", 1e-3, bias=True)),
    "LayerNorm without a shift": with_layers(LLAMA, norm=NormSpec("layer", 1e-12)),
    "norms without learned numbers": with_layers(LLAMA, norm=NormSpec("layer", 1e-5, gain=False)),
    "no norms": with_layers(LLAMA, norm=None),
    "no norms, of sums": with_layers(LLAMA, norm=None, placement="post"),
    "norms before adding": with_layers(LLAMA, out_norm=NormSpec("rms", 1e-5)),
    "norms before adding and after": with_layers(GPT2, placement="post", out_norm=NormSpec("layer", 1e-5, bias=True)),
    "parallel": with_layers(GPT2, parallel=True),
    "parallel, one norm": with_layers(LLAMA, parallel=True, shared_norm=True),
    "parallel, normed before adding": with_layers(LLAMA, parallel=True, out_norm=LAYER_NORM),
    "parallel without norms": with_layers(LLAMA, parallel=True, norm=None),
    "window": with_attention(LLAMA, window=5),
    "window of one": with_attention(LLAMA, window=1),
    "chunks": with_attention(LLAMA, chunk=18),
    "chunks in a window": with_attention(LLAMA, chunk=7, window=4),
    "cap": with_attention(LLAMA, cap=2.0),
    "growing queries": with_attention(LLAMA, growth=QueryGrowth(3, 0.5)),
    "window, cap, growing queries": with_attention(LLAMA, window=20, cap=1.5, growth=QueryGrowth(2, 0.3), scale=0.7),
    "queries and keys normed before turning": with_attention(LLAMA, qk_norm=RMS_NORM),
    "queries and keys normed after turning": with_attention(
        LLAMA, qk_norm=NormSpec("rms", 1e-5, gain=False), norm_after_rotary=True
    ),
    "queries and keys under LayerNorm": with_attention(GPT2, qk_norm=LAYER_NORM),
    "a part turns": with_attention(LLAMA, rotary=RotarySpec(500.0, 4)),
    "a part turns, adjacent": with_attention(LLAMA, rotary=RotarySpec(1e6, 2, "adjacent")),
    "adjacent, stretched": with_attention(LLAMA, rotary=RotarySpec(100.0, 6, "adjacent", YarnScaling(4.0, 8))),
    "biases on q, k and v": with_attention(LLAMA, qkv_bias=True),
    "bias on the way out": with_attention(LLAMA, out_bias=True),
    "three queries a key": with_attention(LLAMA, n_heads=6),
    "wide heads": with_attention(LLAMA, d_head=70, rotary=RotarySpec(10_000.0, 70)),
    "heads of one number": with_attention(GPT2, d_head=1),
    **{
        f"{activation}{', gated' * gated}{', biased' * bias}": with_layers(
            LLAMA, feed_forward=FeedForwardSpec(19, activation, gated=gated, bias=bias)
        )
        for activation in ACTIVATIONS
        for gated, bias in ((False, True), (True, True))
    },
    "some layers latent, some with experts": replace(
        LLAMA,
        layers=(
            LLAMA.layers[0],
            replace(LLAMA.layers[0], attention=LATENT),
            replace(LLAMA.layers[0], attention=replace(LLAMA.layers[0].attention, window=3)),
            replace(LLAMA.layers[0], feed_forward=EXPERTS),
            LayerSpec(AttentionSpec(3, 1, 5), FeedForwardSpec(8, "gelu", bias=True), LAYER_NORM),
        ),
    ),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def texts(spec: ModelSpec, *lengths: int) -> list[np.ndarray]:
    return [random_ids(spec, length, seed) for seed, length in enumerate(lengths)]


@every_spec
def test_a_fused_layer_shows_and_leaves_the_bits_of_the_stages(spec: ModelSpec) -> None:
    """One text without a cache; one that goes on from its cache; three at different positions side by side."""
    weights = random_weights(spec, len(spec.layers), "float32")
    assert_both_ways_agree(spec, weights, [texts(spec, length) for length in (1, 2, 5, 7, 20, 32, 33)], None)
    assert_both_ways_agree(spec, weights, [texts(spec, 1, 3, 2), texts(spec, 20, 7, 5)], None)
    if spec.causal:
        assert_both_ways_agree(spec, weights, [texts(spec, length) for length in (37, 1, 5, 20, 1)], [0])
        together = [texts(spec, 40, 3, 17), texts(spec, 1, 1, 1), texts(spec, 2, 7, 5), texts(spec, 1, 30, 1)]
        assert_both_ways_agree(spec, weights, together, [0, 1, 2])


@given(spec=specs(), seed=st.integers(0, 3), lengths=st.lists(st.sampled_from((1, 2, 3, 9)), min_size=1, max_size=3))
def test_any_layer_at_all_does(spec: ModelSpec, seed: int, lengths: list[int]) -> None:
    weights = random_weights(spec, seed, "float32")
    slots = list(range(len(lengths))) if spec.causal else None
    assert_both_ways_agree(spec, weights, [texts(spec, *lengths), texts(spec, *lengths[::-1])], slots)


@pytest.mark.parametrize("name", ["window, cap, growing queries", "norms before adding and after", "parallel"])
def test_each_point_may_be_looked_at_alone_while_all_else_lies_in_the_scratch(name: str) -> None:
    spec = with_attention(SPECS[name], qk_norm=RMS_NORM)
    weights = random_weights(spec, 1, "float32")
    stages, fused = Side(ByStages(), spec, weights), Side(Poisoned(), spec, weights)
    ids = texts(spec, 6)
    expected, _ = stages.run(ids, showable(spec))
    for point in showable(spec):
        found, ran = fused.run(ids, [point])
        assert ran.fused == {0, 1}
        assert_same_bits(found, {key: expected[key] for key in found})


class Noting(NotingTap):
    """Notes what is shown and needs no stages, in its order."""

    shown = NotingTap.shown - NOT_SHOWN

    def at(self, layer: int) -> "Noting":
        return Noting(layer, self.seen)


@every_spec
def test_points_are_shown_in_the_order_of_the_stages(spec: ModelSpec) -> None:
    """Who looks for the first number that is none is told the same place."""
    orders = []
    for kind in (Poisoned, ByStages):
        engine, tap = kind(), Noting()
        parameters = Parameters(spec, random_weights(spec, 0, "float32"), engine)
        transformer(engine, spec, parameters, texts(spec, 2), tap=tap)
        orders.append([point for point in tap.seen if point.name in tap.shown])
    assert orders[0] == orders[1]


def test_a_layer_that_mixes_kinds_of_weights_has_the_bits_of_the_stages() -> None:
    """As in a file of several quantisations, some rows of it in another order than stored."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    attention = replace(LLAMA.layers[0].attention, n_heads=4, n_kv_heads=2, d_head=16, rotary=RotarySpec(1e4, 16))
    layer = replace(LLAMA.layers[0], attention=attention, feed_forward=FeedForwardSpec(96, "silu", gated=True))
    spec = replace(LLAMA, d_model=64, layers=(layer, layer))
    weights = random_weights(spec, 0, "float32")
    kinds = ("Q4_0", "Q8_0", "Q5_1", "Q4_1", "BF16", "Q5_0", "F16")
    matrices = [name for name in weights if name.startswith("layers.") and name.endswith(".weight")]
    for index, name in enumerate(matrices):
        kind, values = kinds[index % len(kinds)], weights[name].dequantise(np.float32)
        rows = quantize(values, GGMLQuantizationType[kind])
        weights[name] = Weight(kind, values.shape, np.ascontiguousarray(rows).view(np.uint8))
        if index % 3 == 0:
            weights[name] = weights[name].reorder(np.random.default_rng(index).permutation(len(values)))
    assert_both_ways_agree(spec, weights, [texts(spec, 37), texts(spec, 1), texts(spec, 5), texts(spec, 20)], [0])


@pytest.mark.parametrize("kind", [Poisoned, ByStages], ids=["fused", "by stages"])
@pytest.mark.parametrize("name", ["rotary, RMSNorm, gated", "window, cap, growing queries", "chunks"])
def test_company_changes_nothing(name: str, kind: type[CpuEngine]) -> None:
    """Texts decoded side by side, joined and left by others, get the bits that each gets alone."""
    spec = SPECS[name]
    weights = random_weights(spec, 2, "float32")
    prompts, answers = texts(spec, 3, 41, 18, 30), texts(spec, 6, 6, 6, 6)
    points = [point for point in showable(spec) if point.name != "attn.pattern"]
    together = Side(kind(), spec, weights, len(prompts))
    rows: list[list[np.ndarray]] = [[] for _ in prompts]
    for step in range(6):  # text i joins at step i, with its whole prompt; later the first one leaves
        here = [i for i in range(len(prompts)) if i <= step and not (i == 0 and step > 3)]
        ids = [prompts[i] if step == i else answers[i][step : step + 1] for i in here]
        seen, ran = together.run(ids, points, here)
        assert ran.fused == (frozenset({0, 1}) if kind is Poisoned and ran.layout.rows <= 32 else frozenset())
        for segment, i in zip(ran.layout.segments, here, strict=True):
            part = {key: _rows_of(key, value, segment.start, segment.stop) for key, value in _by_row(seen).items()}
            rows[i].append(np.concatenate([np.ravel(value) for value in part.values()]))
    for i, prompt in enumerate(prompts):
        alone = Side(kind(), spec, weights)
        for step, found in zip(range(i, 6), rows[i], strict=False):
            seen, _ = alone.run([prompt if step == i else answers[i][step : step + 1]], points, [0])
            expected = np.concatenate([np.ravel(value) for value in _by_row(seen).values()])
            assert same_bits(found, expected)


def _by_row(seen: dict[Any, np.ndarray]) -> dict[Any, np.ndarray]:
    """What has a row for each token."""
    return {key: value.astype(np.float32) for key, value in seen.items() if key[0] not in ("keys", "values")}


def _rows_of(key: Any, value: np.ndarray, start: int, stop: int) -> np.ndarray:
    return value[:, start:stop] if value.ndim == 3 else value[start:stop]


def ran_fused(
    spec: ModelSpec, points: Iterable[Point] = (), length: int = 5, engine: CpuEngine | None = None
) -> frozenset[int]:
    side = Side(engine or Poisoned(), spec, random_weights(spec, 0, "float32"))
    return side.run(texts(spec, length), points)[1].fused


@pytest.mark.parametrize("length", [1, 32])
def test_few_rows_are_run_in_one_operation(length: int) -> None:
    assert ran_fused(LLAMA, showable(LLAMA), length) == {0, 1}


def test_more_rows_than_thirty_two_go_by_the_stages() -> None:
    assert ran_fused(LLAMA, (), 33) == frozenset()


@pytest.mark.parametrize("name", ["attn.dots", "attn.scores", "attn.masked"])
def test_who_wants_scores_gets_the_stages_in_that_layer_alone(name: str) -> None:
    assert ran_fused(LLAMA, [Point(name, 1)]) == {0}
    stages, fused = (Side(kind(), LLAMA, random_weights(LLAMA, 0, "float32")) for kind in (ByStages, Poisoned))
    wanted = [Point(name, 1), *showable(LLAMA)]
    assert_same_bits(fused.run(texts(LLAMA, 9), wanted)[0], stages.run(texts(LLAMA, 9), wanted)[0])


@pytest.mark.parametrize(
    "layer",
    [replace(LLAMA.layers[0], attention=LATENT), replace(LLAMA.layers[0], feed_forward=EXPERTS)],
    ids=["latent attention", "experts"],
)
def test_a_kind_of_layer_that_is_not_served_goes_by_the_stages_alone(layer: LayerSpec) -> None:
    assert not can_fuse(layer)
    assert ran_fused(replace(LLAMA, layers=(LLAMA.layers[0], layer, LLAMA.layers[0]))) == {0, 2}


def test_an_engine_without_the_operation_never_runs_it() -> None:
    assert ran_fused(LLAMA, engine=ByStages()) == frozenset()


def test_an_edit_is_made_by_the_stages_of_its_layer_and_by_no_other() -> None:
    model = random_model(LLAMA, 0, CpuEngine(), dtype="float32")
    ids = texts(LLAMA, 6)[0]
    assert model.trace(ids).fused_layers == {0, 1}
    for point in (point for point in points_of(LLAMA) if point.layer == 1 and point.name != "attn.head_out"):
        half = [Scale(str(point), 0.5)]
        edited = model.trace(ids, points=["logits"], edits=half)
        assert edited.fused_layers == {0}
        expected = random_model(LLAMA, 0, ByStages(), dtype="float32").trace(
            ids, points=["logits"], edits=[Scale(str(point), 0.5)]
        )
        assert same_bits(edited.logits, expected.logits)
