"""A sequence gives what it gives alone: beside others in one pass, and from its cache."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.engines.numpy import NumpyEngine
from cutaway.forward.cache import KVCache
from cutaway.forward.transformer import transformer
from random_models import (
    LIKE,
    LLAMA,
    POST,
    NotingTap,
    random_ids,
    random_model,
    random_parameters,
    specs,
)


@given(specs(), st.lists(st.integers(1, 40), min_size=2, max_size=4), st.data())
def test_a_sequence_gives_the_same_bits_alone_and_packed_with_others(spec, lengths, data):
    engine = NumpyEngine("float32")
    parameters = random_parameters(spec, engine)
    sequences = [random_ids(spec, length, seed) for seed, length in enumerate(lengths)]
    together = transformer(engine, spec, parameters, sequences).logits
    which = data.draw(st.integers(0, len(sequences) - 1))
    alone = transformer(engine, spec, parameters, [sequences[which]]).logits
    assert np.array_equal(together[which], alone[0])


@pytest.mark.parametrize("like", LIKE)
def test_positions_count_from_each_sequences_start_wherever_it_stands_in_the_pack(like):
    spec, engine = LIKE[like], NumpyEngine("float64")
    parameters, ids = random_parameters(spec, engine), random_ids(spec, 7)
    packed = transformer(engine, spec, parameters, [random_ids(spec, 5, seed=1), ids], rows=range(12)).logits
    alone = transformer(engine, spec, parameters, [ids], rows=range(7)).logits
    assert np.array_equal(packed[5:], alone)


@given(specs(causal=True), st.lists(st.integers(1, 30), min_size=2, max_size=4))
def test_cached_passes_of_any_lengths_give_what_the_whole_pass_gives(spec, pieces):
    engine = NumpyEngine("float64")
    parameters = random_parameters(spec, engine)
    ids = random_ids(spec, sum(pieces))
    whole = transformer(engine, spec, parameters, [ids], rows=range(len(ids))).logits
    cache, rows, at = KVCache(spec, engine), [], 0
    for length in pieces:
        piece = ids[at : at + length]
        rows.append(transformer(engine, spec, parameters, [piece], caches=[cache], rows=range(length)).logits)
        at += length
        assert cache.length == at
    np.testing.assert_allclose(np.concatenate(rows), whole, rtol=0, atol=1e-11 * max(1, np.abs(whole).max()))


def test_several_sequences_go_on_from_their_own_caches_in_one_pass():
    engine = NumpyEngine("float64")
    parameters = random_parameters(LLAMA, engine)
    starts, nexts = [random_ids(LLAMA, n, n) for n in (4, 9, 1)], [random_ids(LLAMA, n, n + 20) for n in (1, 3, 2)]
    caches = [KVCache(LLAMA, engine) for _ in starts]
    transformer(engine, LLAMA, parameters, starts, caches=caches)
    together = transformer(engine, LLAMA, parameters, nexts, caches=caches).logits
    for start, more, row in zip(starts, nexts, together, strict=True):
        whole = transformer(engine, LLAMA, parameters, [np.concatenate([start, more])]).logits[0]
        np.testing.assert_allclose(row, whole, rtol=0, atol=1e-12 * np.abs(whole).max())


def test_a_cache_grows_without_losing_what_it_holds():
    engine = NumpyEngine("float64")
    parameters, ids = random_parameters(LLAMA, engine), random_ids(LLAMA, 600)
    cache = KVCache(LLAMA, engine)
    for start in range(0, 600, 100):
        last = transformer(engine, LLAMA, parameters, [ids[start : start + 100]], caches=[cache]).logits
    whole = transformer(engine, LLAMA, parameters, [ids]).logits
    np.testing.assert_allclose(last, whole, rtol=0, atol=1e-12 * np.abs(whole).max())


def test_rows_that_do_not_follow_the_cache_are_refused():
    cache = KVCache(LLAMA, NumpyEngine("float64"))
    rows = np.zeros((2, 1, 6))
    with pytest.raises(CutawayError, match="The cache holds 0 tokens; rows at position 3 do not follow them"):
        cache.append(0, 3, rows, rows)


def test_a_pass_that_failed_half_way_leaves_the_cache_as_it_was():
    class FailsOnce(NotingTap):
        def at(self, layer: int):
            if layer == 1:
                raise RuntimeError("stopped")
            return self

    engine = NumpyEngine("float64")
    parameters, ids = random_parameters(LLAMA, engine), random_ids(LLAMA, 8)
    cache = KVCache(LLAMA, engine)
    transformer(engine, LLAMA, parameters, [ids[:5]], caches=[cache])
    with pytest.raises(RuntimeError, match="stopped"):
        transformer(engine, LLAMA, parameters, [random_ids(LLAMA, 4, 9)], caches=[cache], tap=FailsOnce())
    assert cache.length == 5
    after = transformer(engine, LLAMA, parameters, [ids[5:]], caches=[cache]).logits
    whole = transformer(engine, LLAMA, parameters, [ids]).logits
    np.testing.assert_allclose(after, whole, rtol=0, atol=1e-12 * np.abs(whole).max())


def test_a_bidirectional_model_has_no_cache_and_says_why():
    with pytest.raises(CutawayError, match=r"small-post is an encoder.*both directions.*cannot continue"):
        random_model(POST).generate([1, 2, 3])
