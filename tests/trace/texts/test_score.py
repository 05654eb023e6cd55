"""A text's log-probabilities are those of transformers, the same in any company; windows score every token once."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import cutaway
from cutaway import CutawayError
from cutaway.engines import make_engine
from cutaway.trace.prompts import Reader
from cutaway.trace.texts.score import Total
from random_models import GPT2, LIKE, LLAMA, POST, random_ids, random_model, specs, spoilt_model

LENGTHS = [9, 2, 70, 1, 33]


def by_trace(model, ids):
    """ln p of each token from the whole pass's logits."""
    logits = model.trace(ids, ["logits"]).logits.astype(np.float64)
    lines = logits - logits.max(-1, keepdims=True)
    lines -= np.log(np.exp(lines).sum(-1, keepdims=True))
    return np.array([lines[t - 1, ids[t]] for t in range(1, len(ids))]), lines


CASES = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64)),
}


@pytest.mark.parametrize("family", CASES)
def test_the_loss_of_a_text_is_that_of_transformers(family, tmp_path):
    torch.manual_seed(1)
    theirs = CASES[family]().to(torch.float64).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.3)
    theirs.save_pretrained(tmp_path)
    model = cutaway.load(tmp_path, engine="numpy", dtype="float64")
    texts = [random_ids(model.spec, length, length).tolist() for length in (50, 2, 17)]
    total = Total()
    losses = []
    for ids, score in zip(texts, model.scores(texts), strict=True):
        with torch.no_grad():
            out = theirs(torch.tensor([ids]), labels=torch.tensor([ids]))
        # transformers works the loss out in float32, and the angles of llama
        assert score.loss == pytest.approx(out.loss.item(), rel=2e-6)
        lines = out.logits[0].log_softmax(-1).numpy()
        expected = [lines[t - 1, ids[t]] for t in range(1, len(ids))]
        rounding = 1e-10 if family == "gpt2" else 1e-5
        np.testing.assert_allclose(score.logprobs[1:], expected, rtol=rounding, atol=rounding)
        losses += [out.loss.item()] * (len(ids) - 1)
        total.add(score)
    assert total.scored == 49 + 1 + 16
    assert total.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)


