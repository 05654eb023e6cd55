"""The numbers and laws that the lecture states, from its example to positions, each asked of the product itself."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutaway
from cutaway import CutawayError
from cutaway.data import TOY_TOKENS
from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Linear
from cutaway.engines.weights import Weight
from cutaway.examples import cat_sat_on_it
from cutaway.forward.attention import attention, pattern_blocks
from cutaway.forward.positions import rotation
from cutaway.forward.run import Run
from cutaway.points import Point
from cutaway.spec import (
    AttentionSpec,
    PositionsSpec,
    RotarySpec,
    parameter_shapes,
)
from cutaway.spec.catalog import catalog_spec, gpt2_like
from cutaway.trace.capture.recorder import Recorder
from lecture import PROMPT, plain_spec
from random_models import GPT2, LLAMA, CountingEngine, random_ids, random_model

# Chapter 2: the running example


def test_2_the_prompt_is_ids_0_5_6_and_its_streams_are_3_by_6(toy):
    trace = toy.trace(PROMPT)
    assert toy.spec.vocab_size == 10
    assert toy.spec.d_model == 6
    assert tuple(toy.tokenizer.piece(i).strip() for i in range(10)) == TOY_TOKENS
    assert toy.tokenizer.encode(PROMPT) == [0, 5, 6] == trace["tokens"].tolist()
    assert trace["embed.out"].shape == (3, 6)  # X₀
    assert trace["layers.2.resid_post"].shape == (3, 6)  # Z


def test_2_the_next_token_is_potion_with_62_per_cent(toy):
    likeliest = toy.trace(PROMPT).next_tokens(1)[0]
    assert likeliest.text == "potion"
    assert likeliest.probability == pytest.approx(0.62, abs=0.005)


@pytest.mark.parametrize(
    ("prompt", "passes", "said"),
    [(PROMPT, 4, "potion mixes glowing fire"), ("<BOS>", 6, "dragon drinks potion mixes glowing fire")],
)
def test_2_greedy_decoding_says_potion_mixes_glowing_fire_one_pass_a_token(prompt, passes, said):
    engine = CountingEngine()
    model = with_engine("toy", engine)
    out = model.generate(prompt, max_tokens=passes, temperature=0)
    assert out.text.strip() == said
    looked_up = [rows for weight, rows in engine.embedded if weight is model.parameters.embed_tokens]
    assert looked_up == [len(model.tokenizer.encode(prompt))] + [1] * (passes - 1)


def test_2_without_a_cache_the_input_grows_by_one_row_a_pass():
    engine = CountingEngine()
    model = with_engine("toy", engine)
    ids = model.tokenizer.encode(PROMPT)
    for _ in range(4):
        ids.append(model.trace(ids, points=[]).next_tokens(1)[0].id)
    assert [rows for weight, rows in engine.embedded if weight is model.parameters.embed_tokens] == [3, 4, 5, 6]
    assert model.tokenizer.decode(ids) == f"{PROMPT} potion mixes glowing fire"


def with_engine(name: str, engine: CountingEngine) -> cutaway.Model:
    """A known model on an engine of the test's own."""
    from cutaway.checkpoints.load import load_checkpoint
    from cutaway.checkpoints.sources import locate

    return cutaway.Model(load_checkpoint(locate(name)), engine)


# Chapter 4: embedding


def test_4_embedding_is_row_lookup_is_one_hot_times_e_bit_for_bit(toy):
    ids = [0, 5, 6, 5, 9]
    e = toy.parameters.embed_tokens.dequantise(np.float64)
    looked_up = toy.trace(ids)["embed.tokens"]
    one_hot = np.eye(10)[ids]
    multiplied = toy.engine.linear(one_hot, Linear(Weight.of(np.ascontiguousarray(e.T))), Layout.of([5]))
    assert np.array_equal(looked_up, e[ids])
    assert np.array_equal(looked_up, multiplied)


# Chapter 7: attention

SCORES = [0.40, 1.60, 0.70, 0.30, 0.90]
WEIGHTS = [0.122, 0.404, 0.164, 0.110, 0.200]


def test_7_3_it_looks_at_cat_with_40_per_cent_and_at_itself_with_20():
    example, engine = cat_sat_on_it(), NumpyEngine()
    layout = Layout.of([5])
    recorder = Recorder(engine, layout, [Point("attn.dots", 0), Point("attn.scores", 0)])
    spec = AttentionSpec(1, 1, 64, causal=False)
    blocks = pattern_blocks(engine, spec, example.q[None], example.k[None], layout.segments[0], 0, recorder.at(0))
    pattern = np.concatenate([block.copy() for _, block in blocks], axis=1)[0]
    dots, scores = (recorder.kept[Point(name, 0)][0][0] for name in ("attn.dots", "attn.scores"))
    np.testing.assert_allclose(dots[-1], [3.2, 12.8, 5.6, 2.4, 7.2], atol=1e-12)
    assert dots[0, 0] == pytest.approx(2.1, abs=1e-12)
    np.testing.assert_allclose(scores[-1], SCORES, atol=1e-12)
    np.testing.assert_allclose(pattern[-1], WEIGHTS, atol=0.0005)


