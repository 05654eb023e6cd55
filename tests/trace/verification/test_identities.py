"""A check that cannot fail is worth nothing: every value that a trace holds is altered, one at a time."""

from dataclasses import replace

import numpy as np
import pytest
from test_verify import failing

from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Gain, Linear
from cutaway.forward import attention
from cutaway.forward.parameters import Parameters
from cutaway.points import Point, points_of
from cutaway.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    HeadTransformSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    PositionsSpec,
    RotarySpec,
    RouterSpec,
)
from cutaway.trace.capture.plan import make_plan
from cutaway.trace.prompt import Prompt
from cutaway.trace.trace import Trace
from cutaway.trace.verification.identities import RULES, identities
from cutaway.trace.verification.verify import verify
from random_models import GPT2, LIKE, LLAMA, POST, random_ids, random_model, random_parameters

RMS = NormSpec("rms", 1e-6)

EXPERTS = replace(
    LLAMA,
    name="experts",
    layers=(
        LayerSpec(
            AttentionSpec(
                2, 2, 6, latent=LatentSpec(5, 4, 2, 4, RMS), rotary=RotarySpec(100.0, 4, "adjacent"), d_value=3
            ),
            ExpertsSpec(4, FeedForwardSpec(5, "silu", gated=True), RouterSpec(2), FeedForwardSpec(6, "silu")),
            RMS,
            out_norm=RMS,
        ),
    )
    * 2,
)
HEADS = replace(
    LLAMA,
    name="normed-heads",
    layers=tuple(
        replace(layer, attention=replace(layer.attention, qk_norm=RMS, cap=2.0, window=4)) for layer in LLAMA.layers
    ),
    head_transform=HeadTransformSpec("gelu", RMS),
    pooler=True,
    token_types=2,
    embed_norm=RMS,
)
# Four groups of two of which one wins, ranked by corrected scores.
GROUPS = replace(
    EXPERTS,
    name="grouped-experts",
    layers=tuple(
        replace(
            layer,
            feed_forward=ExpertsSpec(
                8, FeedForwardSpec(5, "silu", gated=True), RouterSpec(2, "sigmoid", n_groups=4, correction=True)
            ),
        )
        for layer in EXPERTS.layers
    ),
)
TYPES = replace(HEADS, name="types", embed_norm=None)
WAVES = replace(GPT2, name="waves", positions=PositionsSpec("sinusoidal"))
BROKEN = {**LIKE, "experts": EXPERTS, "grouped experts": GROUPS, "normed heads": HEADS}


def whole_trace(spec: ModelSpec, alter=None, parameters: Parameters | None = None) -> tuple[Trace, Parameters]:
    """A trace of every point as the pass made it, one value altered, and the parameters to check it against."""
    engine, ids = NumpyEngine("float64"), random_ids(spec, 6)
    made = random_parameters(spec, engine)
    trace = random_model(spec).trace(ids, points=["*"])
    values = {point: np.array(trace[point]) for point in points_of(spec)}
    if alter is not None:
        alter(values)
    plan = replace(make_plan(spec, points_of(spec)), kept=frozenset(values))
    prompt = Prompt(tuple(int(i) for i in ids), (), "")
    return Trace(engine, spec, made, prompt, plan, Layout.of([6]), values, trace.last_logits), parameters or made


def every_point() -> list:
    return [
        pytest.param(name, point, id=f"{name} {point}")
        for name, spec in BROKEN.items()
        for point in points_of(spec)
        if point.layer in (None, 1) and point.name != "tokens"
    ]


@pytest.mark.parametrize("like", BROKEN)
def test_the_identities_hold_where_nothing_was_altered(like):
    assert failing(identities(*whole_trace(BROKEN[like]))) == set()


