"""The identities hold for every model that a spec can describe, and each of them notices when something is wrong."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutaway.engines import numpy as reference
from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Gain, Linear
from cutaway.engines.weights import Weight
from cutaway.forward import attention, positions
from cutaway.forward.parameters import Parameters
from cutaway.points import Point, points_of
from cutaway.spec import (
    ACTIVATIONS,
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
from cutaway.trace import check as check_file
from cutaway.trace.check import Check, deviation
from cutaway.trace.identities import RULES, identities
from cutaway.trace.plan import make_plan
from cutaway.trace.prompt import Prompt
from cutaway.trace.trace import Trace
from cutaway.trace.verify import verify
from random_models import GPT2, LIKE, LLAMA, POST, random_ids, random_model, random_parameters, specs

RMS = NormSpec("rms", 1e-6)


def failing(checks) -> set[str]:
    return {check.name for check in checks if not check.holds}


@settings(max_examples=60)
@given(specs(), st.integers(1, 40), st.integers(0, 5))
def test_every_check_holds_for_any_model_and_prompt(spec, length, seed):
    engine = NumpyEngine("float64")
    checks = list(verify(engine, spec, random_parameters(spec, engine, seed), random_ids(spec, length, seed)))
    assert failing(checks) == set()


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("length", [1, 63, 64, 81, 130])
def test_every_check_holds_at_the_edges_of_blocks(like, length):
    spec, engine = LIKE[like], NumpyEngine("float64")
    checks = list(verify(engine, spec, random_parameters(spec, engine), random_ids(spec, length)))
    assert failing(checks) == set()
    assert ("cached decoding = the whole pass" in {check.name for check in checks}) == spec.causal


@pytest.mark.parametrize("like", LIKE)
def test_every_check_holds_in_float32_too(like):
    spec, engine = LIKE[like], NumpyEngine("float32")
    assert failing(verify(engine, spec, random_parameters(spec, engine), random_ids(spec, 40))) == set()


def test_a_deviation_is_relative_to_the_largest_value_and_a_nan_never_holds():
    assert deviation(np.array([1.0, 2.5]), np.array([1.0, 2.0])) == 0.25
    assert deviation(np.zeros(2), np.zeros(2)) == 0
    assert not Check("c", deviation(np.array([np.nan, 0.0]), np.ones(2)), 1e-5).holds
    assert Check("c", 1e-6, 1e-5).holds
    assert not Check("c", 2e-5, 1e-5).holds


# A check that cannot fail is worth nothing: every value that a trace holds is altered, one at a time.

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


# The checks between passes, each against an engine that has the fault it looks for.


class Drifting(NumpyEngine):
    """Computes a little differently every time."""

    def __init__(self) -> None:
        super().__init__("float64")
        self.calls = 0

    def linear(self, x, linear, layout):
        self.calls += 1
        return super().linear(x, linear, layout) * (1 + 1e-13 * self.calls)


class CopiesWrongly(NumpyEngine):
    def copy(self, values):
        return values * (1 + 1e-15) + 1e-15


class DotsByTheMoment(NumpyEngine):
    """Dots that come out a little differently once the passes are over: on access not what they were."""

    IN_THREE_PASSES = 3 * 2 * 10  # two layers, ten rows one by one

    def __init__(self) -> None:
        super().__init__("float64")
        self.calls = 0

    def dots(self, q, k):
        self.calls += 1
        return super().dots(q, k) + (1e-13 if self.calls > self.IN_THREE_PASSES else 0)


class MixesSequences(NumpyEngine):
    """All rows in one product, whichever sequence they belong to, and a trace of each in all others."""

    def linear(self, x, linear, layout):
        return super().linear(x, linear, layout) + 1e-9 * x.sum()


class ForgetsPositions(NumpyEngine):
    """A single row is taken for the first of its sequence: the cache's offset is lost."""

    def rotate(self, x, cosines, sines, pairing):
        if x.shape[1] == 1:
            cosines, sines = np.ones_like(cosines), np.zeros_like(sines)
        return super().rotate(x, cosines, sines, pairing)


