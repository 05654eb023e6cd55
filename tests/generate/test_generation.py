"""The loop: one pass, one token, again; when it ends, what it shows, and that nobody disturbs anybody."""

import threading
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutaway
from cutaway import CutawayError
from cutaway.generate import Limits, Request, Sampling, Step, finished, loop, sample
from cutaway.spec.catalog import llama_like
from cutaway.text.tokenizer import Tokenizer
from cutaway.trace.prompts import Reader
from random_models import GPT2, LLAMA, random_ids, random_model

PROMPT = "<BOS> dragon drinks"


class ByteCodec:
    """One token per byte, then `</s>`: the vocabulary in which every longer character is split."""

    vocab_size = 257
    specials_keep_start = False
    shows_own_pieces = False

    def encode(self, text: str, *, special: bool) -> list[int]:
        return list(text.encode("utf-8"))

    def name(self, id: int) -> str:
        return "</s>" if id == 256 else chr(id)

    def token_bytes(self, id: int, *, at_start: bool) -> bytes:
        return b"</s>" if id == 256 else bytes([id])


BYTES = Tokenizer(ByteCodec(), special_tokens={"</s>": 256}, eos_id=256)


def scripted(tokens: list[int], *, stops=(), max_tokens=None, vocab_size=257) -> list[Step]:
    """The loop over a model that says exactly these tokens."""
    script = iter(tokens)

    def advance(pending: list[int]):
        logits = np.zeros(vocab_size)
        logits[next(script)] = 100.0
        return logits, None

    limits = Limits(max_tokens or len(tokens), None, BYTES.stop_ids, tuple(stops))
    return list(loop(advance, Request((65,), limits, Sampling(temperature=0), 0), BYTES))


# Text


@given(st.text(min_size=1, max_size=12))
def test_no_character_is_split_or_lost_however_its_bytes_come(text):
    steps = scripted(list(text.encode("utf-8")))
    assert "".join(step.text for step in steps) == text
    for step in steps:
        assert "\ufffd" not in step.text or "\ufffd" in text


def test_a_character_appears_with_its_last_byte():
    assert [step.text for step in scripted(list("a€😀".encode()))] == ["a", "", "", "€", "", "", "", "😀"]


@pytest.mark.parametrize("text", ["नमस्ते", "漢字かな交じり文", "👩‍👩‍👧 🇩🇪", "a̐é"])
def test_scripts_whose_characters_take_several_bytes_come_out_whole(text):
    steps = scripted(list(text.encode()))
    assert "".join(step.text for step in steps) == text
    assert not any("\ufffd" in step.text for step in steps)


def test_a_response_may_be_empty():
    steps = scripted([256])
    assert [(step.text, step.finish) for step in steps] == [("", "stop token")]
    steps = scripted(list(b"stop"), stops=["s"])
    assert [(step.text, step.finish) for step in steps] == [("", "stop string")]


def test_a_character_that_is_never_completed_is_told_at_the_end():
    steps = scripted(list("né".encode())[:2])
    assert [step.text for step in steps] == ["n", "\ufffd"]


@given(st.text("ab€<", min_size=1, max_size=10), st.text("ab€<", min_size=1, max_size=3))
def test_a_stop_string_that_spans_tokens_ends_the_text_before_itself(text, stop):
    steps = scripted(list(text.encode()), stops=[stop])
    at = text.find(stop)
    assert "".join(step.text for step in steps) == (text if at < 0 else text[:at])
    assert steps[-1].finish == ("length" if at < 0 else "stop string")
    if at >= 0:
        assert len(steps) == len(text[: at + len(stop)].encode())


def test_the_end_token_ends_the_response_and_is_not_in_its_text():
    steps = scripted([*b"ab", 256, *b"cd"])
    assert "".join(step.text for step in steps) == "ab"
    assert (len(steps), steps[-1].token, steps[-1].finish) == (3, 256, "stop token")
    assert [step.finish for step in steps[:-1]] == [None, None]