@pytest.mark.parametrize(("like", "point"), every_point())
def test_an_altered_value_at_any_point_is_noticed(like, point):
    def alter(values: dict[Point, np.ndarray]) -> None:
        value = values[point]
        if point.name == "moe.chosen":
            value[...] = value[:, ::-1]  # the same experts, their gates exchanged
        else:
            value[..., -1, -1] = value[..., -1, -1] * 1.001 + 1e-6

    assert failing(identities(*whole_trace(BROKEN[like], alter)))


@pytest.mark.parametrize(("like", "point"), every_point()[::5])
def test_a_value_that_is_no_number_is_noticed(like, point):
    def alter(values: dict[Point, np.ndarray]) -> None:
        if point.name == "moe.chosen":
            values[point][...] = values[point][:, ::-1]
        else:
            values[point][..., 0, 0] = np.nan

    with np.errstate(invalid="ignore"):
        assert failing(identities(*whole_trace(BROKEN[like], alter)))


def scale(name: str, layer: int | None = 1):
    def alter(values: dict[Point, np.ndarray]) -> None:
        values[Point(name, layer)] *= 1.001

    return alter


def leak(values: dict[Point, np.ndarray]) -> None:
    values[Point("attn.pattern", 1)][0, 0, -1] = 1e-30


def swap_heads(name: str):
    def alter(values: dict[Point, np.ndarray]) -> None:
        values[Point(name, 1)][...] = values[Point(name, 1)][::-1].copy()

    return alter


def swap_rows(name: str):
    def alter(values: dict[Point, np.ndarray]) -> None:
        values[Point(name, 1)][...] = values[Point(name, 1)][..., ::-1, :].copy()

    return alter


def send_elsewhere(values: dict[Point, np.ndarray]) -> None:
    """The last token goes to two experts of a group that lost, with their own gates."""
    chosen, scores = values[Point("moe.chosen", 1)], values[Point("moe.scores", 1)]
    chosen[-1] = (chosen[-1] + 2) % scores.shape[1]
    gates = scores[-1, chosen[-1]]
    values[Point("moe.gates", 1)][-1] = gates / gates.sum()


def shift_positions(values: dict[Point, np.ndarray]) -> None:
    """Every token takes the position vector of its neighbour, and everything after follows from that."""
    there = values[Point("embed.positions")]
    values[Point("embed.out")] += np.roll(there, 1, axis=0) - there
    there[...] = np.roll(there, 1, axis=0)


def turn_half_round(values: dict[Point, np.ndarray]) -> None:
    values[Point("attn.k_rot", 1)] *= -1  # every length stays what it was


def take_another_kind(values: dict[Point, np.ndarray]) -> None:
    """One token's kind is another, and the sum follows from that."""
    values[Point("embed.types")][2] += 0.25
    values[Point("embed.out")][2] += 0.25