def test_7_3_the_whole_attention_stage_shows_the_same_numbers():
    example, engine = cat_sat_on_it(), NumpyEngine()
    layout = Layout.of([5])
    x = np.concatenate([example.q, example.k, example.v], axis=1)  # [5, 192]; each projection takes its third
    thirds = np.eye(192).reshape(3, 64, 192)
    weights = {f"attn.{name}": Linear(Weight.of(third)) for name, third in zip("qkv", thirds, strict=True)}
    weights["attn.o"] = Linear(Weight.of(np.eye(64)))
    wanted = [Point(name, 0) for name in ("attn.scores", "attn.pattern", "attn.z")]
    recorder = Recorder(engine, layout, wanted)
    run = Run(engine, layout, None, {})
    out = attention(run, AttentionSpec(1, 1, 64, causal=False), weights, x, 0, recorder.at(0))
    np.testing.assert_allclose(recorder.kept[wanted[0]][0][0, -1], SCORES, atol=1e-12)
    pattern = recorder.kept[wanted[1]][0][0]
    np.testing.assert_allclose(pattern[-1], WEIGHTS, atol=0.0005)
    np.testing.assert_allclose(out, pattern @ example.v, atol=1e-12)
    assert out.shape == (5, 64)


def test_7_4_the_softmax_is_soft_on_small_scores_and_saturates_on_large_ones():
    softmax = NumpyEngine().softmax
    np.testing.assert_allclose(softmax(np.array([1.0, 2.0, 3.0])), [0.09, 0.24, 0.67], atol=0.006)
    large = softmax(np.array([10.0, 20.0, 30.0]))
    assert large[0] == pytest.approx(2e-9, rel=0.05)
    assert large[1] == pytest.approx(4.5e-5, rel=0.02)
    assert large[2] == pytest.approx(0.99995, abs=1e-5)


def test_7_4_the_gradient_of_the_softmax_dies_where_it_saturates():
    def steepest(at: list[float]) -> float:
        step, softmax = 1e-5, NumpyEngine().softmax
        ups, downs = (softmax(np.array(at) + sign * step * np.eye(3)) for sign in (1, -1))
        return float(np.abs((ups - downs) / (2 * step)).max())

    assert steepest([1, 2, 3]) > 0.2
    assert steepest([10, 20, 30]) < 1e-4


@pytest.mark.parametrize("length", [1, 3, 40, 130])
def test_7_5_attention_takes_t_by_d_and_gives_t_by_d(length):
    trace = random_model(GPT2).trace(random_ids(GPT2, length), points=["layers.*.attn.norm", "layers.*.attn.out"])
    assert trace["layers.1.attn.norm"].shape == trace["layers.1.attn.out"].shape == (length, GPT2.d_model)


# Chapter 8: the causal mask


@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=lambda spec: spec.name)
@pytest.mark.parametrize("length", [1, 5, 90])
def test_8_2_a_causal_token_gives_its_future_exactly_0_and_itself_something(spec, length):
    trace = random_model(spec).trace(random_ids(spec, length), points=["layers.*.attn.masked", "layers.*.attn.pattern"])
    future = np.triu(np.ones((length, length), dtype=bool), k=1)
    for layer in range(spec.n_layers):
        pattern, masked = trace[f"layers.{layer}.attn.pattern"], trace[f"layers.{layer}.attn.masked"]
        assert (pattern[:, future] == 0).all()
        assert np.isneginf(masked[:, future]).all()
        assert np.isfinite(masked[:, ~future]).all()
        np.testing.assert_allclose(pattern.sum(-1), 1, atol=1e-12)
        assert (np.diagonal(pattern, axis1=1, axis2=2) > 0).all()


@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=lambda spec: spec.name)
def test_8_4_decoding_with_a_cache_gives_the_logits_of_the_whole_pass(spec):
    model = random_model(spec)
    prompt = random_ids(spec, 7).tolist()
    out = model.generate(prompt, max_tokens=20, temperature=0, points=["logits"])
    whole = model.trace(prompt + out.tokens).logits
    for step, row in zip(out.steps, whole[6:], strict=False):
        np.testing.assert_allclose(step.trace.last_logits, row, rtol=0, atol=1e-12 * np.abs(whole).max())


def test_8_4_a_pass_over_more_tokens_leaves_the_earlier_rows_as_they_were():
    model, ids = random_model(LLAMA), random_ids(LLAMA, 40)
    longer, shorter = model.trace(ids).logits, model.trace(ids[:25]).logits
    np.testing.assert_allclose(longer[:25], shorter, rtol=0, atol=1e-12 * np.abs(longer).max())


# Chapter 9: heads


def test_9_1_attention_has_4_d_squared_weights_144_for_d_6():
    spec = catalog_spec("toy")
    assert spec.count().parts["attention"] == spec.n_layers * 144
    shapes = parameter_shapes(spec)
    assert [shapes[f"layers.0.attn.{name}.weight"] for name in "qkvo"] == [(6, 6)] * 4
    large = gpt2_like("large", d_model=768, n_layers=1, n_heads=12)
    attention_weights = [s for n, s in parameter_shapes(large).items() if ".attn." in n and n.endswith("weight")]
    assert sum(math.prod(shape) for shape in attention_weights) == 4 * 768**2