def test_text_held_back_for_a_stop_string_is_given_out_when_the_response_ends_otherwise():
    assert "".join(step.text for step in scripted(list(b"ab<|e"), stops=["<|end|>"])) == "ab<|e"
    assert "".join(step.text for step in scripted([*b"ab<|e", 256], stops=["<|end|>"])) == "ab<|e"


def test_an_id_that_the_tokenizer_does_not_know_has_no_text_and_breaks_nothing():
    """Embeddings are often padded past the tokenizer's vocabulary."""
    steps = scripted([65, 258, 66], vocab_size=260)
    assert [step.text for step in steps] == ["A", "", "B"]
    spec = llama_like("padded", vocab_size=400, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=8)
    model = random_model(spec, tokenizer=BYTES)
    out = model.generate([300, 65, 399], max_tokens=40, seed=1)
    assert max(out.tokens) > 256
    assert len(model.trace([300, 65]).next_tokens(400)) == 400
    assert model.trace([300, 65]).prompt.pieces == ("<300>", "A")


def test_streamed_pieces_together_are_the_whole_text(toy):
    for seed in range(5):
        steps = list(toy.stream(PROMPT, max_tokens=12, seed=seed))
        out = toy.generate(PROMPT, max_tokens=12, seed=seed)
        assert "".join(step.text for step in steps) == out.text
        assert [step.token for step in steps] == out.tokens
        assert [step.index for step in steps] == list(range(len(steps)))
        spoken = " ".join(toy.tokenizer.piece(token) for token in out.tokens if token != 0)
        assert out.text.strip() == spoken


# Ends


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_response_has_max_tokens_and_as_many_passes(toy, count):
    out = toy.generate(PROMPT, max_tokens=count, temperature=0)
    assert (len(out.tokens), out.finish, len(out.logprobs)) == (count, "length", count)


@pytest.mark.parametrize("length", [120, 126, 127, 128])
def test_where_learned_positions_end_every_one_of_them_was_used(toy, length):
    """n_max = 128 rows can be run; the last of them still predicts a token."""
    out = toy.generate([0] + [5] * (length - 1), max_tokens=500, seed=0)
    assert out.finish == "context"
    assert length + len(out.tokens) == 128 + 1


def test_max_tokens_may_end_a_response_at_the_very_end_of_the_context(toy):
    assert toy.generate([0] * 128, max_tokens=1, seed=0).finish == "length"


