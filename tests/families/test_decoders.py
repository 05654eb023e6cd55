"""Gemma 2 and 3, Mixtral and Qwen3-MoE compute what `transformers` computes: every intermediate, at every position."""

from typing import Any

import pytest
from compared import EXACT, SINGLE, assert_verified, exact, prompt
from decoder_cases import GEMMA, MIXTURES
from decoders import Tiny, assert_cached_is_whole, assert_padding_on_the_left_changes_nothing, assert_same

import cutaway

LENGTHS = (1, 17, 300)  # past every window; 300 crosses a chunk of 256 rows and blocks of 64


def each(*cases: Tiny) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@each(*GEMMA, *MIXTURES)
def test_every_intermediate_is_that_of_transformers(case: Tiny, made_tiny: Any) -> None:
    folder, reference = made_tiny(case)
    model, fast = exact(folder), cutaway.load(folder, engine="cpu")
    assert model.spec.count().total == sum(p.numel() for p in reference.parameters())
    for length in LENGTHS:
        ids = prompt(model.spec.vocab_size, length)
        assert_same(model, reference, ids, EXACT)
        assert_same(fast, reference, ids, SINGLE)


@each(*GEMMA, *MIXTURES)
def test_decoding_from_the_cache_is_the_whole_pass_also_past_the_windows(case: Tiny, made_tiny: Any) -> None:
    folder, _ = made_tiny(case)
    assert_cached_is_whole(exact(folder), 1e-12)
    assert_cached_is_whole(cutaway.load(folder, engine="cpu"), SINGLE)


@each(GEMMA[0], GEMMA[4], MIXTURES[1], MIXTURES[6])
def test_padding_on_the_left_changes_nothing(case: Tiny, made_tiny: Any) -> None:
    folder, reference = made_tiny(case)
    assert_padding_on_the_left_changes_nothing(exact(folder), reference)


@each(*GEMMA, *MIXTURES)
def test_the_identities_hold(case: Tiny, made_tiny: Any) -> None:
    folder, _ = made_tiny(case)
    assert_verified(exact(folder))


@each(GEMMA[0], GEMMA[5], MIXTURES[0], MIXTURES[6])
def test_the_identities_hold_on_the_cpu_engine(case: Tiny, made_tiny: Any) -> None:
    folder, _ = made_tiny(case)
    assert_verified(cutaway.load(folder, engine="cpu"))