class GroupsHeadsWrongly(NumpyEngine):
    """Query head h reads key head h mod H_kv: the other order of grouping."""

    def dots(self, q, k):
        return np.einsum("hrd,hsd->hrs", q, np.tile(k, (len(q) // len(k), 1, 1)))


class TurnsBackwards(NumpyEngine):
    """Every length is kept, and every distance between two tokens counted the other way."""

    def rotate(self, x, cosines, sines, pairing):
        return super().rotate(x, cosines, -sines, pairing)


class PairsOtherwise(NumpyEngine):
    """Neighbours turn together where the checkpoint's pairs stand half a head apart."""

    def rotate(self, x, cosines, sines, pairing):
        return super().rotate(x, cosines, sines, "adjacent")


class SmallEps(NumpyEngine):
    def rms_norm(self, x, gain, eps):
        return super().rms_norm(x, gain, 0.0)


FAULTY = [
    ("looking changes nothing, bit for bit", Drifting),
    ("values patched in from the same pass change nothing, bit for bit", CopiesWrongly),
    ("patterns worked out on access are those of the pass, bit for bit", DotsByTheMoment),
    ("company changes nothing, bit for bit", MixesSequences),
    ("cached decoding = the whole pass", ForgetsPositions),
    ("q · k, scaled, = the scores, query heads beside their key head", GroupsHeadsWrongly),
    ("each norm is the norm of the stream that it reads", SmallEps),
    ("each pair of q and k is turned by its position's angle", TurnsBackwards),
    ("each pair of q and k is turned by its position's angle", PairsOtherwise),
]


@pytest.mark.parametrize(("check", "faulty"), FAULTY, ids=[faulty.__name__ for _, faulty in FAULTY])
def test_each_check_between_passes_notices_an_engine_with_that_fault(check, faulty):
    engine = faulty()
    checks = verify(engine, LLAMA, random_parameters(LLAMA, engine), random_ids(LLAMA, 10))
    assert check in failing(checks)


# What a check shares with the pass, it cannot check: the parts of the pass are exchanged for wrong ones.


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_that_is_wrong_wherever_the_pass_takes_it_from_is_noticed(kind, monkeypatch):
    layers = tuple(replace(layer, feed_forward=FeedForwardSpec(20, kind)) for layer in GPT2.layers)
    spec, right = replace(GPT2, layers=layers), reference.ACTIVATIONS[kind]
    engine = NumpyEngine("float64")
    parameters, ids = random_parameters(spec, engine), random_ids(spec, 10)
    assert failing(verify(engine, spec, parameters, ids)) == set()
    monkeypatch.setitem(reference.ACTIVATIONS, kind, lambda x: right(x) * (1 + 1e-9))
    wrong = "φ(up) or φ(gate) · up = act, of what the feed-forward reads"
    assert failing(verify(engine, spec, parameters, ids)) == {wrong}


def test_a_head_whose_activation_is_wrong_is_noticed(monkeypatch):
    spec, engine = replace(POST, head_transform=HeadTransformSpec("gelu", RMS)), NumpyEngine("float64")
    layers = tuple(replace(layer, feed_forward=FeedForwardSpec(20, "relu")) for layer in POST.layers)
    spec = replace(spec, layers=layers)
    monkeypatch.setitem(reference.ACTIVATIONS, "gelu", reference.gelu_tanh)
    checks = verify(engine, spec, random_parameters(spec, engine), random_ids(spec, 10))
    assert failing(checks) == {"final.norm · W_Uᵀ (+ bias) = logits"}


def test_a_softmax_that_is_wrong_wherever_the_pass_takes_it_from_is_noticed(monkeypatch):
    right = reference.softmax
    monkeypatch.setattr(reference, "softmax", lambda scores: right(scores) ** (1 + 1e-9))
    engine = NumpyEngine("float64")
    checks = verify(engine, GPT2, random_parameters(GPT2, engine), random_ids(GPT2, 10))
    assert "softmax of the scores that may be seen = the pattern" in failing(checks)


def test_angles_that_are_wrong_in_the_table_of_the_pass_are_noticed(monkeypatch):
    right = positions.frequencies
    monkeypatch.setattr(positions, "frequencies", lambda spec, length: right(replace(spec, base=9_999.0), length))
    engine = NumpyEngine("float64")
    checks = verify(engine, LLAMA, random_parameters(LLAMA, engine), random_ids(LLAMA, 10))
    assert failing(checks) == {"each pair of q and k is turned by its position's angle"}


def test_no_file_that_checks_takes_arithmetic_from_an_engine():
    folder = Path(check_file.__file__).parent
    names = {*folder.glob("*identities.py"), folder / "check.py"}
    assert len(names) == 4
    imports = {line for file in names for line in file.read_text(encoding="utf-8").splitlines() if "cutaway.e" in line}
    assert imports == {"from cutaway.engines.protocol import Gain, Linear"}


def test_a_model_verifies_itself_on_a_prompt_of_its_own_choice_or_ours(toy):
    assert failing(toy.verify()) == set()
    assert failing(toy.verify("<BOS> dragon drinks")) == set()


def test_a_weight_that_was_read_wrongly_does_not_make_the_model_contradict_itself():
    """What the identities cannot see: they say that the arithmetic holds, not that the weights are the right ones."""
    model = random_model(GPT2)
    model.parameters.layers[0]["attn.q"] = Linear(Weight.of(np.ones((12, 12))))
    assert failing(model.verify()) == set()