def test_a_stop_string_of_one_letter_or_word_ends_the_toys_response(toy):
    out = toy.generate(PROMPT, max_tokens=9, temperature=0, stop="mixes")
    assert (out.text, out.finish) == (" potion ", "stop string")
    assert toy.tokenizer.piece(out.tokens[-1]) == "mixes"
    assert toy.generate(PROMPT, max_tokens=9, temperature=0, stop=["x", "i"]).text == " pot"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number, at least 1"),
        ({"seed": -1}, "The seed is -1; it must be 0 or a positive whole number"),
        ({"temperature": -1}, "The temperature is -1"),
        ({"top_p": 1.5}, r"top_p is 1\.5"),
        ({"stop": [""]}, "A stop string is ''"),
        ({"points": ["layers.9.attn.out"]}, "toy has layers 0 to 2"),
    ],
)
def test_wrong_settings_are_refused_at_the_call_before_any_pass(toy, settings, said):
    for call in (toy.stream, toy.generate):
        with pytest.raises(CutawayError, match=said):
            call(PROMPT, **settings)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "The prompt is empty"),
        ([], "The prompt is an empty list"),
        ([1, 10], "Token id 10 at position 1 is outside the vocabulary of toy, which has ids 0 to 9"),
        ([-1], "Token id -1 at position 0 is outside the vocabulary"),
        ([0] * 129, "The prompt has 129 tokens"),
        ([0.5], "A prompt is a text or one list of whole-number token ids"),
        ([[1, 2]], "A prompt is a text or one list of whole-number token ids"),
        ([[1], [2, 3]], "A prompt is a text or one list of token ids, not several lists"),
        (None, "A prompt is a text or one list of whole-number token ids"),
        ("dragon sleeps", "'sleeps' is not in this model's vocabulary"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused(toy, prompt, said):
    for call in (toy.trace, toy.generate, toy.stream):
        with pytest.raises(CutawayError, match=said):
            call(prompt)


# Probabilities and seeds


def test_a_log_probability_is_the_models_own_whatever_was_filtered(toy):
    out = toy.generate(PROMPT, max_tokens=8, temperature=0.3, top_k=2, seed=3)
    ids = [0, 5, 6]
    for token, logprob in zip(out.tokens, out.logprobs, strict=True):
        assert np.exp(logprob) == pytest.approx(toy.trace(ids, points=[]).probabilities[token], rel=1e-9)
        ids.append(token)


def test_the_same_seed_says_the_same_and_other_seeds_say_other_things(toy):
    said = [toy.generate(PROMPT, max_tokens=10, seed=seed).tokens for seed in (1, 1, 2, 3)]
    assert said[0] == said[1]
    assert len(set(map(tuple, said))) == 3
    unseeded = {toy.generate(PROMPT, max_tokens=1).tokens[0] for _ in range(80)}
    assert len(unseeded) > 1  # all 80 would be the same once in 10^16 runs


def test_the_first_token_is_drawn_from_the_models_own_distribution(toy):
    p = toy.trace(PROMPT, points=[]).probabilities
    drawn = Counter(toy.generate(PROMPT, max_tokens=1, seed=seed).tokens[0] for seed in range(600))
    expected = 600 * p
    likely = expected > 5
    statistic = sum((drawn[int(i)] - expected[i]) ** 2 / expected[i] for i in np.flatnonzero(likely))
    assert statistic < 35


@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=lambda spec: spec.name)
def test_decoding_with_the_cache_says_what_decoding_without_it_says(spec):
    model, ids = random_model(spec), random_ids(spec, 6).tolist()
    out = model.generate(ids, max_tokens=12, temperature=0.7, top_k=5, seed=8)
    random = np.random.default_rng(8)
    for token in out.tokens:
        assert sample(model.trace(ids, points=[]).last_logits, Sampling(0.7, 5), random) == token
        ids.append(token)


def test_times_and_speed_are_told(toy):
    out = toy.generate(PROMPT, max_tokens=5, seed=0)
    assert out.prompt_seconds > 0
    assert out.tokens_per_second == pytest.approx(4 / out.decode_seconds)
    assert toy.generate(PROMPT, max_tokens=1, seed=0).tokens_per_second is None
    assert out.prompt_ids == [0, 5, 6]


def test_a_response_is_put_together_from_its_steps():
    steps = [Step(0, 7, "a", -0.5), Step(1, 8, "b", -1.5, "length")]
    out = finished(Request((1, 2), Limits(2, None, frozenset(), ())), iter(steps), (GPT2, "float64"), keep_steps=True)
    assert (out.tokens, out.text, out.logprobs, out.finish, out.steps) == ([7, 8], "ab", [-0.5, -1.5], "length", steps)


def test_a_stream_that_is_dropped_half_way_disturbs_nobody(toy):
    stream = toy.stream(PROMPT, max_tokens=50, temperature=0)
    taken = [next(stream), next(stream)]
    stream.close()
    assert [step.token for step in taken] == toy.generate(PROMPT, max_tokens=2, temperature=0).tokens


