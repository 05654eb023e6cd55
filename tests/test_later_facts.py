"""The numbers and laws that the lecture states, from the feed-forward network to the cache, asked of the product."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Gain, Linear
from cutaway.engines.weights import Weight
from cutaway.forward.feedforward import feed_forward
from cutaway.forward.norm import norm
from cutaway.forward.run import Run
from cutaway.generate import Sampling, distribution, sample
from cutaway.points import Unwatched
from cutaway.spec import (
    FeedForwardSpec,
    NormSpec,
    parameter_shapes,
)
from cutaway.spec.catalog import gpt2_like
from lecture import PROMPT, plain_spec
from random_models import GPT2, LLAMA, CountingEngine, random_ids, random_model

# Chapter 11: the feed-forward network


def test_11_1_the_feed_forward_widens_to_4_d_and_has_both_biases():
    shapes = parameter_shapes(gpt2_like("gpt3-shaped", d_model=12288, n_layers=1, n_heads=96))
    assert shapes["layers.0.mlp.up.weight"] == (49152, 12288)
    assert shapes["layers.0.mlp.up.bias"] == (49152,)
    assert shapes["layers.0.mlp.down.weight"] == (12288, 49152)
    assert shapes["layers.0.mlp.down.bias"] == (12288,)


@pytest.mark.parametrize("gated", [False, True])
def test_11_1_in_the_feed_forward_rows_never_mix(gated):
    engine, random = NumpyEngine(), np.random.default_rng(0)
    spec = FeedForwardSpec(24, "gelu", gated=gated, bias=True)
    shapes = {"mlp.gate": (24, 6), "mlp.up": (24, 6), "mlp.down": (6, 24)}
    weights = {n: Linear(Weight.of(random.standard_normal(s)), random.standard_normal(s[0])) for n, s in shapes.items()}

    def run(x: np.ndarray) -> np.ndarray:
        return feed_forward(Run(engine, Layout.of([len(x)]), None, {}), spec, weights, x, Unwatched())

    x = random.standard_normal((9, 6))
    together = run(x)
    for t in range(9):
        assert np.array_equal(run(x[t : t + 1])[0], together[t])
    altered = x.copy()
    altered[4] += 1
    changed = (run(altered) != together).any(axis=1)
    assert changed.tolist() == [t == 4 for t in range(9)]


# Chapter 12: residuals and norms


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_12_2_a_norm_stands_before_the_sub_layer_or_after_the_sum(placement, kind):
    base = plain_spec(2, causal=True)
    placed = replace(base.layers[0], norm=NormSpec(kind, 1e-5), placement=placement)
    spec = replace(base, layers=(placed, placed))
    model = random_model(spec)
    trace = model.trace(random_ids(spec, 6), points=["*"])
    for part, before, after in (("attn", "resid_pre", "resid_mid"), ("mlp", "resid_mid", "resid_post")):
        stream, out, left = (trace[f"layers.1.{name}"] for name in (before, f"{part}.out", after))
        gain = model.parameters.layers[1][f"{part}.norm"]
        assert isinstance(gain, Gain)
        if placement == "pre":
            assert np.array_equal(left, stream + out)  # z + f(LN(z))
            read = norm(model.engine, placed.norm, gain, stream)
            assert np.array_equal(trace[f"layers.1.{part}.norm"], read)
        else:
            assert np.array_equal(left, norm(model.engine, placed.norm, gain, stream + out))  # LN(z + f(z))
            assert f"layers.1.{part}.norm" not in trace


# Chapter 13: the head and the count


def test_13_2_with_a_tied_head_a_logit_is_the_dot_product_with_the_tokens_own_vector(toy):
    trace = toy.trace(PROMPT)
    assert "head.weight" not in toy.parameters.stored
    h = trace["layers.2.resid_post"]
    for token in range(10):
        e = toy.parameters.embed_tokens.take([token], np.float64)[0]
        np.testing.assert_allclose(trace.logits[:, token], h @ e, atol=1e-12)


def test_13_3_the_toy_has_2286_parameters(toy):
    spec = toy.spec
    assert (spec.vocab_size, spec.d_model, spec.n_layers, spec.n_max) == (10, 6, 3, 128)
    assert spec.same_in_all_layers("attention.n_heads") == 2
    parts = spec.count().parts
    in_blocks = parts["attention"] + parts["feed_forward"] + parts["norms"]
    assert (parts["embedding"], parts["positions"], in_blocks, parts["head"]) == (60, 768, 1458, 0)
    assert spec.count().total == 2286 == sum(math.prod(w.shape) for w in toy.parameters.stored.values())


# Chapter 14: sampling

LOGITS = st.lists(st.floats(-30, 30), min_size=1, max_size=12).map(np.array)


@given(LOGITS, st.floats(-500, 500))
def test_14_1_a_constant_added_to_all_logits_changes_no_probability(logits, constant):
    before, after = (distribution(x, Sampling())[-1].probabilities for x in (logits, logits + constant))
    np.testing.assert_allclose(after, before, rtol=1e-9, atol=0)


@given(LOGITS)
def test_14_1_every_probability_is_above_0_and_together_they_are_1(logits):
    p = distribution(logits, Sampling())[-1].probabilities
    assert (p > 0).all()
    assert p.sum() == pytest.approx(1, abs=1e-12)


@given(LOGITS, st.integers(0, 2**32))
def test_14_1_the_same_logits_and_seed_give_the_same_token_always(logits, seed):
    picked = {sample(logits, Sampling(temperature=1.3), np.random.default_rng(seed)) for _ in range(5)}
    assert len(picked) == 1


@pytest.mark.parametrize(("mass", "count"), [(0.9, 3), (0.95, 5), (0.99, 8)])
def test_14_3_the_nuclei_of_the_toy_hold_3_5_and_8_tokens(toy, mass, count):
    stages = distribution(toy.trace(PROMPT).last_logits, Sampling(top_p=mass))
    kept = [toy.tokenizer.piece(int(i)).strip() for i in np.argsort(-stages[0].probabilities)[:count]]
    assert stages[-1].kept == count
    assert {toy.tokenizer.piece(int(i)).strip() for i in np.flatnonzero(stages[-1].probabilities)} == set(kept)
    assert kept[2] == "glowing"
    assert not {"drinks", "<BOS>"} & set(kept)


def test_14_3_at_the_third_token_the_sum_just_crosses_0_9(toy):
    p = np.sort(distribution(toy.trace(PROMPT).last_logits, Sampling())[-1].probabilities)[::-1]
    assert p[:2].sum() < 0.9 <= p[:3].sum() < 0.95


# Chapter 15: the cache


@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=lambda spec: spec.name)
def test_15_3_each_cached_pass_makes_one_new_key_and_value_row_a_layer(spec):
    engine = CountingEngine()
    model = random_model(spec, engine=engine)
    model.generate(random_ids(spec, 9).tolist(), max_tokens=6, temperature=0)
    for layer in model.parameters.layers:
        for name in ("attn.k", "attn.v"):
            assert engine.rows_through(layer[name].weight) == [9, 1, 1, 1, 1, 1]


def test_15_3_without_a_cache_every_pass_makes_them_all_again():
    engine = CountingEngine()
    model = random_model(LLAMA, engine=engine)
    ids = random_ids(LLAMA, 9).tolist()
    for _ in range(4):
        ids.append(model.trace(ids, points=[]).next_tokens(1)[0].id)
    assert engine.rows_through(model.parameters.layers[0]["attn.k"].weight) == [9, 10, 11, 12]


def test_15_3_cached_and_uncached_decoding_say_the_same():
    model = random_model(LLAMA)
    prompt = random_ids(LLAMA, 5).tolist()
    ids = list(prompt)
    for _ in range(30):
        ids.append(model.trace(ids, points=[]).next_tokens(1)[0].id)
    assert model.generate(prompt, max_tokens=30, temperature=0).tokens == ids[5:]