def test_9_1_each_of_h_heads_has_d_over_h_dimensions_and_divides_by_their_root(toy):
    trace = toy.trace(PROMPT, points=["layers.0.attn.q", "layers.0.attn.dots", "layers.0.attn.scores"])
    assert trace["layers.0.attn.q"].shape == (2, 3, 3)  # H, T, d/H
    np.testing.assert_allclose(trace["layers.0.attn.scores"], trace["layers.0.attn.dots"] / np.sqrt(3), rtol=1e-15)


# Chapter 10: positions

PERMUTATIONS = st.permutations(range(6)).map(list)


@given(PERMUTATIONS, st.integers(1, 4), st.integers(0, 3))
def test_10_2_without_mask_and_positions_a_permuted_input_gives_the_permuted_output(order, depth, seed):
    spec = plain_spec(depth, causal=False)
    model = random_model(spec, seed)
    ids = np.arange(6)
    straight, shuffled = model.trace(ids).logits, model.trace(ids[order]).logits
    np.testing.assert_allclose(shuffled, straight[order], rtol=0, atol=1e-10)


@given(PERMUTATIONS, st.integers(1, 3))
def test_10_2_with_the_causal_mask_that_holds_for_no_permutation_but_the_identity(order, depth):
    model = random_model(plain_spec(depth, causal=True))
    ids = np.arange(6)
    straight, shuffled = model.trace(ids).logits, model.trace(ids[order]).logits
    same = np.allclose(shuffled, straight[order], rtol=0, atol=1e-10)
    assert same == (order == sorted(order))


@given(st.permutations(range(5)).map(list))
def test_10_2_in_one_causal_layer_without_positions_the_last_query_sees_a_set(order):
    model = random_model(plain_spec(1, causal=True))
    straight, shuffled = model.trace(np.arange(6)).last_logits, model.trace([*order, 5]).last_logits
    np.testing.assert_allclose(shuffled, straight, rtol=0, atol=1e-10)


def test_10_2_two_causal_layers_do_not_have_that_property():
    model = random_model(plain_spec(2, causal=True))
    straight, shuffled = model.trace(np.arange(6)).last_logits, model.trace([1, 0, 2, 3, 4, 5]).last_logits
    assert np.abs(straight - shuffled).max() > 1e-3


@pytest.mark.parametrize("length", [1, 4, 300])
def test_10_4_sinusoidal_positions_are_the_stated_sines_and_cosines_at_any_length(length):
    spec = replace(plain_spec(1, causal=True), positions=PositionsSpec("sinusoidal"))
    assert not [name for name in parameter_shapes(spec) if "positions" in name]
    rows = random_model(spec).trace(random_ids(spec, length))["embed.positions"]
    assert rows.shape == (length, 8)
    for position in {0, length // 2, length - 1}:
        for i in range(4):
            angle = position / 10000 ** (2 * i / 8)
            assert rows[position, 2 * i] == pytest.approx(math.sin(angle), abs=1e-12)
            assert rows[position, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-12)


def test_10_4_learned_positions_are_n_max_rows_and_a_longer_input_is_refused(toy):
    assert toy.parameters.stored["embed.positions"].shape == (128, 6)
    assert toy.trace([0] * 128)["embed.positions"].shape == (128, 6)
    with pytest.raises(CutawayError, match=r"The prompt has 129 tokens, but toy has learned positions for 128 only"):
        toy.trace([0] * 129)


@given(st.sampled_from(("halves", "adjacent")), st.integers(1, 4), st.integers(0, 50))
def test_10_4_rotation_keeps_lengths_and_makes_the_dot_product_depend_on_the_distance_alone(pairing, half, seed):
    engine, random = NumpyEngine(), np.random.default_rng(seed)
    spec = RotarySpec(10_000.0, 2 * half, pairing)
    q, k = random.standard_normal((2, 1, 1, 8))
    turn = rotation(engine, spec, Layout.of([30]))
    queries = engine.rotate(np.repeat(q, 30, axis=1), *turn, pairing)  # the same vector at every position
    keys = engine.rotate(np.repeat(k, 30, axis=1), *turn, pairing)
    np.testing.assert_allclose(np.linalg.norm(queries, axis=-1), np.linalg.norm(q), rtol=1e-13)
    dots = engine.dots(queries, keys)[0]
    for distance in range(-29, 30):
        along = np.diagonal(dots, distance)
        np.testing.assert_allclose(along, along[0], rtol=0, atol=1e-12)
    assert np.ptp(dots) > 1e-3  # and on the distance it does depend


def test_10_4_rotation_has_no_parameters():
    turned = LLAMA.layers[0]
    still = replace(turned, attention=replace(turned.attention, rotary=None))
    assert parameter_shapes(replace(LLAMA, layers=(still, still))) == parameter_shapes(LLAMA)
