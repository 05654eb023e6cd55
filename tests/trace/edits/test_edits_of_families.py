"""Every published architecture, shrunk, can be edited at every point that it has; experts can be dropped and kept."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from cutaway import CutawayError
from cutaway.engines import make_engine
from cutaway.points import Point, points_of
from cutaway.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec, RouterSpec
from cutaway.spec.catalog import CATALOG
from cutaway.trace.edits import PARTS, Drop, Function, Keep, Replace, Scale, Without, Zero
from random_models import LLAMA, by_hand, random_ids, random_model, with_layers


def small_attention(spec: AttentionSpec) -> AttentionSpec:
    """Two key heads at the most, as many queries to each, narrow heads; everything else as it is."""
    keys = min(spec.n_kv_heads, 2)
    heads = keys * min(spec.n_heads // spec.n_kv_heads, 3)
    rotary = spec.rotary
    if spec.latent is not None:
        latent = replace(spec.latent, kv_rank=6, q_rank=None if spec.latent.q_rank is None else 5, d_nope=4, d_rope=2)
        rotary = None if rotary is None else replace(rotary, dims=2)
        return replace(spec, n_heads=heads, n_kv_heads=heads, d_head=6, latent=latent, rotary=rotary, d_value=4)
    if rotary is not None:
        rotary = replace(rotary, dims=max(2, 8 * rotary.dims // spec.d_head // 2 * 2), scaling=None)
    return replace(spec, n_heads=heads, n_kv_heads=keys, d_head=8, rotary=rotary)


def small_feed_forward(spec: FeedForwardSpec | ExpertsSpec) -> FeedForwardSpec | ExpertsSpec:
    if isinstance(spec, FeedForwardSpec):
        return replace(spec, d_ff=10)
    groups = min(spec.router.n_groups, 2)
    router = replace(spec.router, n_active=min(spec.router.n_active, 2), n_groups=groups, top_groups=1)
    shared = None if spec.shared is None else replace(spec.shared, d_ff=6)
    return replace(spec, n_experts=8, expert=replace(spec.expert, d_ff=6), router=router, shared=shared)


def small(spec: ModelSpec) -> ModelSpec:
    """The architecture in little: each kind of layer once, and two of where there is but one kind."""

    def layer(one: LayerSpec) -> LayerSpec:
        return replace(one, attention=small_attention(one.attention), feed_forward=small_feed_forward(one.feed_forward))

    kinds = tuple(dict.fromkeys(map(layer, spec.layers)))
    positions = spec.positions if spec.positions is None else replace(spec.positions, n_max=64)
    if positions is not None and positions.kind != "learned":
        positions = spec.positions
    return replace(spec, vocab_size=29, d_model=12, layers=kinds if len(kinds) > 1 else kinds * 2, positions=positions)


SMALL: dict[str, ModelSpec] = {}
for recipe in CATALOG.values():
    shrunk = replace(small(recipe()), context_length=None)
    if all(replace(shrunk, name=other.name) != other for other in SMALL.values()):  # sizes of one family are one
        SMALL[shrunk.name] = shrunk
every_architecture = pytest.mark.parametrize("name", SMALL)


@every_architecture
def test_every_point_can_be_scaled_and_everything_after_follows(name):
    model, ids = random_model(SMALL[name]), random_ids(SMALL[name], 9)
    for point in points_of(model.spec):
        if point.name in ("tokens", "pooler.out", "moe.chosen", "attn.masked", "attn.head_out", "logits"):
            continue
        expected, _ = by_hand(model, ids, {point: lambda value, start: value * 0.5})
        trace = model.trace(
            ids, points=["logits"] if not model.spec.headless else [last(model)], edits=[Scale(str(point), 0.5)]
        )
        found = trace[trace.points[0]]
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11, err_msg=str(point))


def last(model):
    return "final.norm" if model.spec.final_norm is not None else f"layers.{model.spec.n_layers - 1}.resid_post"


@every_architecture
@pytest.mark.parametrize("engine", ["numpy", "cpu"])
def test_a_patch_of_everything_from_the_same_run_changes_nothing_bit_for_bit(name, engine):
    model, ids = random_model(SMALL[name], engine=make_engine(engine, "float32")), random_ids(SMALL[name], 20)
    plain = model.trace(ids, points=["*"])
    left_out = ("tokens", "pooler.out")
    everything = [Replace(str(p), plain) for p in points_of(model.spec) if p.name not in left_out]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        patched = model.trace(ids, points=["*"], edits=everything)
    assert all(report.changed == 0 and report.elements > 0 for report in patched.edits)
    for point in points_of(model.spec):
        if point.name not in ("attn.dots", "attn.scores"):  # stored, they hold what the pass looked at only
            assert np.array_equal(patched[point], plain[point]), str(point)


@every_architecture
def test_every_part_that_an_architecture_has_can_be_left_out(name):
    model, ids = random_model(SMALL[name]), random_ids(SMALL[name], 9)
    left = []
    for part in PARTS:
        try:
            model.trace(ids, points=["*"], edits=[Without(part)])
            left.append(part)
        except CutawayError as refusal:
            assert "that could be left out" in str(refusal)
    assert {"scale", "attn", "mlp", "norms", "residuals"} - set(left) <= {"scale"}


# Experts

MIXTURE = with_layers(
    LLAMA,
    feed_forward=ExpertsSpec(6, FeedForwardSpec(8, "silu", gated=True), RouterSpec(2), FeedForwardSpec(5, "silu")),
)
SIGMOID = with_layers(
    MIXTURE,
    feed_forward=replace(
        MIXTURE.layers[0].feed_forward, router=RouterSpec(2, "sigmoid", correction=True, n_groups=2, top_groups=2)
    ),
)


@pytest.mark.parametrize(
    ("spec", "point"), [(MIXTURE, "moe.router_logits"), (MIXTURE, "moe.scores"), (SIGMOID, "moe.scores")]
)
def test_a_dropped_expert_is_chosen_by_nobody_and_the_next_best_takes_its_place(spec, point):
    model, ids = random_model(spec), random_ids(spec, 30)
    plain = model.trace(ids, points=["layers.0.moe.chosen"])["layers.0.moe.chosen"]
    assert (plain == 1).any()
    trace = model.trace(ids, points=["*"], edits=[Drop(f"layers.0.{point}", experts=[1])])
    chosen = trace["layers.0.moe.chosen"]
    assert not (chosen == 1).any()
    kept = ~(plain == 1).any(axis=1)
    assert np.array_equal(chosen[kept], plain[kept])
    for row, before in zip(chosen[~kept], plain[~kept], strict=True):
        assert set(before) - {1} <= set(row)
    only = model.trace(ids, points=["*"], edits=[Keep(f"layers.0.{point}", experts=[0, 4])])
    assert set(only["layers.0.moe.chosen"].ravel()) == {0, 4}


@pytest.mark.parametrize("point", ["moe.gates", "moe.expert_out"])
def test_what_an_expert_gives_can_be_silenced_without_sending_anybody_elsewhere(point):
    model, ids = random_model(MIXTURE), random_ids(MIXTURE, 30)
    plain = model.trace(ids, points=["*"])
    trace = model.trace(ids, points=["*"], edits=[Zero(f"layers.0.{point}", experts=[1])])
    chosen = plain["layers.0.moe.chosen"]
    assert np.array_equal(trace["layers.0.moe.chosen"], chosen)
    sent = (chosen == 1).any(axis=1)
    assert not trace[f"layers.0.{point}"][chosen == 1].any()
    assert np.array_equal(trace["layers.0.mlp.out"][~sent], plain["layers.0.mlp.out"][~sent])
    gates, given = (plain[f"layers.0.moe.{name}"] for name in ("gates", "expert_out"))
    expected = plain["layers.0.mlp.out"] - (given * (gates * (chosen == 1))[:, :, None]).sum(1)
    np.testing.assert_allclose(trace["layers.0.mlp.out"], expected, atol=1e-12)
    kept = model.trace(ids, points=[f"layers.0.{point}"], edits=[Keep(f"layers.0.{point}", experts=[1])])
    assert not kept[f"layers.0.{point}"][chosen != 1].any()
    assert np.array_equal(kept[f"layers.0.{point}"][chosen == 1], plain[f"layers.0.{point}"][chosen == 1])


def test_who_is_sent_where_can_be_written_by_hand():
    model, ids = random_model(MIXTURE), random_ids(MIXTURE, 8)
    edit = Function("layers.0.moe.chosen", lambda chosen, place: np.full_like(chosen, 3) + np.arange(2))
    trace = model.trace(ids, points=["layers.0.moe.chosen"], edits=[edit])
    assert (trace["layers.0.moe.chosen"] == [3, 4]).all()
    with pytest.raises(CutawayError, match="must give numbers of experts, whole numbers from 0 to 5"):
        model.trace(ids, edits=[Function("layers.0.moe.chosen", lambda chosen, place: chosen + 6)])


@pytest.mark.parametrize(
    ("edit", "spec", "said"),
    [
        (
            Drop("layers.0.moe.scores", experts=[0, 1, 2, 3, 4]),
            MIXTURE,
            "sends each token to 2 experts; 1 would be left",
        ),
        (Keep("layers.0.moe.scores", experts=[0]), MIXTURE, "1 would be left"),
        (Drop("layers.0.moe.router_logits", experts=[0]), SIGMOID, r"leave experts out at layers\.0\.moe\.scores"),
        (Zero("layers.0.moe.gates", experts=[9]), MIXTURE, r"Expert 9 was asked for|no token was sent to expert 9"),
        (Scale("layers.0.moe.chosen", 2.0), MIXTURE, "holds numbers of experts; scale means nothing there"),
    ],
)
def test_experts_that_cannot_be_left_out_are_refused(edit, spec, said):
    with pytest.raises(CutawayError, match=said):
        random_model(spec).trace(random_ids(spec, 6), edits=[edit])


def test_an_expert_to_which_nobody_was_sent_cannot_be_silenced():
    model, ids = random_model(MIXTURE), random_ids(MIXTURE, 1)
    idle = next(e for e in range(6) if e not in model.trace(ids, ["layers.0.moe.chosen"])["layers.0.moe.chosen"])
    with pytest.raises(CutawayError, match=f"fired nowhere: no token was sent to expert {idle}"):
        model.trace(ids, edits=[Zero("layers.0.moe.expert_out", experts=[idle])])
    assert Point("moe.chosen", 0) in points_of(MIXTURE)
