"""Every intermediate has one address, and an address that names nothing is refused with the reason."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.forward.layers_shown import layers_shown
from cutaway.forward.transformer import transformer
from cutaway.points import POINTS, Point, Unwatched, find_points, layer_names, parse_point, points_of, shape_symbols
from cutaway.points.foreign import FOREIGN
from cutaway.spec import ExpertsSpec, LayerSpec, ModelSpec, NormSpec, PositionsSpec
from cutaway.trace.capture.recorder import Recorder
from random_models import (
    GPT2,
    LIKE,
    LLAMA,
    POST,
    NotingTap,
    everything,
    random_ids,
    random_model,
    random_parameters,
    specs,
    with_layers,
)

ATTENTION = "attn.q attn.k attn.v {} attn.dots attn.scores attn.masked attn.pattern attn.z attn.head_out attn.raw"


def in_words(spec: ModelSpec, layer: int = 0) -> str:
    return " ".join(layer_names(spec, layer))


def test_a_gpt2_like_model_has_these_points_in_this_order():
    attention = ATTENTION.format("").replace("  ", " ")
    assert in_words(GPT2) == (
        f"resid_pre attn.norm {attention} attn.out resid_mid mlp.norm mlp.up mlp.act mlp.raw mlp.out resid_post"
    )
    outside = [str(point) for point in points_of(GPT2) if point.layer is None]
    assert outside == ["tokens", "embed.tokens", "embed.positions", "embed.out", "final.norm", "logits"]


def test_a_llama_like_model_turns_its_queries_and_keys_and_has_a_gate():
    attention = ATTENTION.format("attn.q_rot attn.k_rot")
    assert in_words(LLAMA) == (
        f"resid_pre attn.norm {attention} attn.out resid_mid mlp.norm mlp.gate mlp.up mlp.act mlp.raw mlp.out "
        "resid_post"
    )
    outside = [str(point) for point in points_of(LLAMA) if point.layer is None]
    assert outside == ["tokens", "embed.tokens", "embed.out", "final.norm", "logits"]


def test_a_post_norm_model_has_sums_where_others_have_norms():
    attention = ATTENTION.format("").replace("  ", " ")
    assert in_words(POST) == (
        f"resid_pre {attention} attn.out attn.sum resid_mid mlp.up mlp.act mlp.raw mlp.out mlp.sum resid_post"
    )
    outside = [str(point) for point in points_of(POST) if point.layer is None]
    assert outside == ["tokens", "embed.tokens", "embed.positions", "embed.norm", "embed.out", "logits"]


# `attn.head_out` costs a product a head: no pass shows it, a trace works it out from `attn.z`.
MADE_LATER = {"attn.head_out"}


@given(specs(), st.integers(1, 5))
def test_the_points_of_a_spec_are_those_that_its_pass_shows_in_that_order_and_no_others(spec, length):
    engine, tap = NumpyEngine(), NotingTap()
    transformer(engine, spec, random_parameters(spec, engine), [random_ids(spec, length)], tap=tap)
    assert tap.seen == [point for point in points_of(spec) if point.name not in MADE_LATER]


@given(specs(), st.integers(1, 5))
def test_shapes_in_symbols_are_the_shapes_in_numbers(spec, length):
    from random_models import random_model

    trace = random_model(spec).trace(random_ids(spec, length), points=["*"])
    assert trace.points == [str(point) for point in points_of(spec)]
    for point in points_of(spec):
        sizes = {"T": length, "S": length, "V": spec.vocab_size, "d": spec.d_model, "1": 1}
        if point.layer is not None:
            layer = spec.layers[point.layer]
            a, f = layer.attention, layer.feed_forward
            sizes |= {"H": a.n_heads, "H_kv": a.n_kv_heads, "d_head": a.d_head, "d_value": a.value_width}
            if a.latent is not None:
                sizes |= {"q_rank": a.latent.q_rank, "kv_rank": a.latent.kv_rank, "d_rope": a.latent.d_rope}
            if isinstance(f, ExpertsSpec):
                sizes |= {"E": f.n_experts, "k": f.router.n_active}
            else:
                sizes["d_ff"] = f.d_ff
        assert trace[point].shape == tuple(sizes[symbol] for symbol in shape_symbols(point, spec)), str(point)


@pytest.mark.parametrize("like", LIKE)
def test_every_point_that_a_pass_shows_is_kept_when_asked_for(like):
    spec, engine = LIKE[like], NumpyEngine()
    kept = everything(engine, spec, random_parameters(spec, engine), random_ids(spec, 4))
    assert set(kept) == {point for point in points_of(spec) if point.name not in MADE_LATER}


def test_every_point_says_what_it_is_why_it_is_there_and_which_chapter_explains_it():
    for name, info in POINTS.items():
        assert info.shape and info.meaning and info.reason, name
        assert 2 <= float(info.chapter) < 16, name
        assert set(info.shape) <= {*"13TSVdEkH", "H_kv", "d_head", "d_ff", "d_value", "q_rank", "kv_rank", "d_rope"}, (
            name
        )


def names(*patterns: str, spec: ModelSpec = LLAMA) -> list[str]:
    return [str(point) for point in find_points(patterns, spec)]


FOUR = replace(LLAMA, layers=LLAMA.layers[:1] * 4)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("layers.1.attn.out", ["layers.1.attn.out"]),
        ("layers.-1.attn.out", ["layers.3.attn.out"]),
        ("layers.-4.attn.out", ["layers.0.attn.out"]),
        ("layers.1:3.resid_post", ["layers.1.resid_post", "layers.2.resid_post"]),
        ("layers.2:.resid_post", ["layers.2.resid_post", "layers.3.resid_post"]),
        ("layers.:2.resid_post", ["layers.0.resid_post", "layers.1.resid_post"]),
        ("layers.-2:.resid_post", ["layers.2.resid_post", "layers.3.resid_post"]),
        ("layers.*.mlp.gate", [f"layers.{i}.mlp.gate" for i in range(4)]),
        ("layers.0.attn.?_rot", ["layers.0.attn.q_rot", "layers.0.attn.k_rot"]),
        ("embed.*", ["embed.tokens", "embed.out"]),
        ("logits", ["logits"]),
    ],
)
def test_a_pattern_names(pattern, found):
    assert names(pattern, spec=FOUR) == found


def test_a_star_alone_names_everything():
    assert find_points(["*"], LLAMA) == points_of(LLAMA)
    assert find_points("*", LLAMA) == points_of(LLAMA)


def test_points_come_in_the_order_of_the_pass_and_each_once():
    assert names("logits", "layers.1.attn.out", "layers.*.attn.out", "tokens", "layers.-1.attn.out") == [
        "tokens",
        "layers.0.attn.out",
        "layers.1.attn.out",
        "logits",
    ]


@given(specs(), st.data())
def test_every_address_reads_back_as_its_point(spec, data):
    point = data.draw(st.sampled_from(points_of(spec)))
    assert parse_point(str(point), spec) == point == parse_point(point, spec)
    if point.layer is not None:
        from_the_end = f"layers.{point.layer - spec.n_layers}.{point.name}"
        assert parse_point(from_the_end, spec) == point


NO_NORMS = replace(GPT2, name="bare", layers=(LayerSpec(GPT2.layers[0].attention, GPT2.layers[0].feed_forward, None),))
MIXED = replace(
    LLAMA,
    name="mixed",
    layers=(
        LLAMA.layers[0],
        replace(LLAMA.layers[0], attention=replace(LLAMA.layers[0].attention, rotary=None), placement="post"),
    ),
)
ABSENT = [
    (GPT2, "layers.0.attn.q_rot", "small-gpt2 has learned positions, nothing turns its queries"),
    (GPT2, "layers.*.attn.k_rot", "small-gpt2 has learned positions, nothing turns its keys"),
    (
        replace(GPT2, positions=PositionsSpec("sinusoidal")),
        "layers.0.attn.q_rot",
        "small-gpt2 has sinusoidal positions, nothing turns its queries",
    ),
    (GPT2, "layers.0.mlp.gate", "the feed-forward of small-gpt2 has no gate"),
    (GPT2, "embed.norm", "small-gpt2 has no norm after its embedding"),
    (GPT2, "layers.1.attn.sum", "only post-norm models have it, and small-gpt2 is none"),
    (LLAMA, "embed.positions", "small-llama adds no positions to its embedding"),
    (POST, "final.norm", r"small-post has no final norm; its head reads layers\.1\.resid_post"),
    (POST, "layers.0.attn.norm", "small-post has its norms after the sum"),
    (NO_NORMS, "layers.0.mlp.norm", "bare has no norms in its layers"),
    (replace(NO_NORMS, positions=None), "layers.0.attn.q_rot", "bare has no positions in its attention"),
    (MIXED, "layers.1.attn.q_rot", r"layer 1 of mixed has no positions in its attention, nothing turns its queries"),
    (MIXED, "layers.1.attn.norm", r"layer 1 of mixed has its norms after the sum"),
    (POST, "sample.top_k", "small-post is an encoder: nothing is drawn from what it gives"),
    (MIXED, "layers.0.attn.sum", r"only post-norm layers have it, and layer 0 of mixed is none"),
]


@pytest.mark.parametrize(("spec", "pattern", "reason"), ABSENT, ids=[f"{s.name} {p}" for s, p, _ in ABSENT])
def test_a_point_that_this_model_cannot_have_is_refused_with_the_reason(spec, pattern, reason):
    with pytest.raises(CutawayError, match=reason) as refusal:
        find_points([pattern], spec)
    assert repr(pattern) in str(refusal.value)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("layers.2.attn.out", "small-llama has layers 0 to 1"),
        ("layers.-3.attn.out", "small-llama has layers 0 to 1"),
        ("layers.7:9.attn.out", "small-llama has layers 0 to 1"),
        ("layers.0.attn.patern", r"the closest are layers\.0\.attn\.pattern"),
        ("logit", "the closest are logits"),
        ("attn.pattern", r"'attn.pattern' stands in every layer: say which, as in 'layers\.0\.attn\.pattern'"),
        ("layers.0.logits", r"No point 'layers\.0\.logits' in small-llama; the closest are"),
        ("layers.0.embed.out", r"No point 'layers\.0\.embed\.out' in small-llama; the closest are"),
        ("", "the closest are"),
        ("sample.top_k", "sample.top_k is no part of a pass but of the choice that follows it: ask for it in generate"),
        ("sample.*", r"sample.\* is no part of a pass but of the choice"),
        ("sample.topk", "the closest are sample.top_k"),
    ],
)
def test_a_pattern_that_names_nothing_is_refused_with_what_would_be_right(pattern, said):
    with pytest.raises(CutawayError, match=said):
        find_points([pattern], LLAMA)


def test_one_wrong_pattern_among_right_ones_is_not_passed_over():
    with pytest.raises(CutawayError, match="'nothing'"):
        find_points(["logits", "nothing"], LLAMA)


def test_where_one_point_is_needed_several_are_refused():
    with pytest.raises(CutawayError, match=r"names 2 points \(layers.0.attn.out, layers.1.attn.out, …\)"):
        parse_point("layers.*.attn.out", LLAMA)


# Names of other tools


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("blocks.1.attn.hook_pattern", ["layers.1.attn.pattern"]),
        ("blocks.*.hook_resid_post", ["layers.0.resid_post", "layers.1.resid_post"]),
        ("blocks.0.mlp.hook_pre", ["layers.0.mlp.gate"]),
        ("model.layers.1.self_attn.o_proj", ["layers.1.attn.raw"]),
        ("model.layers.0.post_attention_layernorm", ["layers.0.mlp.norm"]),
        ("model.layers.1", ["layers.1.resid_post"]),
        ("hidden_states[0]", ["layers.0.resid_pre"]),
        ("hidden_states[2]", ["final.norm"]),
        ("lm_head", ["logits"]),
        ("kq_soft_max-0", ["layers.0.attn.pattern"]),
        ("l_out-1", ["layers.1.resid_post"]),
        ("result_norm", ["final.norm"]),
    ],
)
def test_a_name_of_another_tool_stands_for_ours_where_the_axes_are_the_same(theirs, ours):
    assert names(theirs) == ours


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (
            "blocks.1.attn.hook_q",
            r"TransformerLens's name of layers\.1\.attn\.q, which is \[T, H, d_head\] there and here \[H, T, d_head\]",
        ),
        ("ln_final.hook_normalized", r"name of final\.norm, there before the gain"),
        ("model.layers.0.self_attn.q_proj", r"\[T, H · d_head\] there and here \[H, T, d_head\]"),
        ("Qcur-1", r"llama\.cpp's name of layers\.1\.attn\.q, there the name is given before and after the rotation"),
        ("transformer.h.0.attn.c_attn", r"layers\.0\.attn\.q and layers\.0\.attn\.k and layers\.0\.attn\.v"),
        ("blocks.5.hook_resid_pre", "has layers 0 to 1"),
        ("hook_pos_embed", "adds no positions to its embedding"),
    ],
)
def test_a_name_whose_axes_or_meaning_are_others_is_refused_with_ours(theirs, said):
    with pytest.raises(CutawayError, match=said):
        names(theirs)


def test_a_name_that_means_another_point_in_another_architecture_does_so():
    assert names("blocks.0.mlp.hook_pre", spec=GPT2) == ["layers.0.mlp.up"]
    assert names(
        "model.layers.0.post_attention_layernorm", spec=with_layers(LLAMA, out_norm=NormSpec("rms", 1e-6))
    ) == ["layers.0.attn.out"]
    assert names("hidden_states[2]", spec=POST) == ["layers.1.resid_post"]


def test_every_foreign_name_belongs_to_a_point_that_there_is():
    for foreign in FOREIGN:
        for name in re.split(r", | or | and ", foreign.ours):
            assert name in POINTS, foreign.name


def test_a_trace_is_read_by_foreign_names_too():
    trace = random_model(LLAMA).trace([1, 2, 3], points=["blocks.0.attn.hook_pattern"])
    assert trace.points == ["layers.0.attn.pattern"]
    assert trace["kq_soft_max-0"] is not None and np.array_equal(trace["attentions[0]"], trace["layers.0.attn.pattern"])


def test_an_unwatched_pass_hands_every_value_on_as_it_is():
    tap, value = Unwatched(), np.arange(3.0)
    assert tap("resid_pre", value) is value
    assert tap.rows("attn.dots", value, 0, 0) is value
    assert tap.at(4)("mlp.out", value) is value
    assert tap.shown == tap.altered == tap.at(0).shown == frozenset()


def test_the_tap_of_a_layer_says_what_somebody_wants_to_see_there():
    wanted = [Point("attn.q", 1), Point("attn.pattern", 1), Point("resid_post", 0), Point("embed.out")]
    recorder = Recorder(NumpyEngine(), Layout.of([3]), wanted)
    with layers_shown(LLAMA, recorder) as tap:
        assert tap.shown == {"embed.out"}
        assert tap.at(0).shown == {"resid_post"}
        assert tap.at(1).shown == {"attn.q", "attn.pattern"}
        assert tap.altered == tap.at(1).altered == frozenset()