@settings(max_examples=25)
@given(specs(causal=True), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_log_probabilities_are_those_of_the_logits_and_the_same_alone(spec, lengths):
    assume(not spec.headless)
    model, texts = random_model(spec), [random_ids(spec, length, seed) for seed, length in enumerate(lengths)]
    for text, score in zip(texts, model.scores(texts), strict=True):
        expected, _ = by_trace(model, text)
        assert np.isnan(score.logprobs[0]) and score.scored == len(text) - 1
        assert np.array_equal(score.logprobs[1:], expected)
        assert np.array_equal(model.score(text).logprobs, score.logprobs, equal_nan=True)
        assert score.total == pytest.approx(expected.sum(), rel=1e-12)


@pytest.mark.parametrize("like", [name for name in LIKE if LIKE[name].causal])
@pytest.mark.parametrize("engine", ["numpy", "cpu"])
def test_a_text_is_scored_alike_in_any_company(like, engine):
    model = random_model(LIKE[like], engine=make_engine(engine, "float32"), dtype="float32")
    texts = [random_ids(LIKE[like], length, seed) for seed, length in enumerate(LENGTHS)]
    for text, score in zip(texts, model.scores(texts), strict=True):
        assert np.array_equal(model.score(text).logprobs, score.logprobs, equal_nan=True)


@given(st.integers(2, 60), st.integers(2, 12), st.data())
def test_windows_score_every_token_once_from_as_many_tokens_as_they_say(length, context, data):
    stride = data.draw(st.integers(1, context - 1))
    model, ids = random_model(LLAMA), random_ids(LLAMA, length)
    score = model.score(ids, context=context, stride=stride)
    for position in range(1, length):
        # the first window that reaches this token, by hand
        start = 0 if position < context else -(-(position + 1 - context) // stride) * stride
        before = ids[start:position]
        assert position < context or context - stride <= len(before) < context
        expected, _ = by_trace(model, np.append(before, ids[position]))
        assert score.logprobs[position] == pytest.approx(expected[-1], rel=1e-9), position
    windowed = length > context
    assert (score.context, score.stride) == ((context, stride) if windowed else (None, None))


def test_learned_positions_are_no_limit_to_a_text_that_is_read_in_windows():
    model, ids = random_model(GPT2), random_ids(GPT2, 450)
    score = model.score(ids)
    assert (score.context, score.stride, score.scored) == (200, 100, 449)
    with pytest.raises(CutawayError, match="context is 201; the model has learned positions for 200 tokens only"):
        model.score(ids, context=201)


def test_the_divergence_of_two_models_is_the_sum_by_hand():
    one, two = random_model(LLAMA, seed=0), random_model(LLAMA, seed=1)
    texts = [random_ids(LLAMA, length, seed) for seed, length in enumerate(LENGTHS)]
    total = Total()
    for text, score in zip(texts, one.scores(texts, against=two), strict=True):
        total.add(score)
        (_, p), (_, q) = by_trace(one, text), by_trace(two, text)
        expected = (np.exp(p) * (p - q)).sum(-1)[:-1]
        assert np.isnan(score.divergence[0])
        np.testing.assert_allclose(score.divergence[1:], expected, rtol=1e-10, atol=1e-13)
    assert total.compared and total.divergence > 0
    assert np.array_equal(one.score(texts[0], against=one).divergence[1:], np.zeros(8))
    with pytest.raises(CutawayError, match="no other model was given"):
        one.score(texts[0]).mean_divergence  # noqa: B018


def test_other_vocabularies_are_refused(toy):
    bigger = random_model(replace(LLAMA, vocab_size=24))
    with pytest.raises(CutawayError, match="small-llama has 23 tokens and small-llama 24; two models can be compared"):
        random_model(LLAMA).score([1, 2], against=bigger)
    with pytest.raises(CutawayError, match=r"against is a model as cutaway.load gives it, not str"):
        toy.score("<BOS> dragon", against="toy")


def test_a_token_that_means_another_is_refused(toy):
    other = cutaway.load("toy", engine="numpy")
    tokenizer = other.tokenizer

    class Renamed:
        vocab_size = tokenizer.vocab_size

        def piece(self, token):
            return "wyvern" if token == 5 else tokenizer.piece(token)

    other._reader = Reader(other.spec, Renamed())
    with pytest.raises(CutawayError, match="Token 5 is 'dragon' in toy and 'wyvern' in toy"):
        toy.score("<BOS> dragon", against=other)


@pytest.mark.parametrize(
    ("text", "asked", "said"),
    [
        ([1, 99], {}, "Token id 99 at position 1"),
        ([], {}, "empty list"),
        ([1, 2], {"context": 1}, "context is 1; it must be a whole number of tokens, at least 2"),
        ([1, 2], {"context": 4, "stride": 4}, "stride is 4 and context 4; the stride must be less"),
        ([1, 2], {"stride": 3}, "whose length the model does not state: give context"),
    ],
)
def test_what_cannot_be_scored_is_refused(text, asked, said):
    with pytest.raises(CutawayError, match=said):
        random_model(LLAMA).score(text, **asked)


def test_an_encoder_and_a_single_token_have_no_loss():
    with pytest.raises(CutawayError, match="reads in both directions"):
        random_model(POST).score([1, 2])
    score = random_model(LLAMA).score([3])
    assert score.scored == 0 and score.total == 0.0 and "1 tokens" in repr(score)
    with pytest.raises(CutawayError, match="There is no token to score"):
        score.perplexity  # noqa: B018


@pytest.mark.parametrize("weight", ["layers.0.mlp.down.weight", "head.weight"])
def test_a_broken_weight_is_told_and_not_scored(weight):
    with pytest.raises(CutawayError, match=r"small-llama computes no usable numbers: .*; .* holds values"):
        spoilt_model(LLAMA, weight, (0, 0)).score([1, 2, 3])
