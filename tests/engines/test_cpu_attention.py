"""Attention of the cpu engine: against the reference, and with the same bits in any company."""

import numpy as np
import pytest
from beside_numpy import assert_close, engine, random, reference
from hypothesis import given
from hypothesis import strategies as st

from cutaway.engines.cpu.engine import CpuEngine
from cutaway.engines.protocol import Scoring


@given(
    shared=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    rows=st.sampled_from([1, 2, 16, 17, 63, 64, 65]),
    keys=st.integers(1, 130),
    d_head=st.sampled_from([1, 3, 16, 37, 64, 80, 130]),
)
def test_attention_agrees_with_the_reference(shared, key_heads, rows, keys, d_head):
    q = random(rows, shared * key_heads, d_head).swapaxes(0, 1)
    cache = random(key_heads, 140, d_head, seed=5)
    k, v = cache[:, :keys], cache[:, 140 - keys :]  # views of a larger array, as a cache has them
    first, last = np.zeros(rows, int), np.minimum(np.arange(rows) + 1, keys)
    patterns = []
    for e in (engine, reference):
        scores = e.dots(e.array(q), e.array(k) if e is reference else k)
        patterns.append(e.softmax(e.mask(e.scale(scores, d_head**-0.5), first, last)))
    assert_close(*patterns)
    hidden = np.arange(keys) >= last[:, None]
    assert not patterns[0][:, hidden].any()
    assert_close(engine.mix(patterns[0], v), reference.mix(patterns[1], v.astype(float)))


@pytest.mark.parametrize(("few", "many"), [(1, 16), (20, 64), (17, 30)])
def test_a_query_row_has_the_same_bits_in_a_larger_block(few, many):
    q, k = random(6, many, 64), random(2, 100, 64, seed=1)
    assert np.array_equal(engine.dots(q, k)[:, :few], engine.dots(q[:, :few], k))
    pattern = engine.softmax(engine.dots(q, k))
    assert np.array_equal(engine.mix(pattern, k)[:, :few], engine.mix(pattern[:, :few], k))


@pytest.mark.parametrize("d_head", [3, 16, 64, 80, 128])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_a_query_gets_the_same_attention_alone_and_among_a_whole_prompt(heads, d_head):
    """A token decoded at position p sees p + 1 keys; in the whole pass its row holds masked keys as well."""
    n_heads, n_kv_heads = heads
    length = 75
    q, k, v = random(n_heads, length, d_head), random(n_kv_heads, length, d_head), random(n_kv_heads, length, d_head)
    first, last = np.zeros(length, np.int64), np.arange(1, length + 1)
    whole = engine.mix(engine.softmax(engine.mask(engine.dots(q, k), first, last)), v)
    for p in (0, 1, 15, 16, 17, 63, 64, 74):
        seen = slice(0, p + 1)
        alone = engine.mix(engine.softmax(engine.dots(q[:, p : p + 1], k[:, seen])), v[:, seen])
        assert np.array_equal(alone[:, 0], whole[:, p])


def test_a_window_hides_keys_on_both_sides():
    scores = np.zeros((2, 3, 9), np.float32)
    engine.mask(scores, np.array([0, 2, 8]), np.array([1, 5, 9]))
    visible = [np.flatnonzero(np.isfinite(row)).tolist() for row in scores[1]]
    assert visible == [[0], [2, 3, 4], [8]]


@pytest.mark.parametrize("heads, key_heads", [(9, 3), (4, 4), (8, 1), (14, 2)])
@pytest.mark.parametrize("rows, past, window", [(1, 40, None), (7, 0, None), (130, 0, None), (70, 33, 20), (200, 0, 5)])
@pytest.mark.parametrize(
    "d_head, d_value, cap, growing", [(64, 64, None, False), (20, 36, 5.0, True), (128, 96, None, True)]
)
def test_fused_attention_has_the_bits_of_the_stages(
    heads, key_heads, rows, past, window, d_head, d_value, cap, growing
):
    rng = np.random.default_rng(rows)
    keys = past + rows
    q = rng.normal(size=(rows, heads, d_head)).astype(np.float32).swapaxes(0, 1)
    k = rng.normal(size=(key_heads, keys + 9, d_head)).astype(np.float32)[:, :keys]
    v = rng.normal(size=(key_heads, keys + 9, d_value)).astype(np.float32)[:, :keys]
    last = np.arange(past + 1, keys + 1)
    first = np.zeros_like(last) if window is None else np.maximum(0, last - window)
    growth = 1 + rng.random(rows) if growing else None
    engine = CpuEngine()
    rule = Scoring(0.3, first, last, growth, cap)
    scores = engine.dots(q, k)
    assert np.array_equal(engine.square("attn.dots", q, k, rule), scores)
    scores = engine.scale(scores, 0.3)
    if growth is not None:
        scores *= engine.array(growth[:, None])
    if cap is not None:
        scores = engine.cap(scores, cap)
    assert np.array_equal(engine.square("attn.scores", q, k, rule), scores)
    scores = engine.mask(scores, first, last)
    assert np.array_equal(engine.square("attn.masked", q, k, rule), scores)
    scores = engine.softmax(scores)
    assert np.array_equal(engine.square("attn.pattern", q, k, rule), scores)
    assert np.array_equal(engine.attend(q, k, v, rule), engine.mix(scores, v))
    made: dict[str, np.ndarray] = {}
    for point in ("attn.dots", "attn.scores", "attn.masked", "attn.pattern"):
        made[point] = engine.square(point, q, k, rule, made)
    assert np.array_equal(made["attn.pattern"], scores)
    assert np.array_equal(engine.square("attn.pattern", q, k, rule, {"attn.dots": made["attn.dots"]}), scores)