# For every identity, mistakes that people make, and that it must be the one to notice.
NOTICED = [
    ("each layer reads what the one before left", GPT2, scale("resid_pre")),
    ("each norm is the norm of the stream that it reads", GPT2, scale("attn.norm")),
    ("each norm is the norm of the stream that it reads", LLAMA, scale("mlp.norm")),
    ("q, k and v are the projections of what attention reads", LLAMA, swap_heads("attn.k")),
    ("q, k and v are the projections of what attention reads", EXPERTS, scale("attn.kv_latent")),
    ("each head's q and k, normed", HEADS, scale("attn.k_normed")),
    ("rotation keeps the lengths of q and k", LLAMA, scale("attn.q_rot")),
    ("each pair of q and k is turned by its position's angle", LLAMA, turn_half_round),
    ("each pair of q and k is turned by its position's angle", EXPERTS, turn_half_round),
    ("q · k, scaled, = the scores, query heads beside their key head", LLAMA, swap_heads("attn.k_rot")),
    ("q · k, scaled, = the scores, query heads beside their key head", GPT2, scale("attn.scores")),
    ("q · k, scaled, = the scores, query heads beside their key head", GPT2, scale("attn.dots")),
    ("softmax of the scores that may be seen = the pattern", GPT2, swap_rows("attn.masked")),
    ("rows of the pattern sum to 1", GPT2, scale("attn.pattern")),
    ("the pattern is 0 on what may not be seen", GPT2, leak),
    ("pattern · v = z", LLAMA, swap_heads("attn.v")),
    ("the heads' outputs (+ bias) sum to attn.raw", GPT2, scale("attn.head_out")),
    ("φ(up) or φ(gate) · up = act, of what the feed-forward reads", LLAMA, scale("mlp.gate")),
    ("down(act) (+ bias) = mlp.raw", GPT2, scale("mlp.act")),
    ("each token's experts are those that its router scores highest", EXPERTS, scale("moe.gates")),
    ("each token's experts are those that its router scores highest", GROUPS, send_elsewhere),
    ("the experts' outputs, each times its gate (+ the shared one), sum to mlp.raw", EXPERTS, scale("moe.shared_out")),
    ("what is added is what the sub-layer worked out, normed where the spec says", EXPERTS, scale("mlp.out")),
    ("the stream plus attention is the stream after it", GPT2, scale("attn.out")),
    ("the stream plus attention is the stream after it", POST, scale("attn.sum")),
    ("the stream plus the feed-forward is the stream after it", GPT2, scale("resid_post")),
    ("embed.out = tokens (+ types, positions), scaled and normed", GPT2, scale("embed.positions", None)),
    ("embed.out = tokens (+ types, positions), scaled and normed", GPT2, shift_positions),
    ("embed.out = tokens (+ types, positions), scaled and normed", WAVES, shift_positions),
    ("embed.out = tokens (+ types, positions), scaled and normed", TYPES, take_another_kind),
    ("final.norm = norm of the last stream", LLAMA, scale("final.norm", None)),
    ("tanh of the pooler's projection of the first token = pooler.out", HEADS, scale("pooler.out", None)),
    ("final.norm · W_Uᵀ (+ bias) = logits", LLAMA, scale("logits", None)),
]


@pytest.mark.parametrize(("check", "spec", "alter"), NOTICED, ids=[f"{n}: {s.name}" for n, s, _ in NOTICED])
def test_each_identity_notices_its_own_mistake(check, spec, alter):
    assert check in failing(identities(*whole_trace(spec, alter)))


def test_a_mask_that_is_off_by_one_in_all_that_the_pass_makes_is_noticed(monkeypatch):
    right = attention.visible

    def one_too_many(spec, segment, rows):
        first, last = right(spec, segment, rows)
        return np.maximum(first - 1, 0), last  # the window does not count the token itself

    monkeypatch.setattr(attention, "visible", one_too_many)
    engine = NumpyEngine("float64")
    checks = verify(engine, HEADS, random_parameters(HEADS, engine), random_ids(HEADS, 10))
    assert "the pattern is 0 on what may not be seen" in failing(checks)


def test_every_identity_has_a_mistake_that_it_must_notice():
    assert set(RULES) <= {check for check, _, _ in NOTICED}


BIASES = [
    ("attn.q", "q, k and v are the projections of what attention reads"),
    ("attn.o", "the heads' outputs (+ bias) sum to attn.raw"),
    ("mlp.up", "φ(up) or φ(gate) · up = act, of what the feed-forward reads"),
    ("mlp.down", "down(act) (+ bias) = mlp.raw"),
]


@pytest.mark.parametrize(("part", "check"), BIASES)
def test_a_bias_that_is_left_out_is_noticed(part, check):
    trace, parameters = whole_trace(GPT2)
    parameters.layers[1][part] = Linear(parameters.layers[1][part].weight)
    assert failing(identities(trace, parameters)) == {check}


def test_a_norm_without_its_bias_is_noticed():
    trace, parameters = whole_trace(GPT2)
    parameters.layers[1]["mlp.norm"] = Gain(parameters.layers[1]["mlp.norm"].gain)
    assert failing(identities(trace, parameters)) == {"each norm is the norm of the stream that it reads"}