def test_how_tokens_read_is_looked_up_only_for_those_who_look(toy, monkeypatch):
    asked: list[int] = []
    right = Reader.pieces

    def counted(self, ids):
        asked.append(len(ids))
        return right(self, ids)

    monkeypatch.setattr(Reader, "pieces", counted)
    plain = toy.generate(PROMPT, max_tokens=4, seed=1)
    assert asked == [3]  # the prompt
    watched = toy.generate(PROMPT, max_tokens=4, seed=1, points=["logits"])
    assert asked == [3, 3, 3, 1, 1, 1]
    assert watched.tokens == plain.tokens
    read = [step.trace.prompt.pieces for step in watched.steps if step.trace is not None]
    assert [len(pieces) for pieces in read] == [3, 1, 1, 1]
    assert [pieces for (pieces,) in read[1:]] == [toy.piece(token) for token in plain.tokens[:-1]]


def test_a_response_knows_the_prompt_that_it_continues(toy):
    ids = toy.tokenizer.encode(PROMPT)
    assert list(toy.generate(PROMPT, max_tokens=1).prompt_ids) == ids == toy.generate(ids, max_tokens=1).prompt_ids


def test_two_streams_of_one_model_interleave_without_mixing(toy):
    one, other = toy.stream(PROMPT, max_tokens=8, seed=1), toy.stream("<BOS> troll", max_tokens=8, seed=2)
    mixed = [(a.token, b.token) for a, b in zip(one, other, strict=True)]
    assert [a for a, _ in mixed] == toy.generate(PROMPT, max_tokens=8, seed=1).tokens
    assert [b for _, b in mixed] == toy.generate("<BOS> troll", max_tokens=8, seed=2).tokens


# Threads


@pytest.mark.parametrize("engine", ["numpy", "cpu"])
def test_several_threads_get_from_one_model_what_each_would_get_alone(engine):
    model = cutaway.load("toy", engine=engine, dtype="float32")
    prompts = ["<BOS> dragon drinks", "<BOS> troll", "<BOS> wizard mixes glowing", "<BOS> dragon"] * 2

    def work(index: int) -> list:
        prompt = prompts[index]
        found: list = []
        for turn in range(4):
            out = model.generate(prompt, max_tokens=10, seed=10 * index + turn)
            found += [out.tokens, out.logprobs, out.text]
            found.append(model.trace(prompt)["layers.1.attn.pattern"].tobytes())
        return found

    alone = [work(index) for index in range(len(prompts))]
    together: dict[int, list] = {}
    failures: list[BaseException] = []

    def collect(index: int) -> None:
        try:
            together[index] = work(index)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=collect, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [together[index] for index in range(len(prompts))] == alone


def test_a_broken_weight_is_named_instead_of_a_plausible_token():
    from cutaway.engines.weights import Weight

    model = random_model(GPT2)
    broken = model.parameters.stored["layers.1.mlp.up.weight"].dequantise(np.float64).copy()
    broken[3, 2] = np.nan
    model.parameters.stored["layers.1.mlp.up.weight"] = Weight.of(broken)
    part = model.parameters.layers[1]["mlp.up"]
    model.parameters.layers[1]["mlp.up"] = type(part)(Weight.of(broken), part.bias)
    for call in (model.trace, model.generate):
        with pytest.raises(CutawayError, match=r"layers\.1\.mlp\.up is nan .*layers\.1\.mlp\.up\.weight holds values"):
            call([1, 2, 3])


def test_steps_are_made_one_at_a_time_as_they_are_asked_for():
    passes = []

    def advance(pending: list[int]):
        passes.append(list(pending))
        return np.eye(257)[65 + len(passes)] * 100, None

    limits = Limits(3, None, frozenset(), ())
    steps = loop(advance, Request((1, 2), limits, Sampling(temperature=0), 0), BYTES)
    seen = [(step.token, len(passes)) for step in steps]
    assert seen == [(66, 1), (67, 2), (68, 3)]
    assert passes == [[1, 2], [66], [67]]
    assert all(later == [earlier_token] for later, (earlier_token, _) in zip(passes[1:], seen, strict=False))
    assert [b - a for (_, a), (_, b) in pairwise(seen)] == [1, 1]
