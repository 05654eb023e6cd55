"""Sequences that share passes: each gets what it gets alone, and they come, go, fail and wait without disturbing."""

import gc
import threading
import weakref

import numpy as np
import pytest
from cached_models import DYNAMIC, ENGINES, LATENT, SPECS, WINDOWED, model_of, passes_of

import cutaway
from cutaway import CutawayError
from cutaway.engines.layout import CHUNK
from cutaway.generate import Basic, QueueFull
from cutaway.generate.batch import Batch
from cutaway.generate.passes import Passes
from random_models import LLAMA, CountingEngine, random_ids, random_model

PROMPT = "<BOS> dragon drinks"


def told(out) -> tuple:
    return out.tokens, out.logprobs, out.text, out.finish


# The same as alone


@pytest.mark.parametrize(("engine", "dtype"), ENGINES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_in_company_every_sequence_is_bit_for_bit_what_it_is_alone(spec, engine, dtype):
    model = model_of(spec, engine, dtype)
    prompts = [random_ids(spec, length, seed=length).tolist() for length in (1, 7, 30, 3, 18, 70, 2)]
    together = model.generate_many(prompts, 12, 0.9, seed=range(7), at_once=3)
    for index, (prompt, out) in enumerate(zip(prompts, together, strict=True)):
        assert told(out) == told(model.generate(prompt, 12, 0.9, seed=index))


@pytest.mark.parametrize("at_once", [0, -3, "x", 1.5, True, None])
def test_a_number_of_sequences_that_cannot_run_together_is_refused(at_once):
    with pytest.raises(CutawayError, match=r"at_once is .*; it must be a whole number, at least 1"):
        random_model(LLAMA).generate_many([[1], [2]], 3, at_once=at_once)


def test_a_prompt_that_is_read_in_chunks_beside_others_comes_out_as_in_one_pass():
    for spec in (LLAMA, WINDOWED, LATENT, DYNAMIC):
        model = random_model(spec)
        long = random_ids(spec, 2 * CHUNK + 70).tolist()
        whole = model.generate(long, 6, seed=1)
        batch = Batch(passes_of(model), None, prompt_rows=CHUNK)
        one = batch.submit(model.request(long, Basic(6, seed=1)))
        other = batch.submit(model.request(long[:5], Basic(20, seed=2)))
        while batch.step():
            pass
        assert [(step.token, step.logprob) for step in one] == list(zip(whole.tokens, whole.logprobs, strict=True))
        assert [step.token for step in other] == model.generate(long[:5], 20, seed=2).tokens


def test_the_others_go_on_while_a_long_prompt_is_read():
    model = random_model(LLAMA)
    batch = Batch(passes_of(model), None, prompt_rows=CHUNK)
    quick = batch.submit(model.request([1, 2], Basic(50, seed=0)))
    batch.step()
    slow = batch.submit(model.request(random_ids(LLAMA, 3 * CHUNK + 9).tolist(), Basic(2, seed=0)))
    for passes in range(1, 4):
        batch.step()
        assert len(list(quick.ready())) == (2 if passes == 1 else 1)
        assert list(slow.ready()) == []
    batch.step()
    assert len(list(slow.ready())) == 1


def test_eight_sequences_cost_as_many_passes_as_the_longest():
    model = random_model(LLAMA, engine=CountingEngine())
    model.engine.multiplied.clear()
    outs = model.generate_many([[n] for n in range(8)], 5, temperature=0, at_once=8)
    rows = model.engine.rows_through(model.parameters.layers[0]["attn.q"].weight)
    assert rows == [8] * 5
    assert [len(out.tokens) for out in outs] == [5] * 8


def test_sequences_leave_when_they_end_and_the_next_join():
    model = random_model(LLAMA, engine=CountingEngine())
    batch = model.batch(at_once=2)
    lengths = [1, 4, 2, 2]
    tickets = [batch.submit(model.request([n], Basic(length, seed=n))) for n, length in enumerate(lengths)]
    model.engine.multiplied.clear()
    while batch.step():
        assert batch.running <= 2
    assert model.engine.rows_through(model.parameters.layers[0]["attn.q"].weight) == [2, 2, 2, 2, 1]
    assert [len(list(ticket)) for ticket in tickets] == lengths


def test_one_seed_for_many_counts_on_and_a_list_gives_each_its_own(toy):
    counted = toy.generate_many([PROMPT] * 3, 8, seed=5)
    assert [out.tokens for out in counted] == [toy.generate(PROMPT, 8, seed=seed).tokens for seed in (5, 6, 7)]
    given = toy.generate_many([PROMPT] * 2, 8, seed=[7, 7])
    assert given[0].tokens == given[1].tokens == counted[2].tokens
    with pytest.raises(CutawayError, match="one for each of the 2 prompts"):
        toy.generate_many([PROMPT] * 2, seed=[1])
    with pytest.raises(CutawayError, match=r"Prompt 1: .*'sleeps' is not in this model's vocabulary"):
        toy.generate_many([PROMPT, "dragon sleeps"])
    assert toy.generate_many([]) == []


# Leaving early


@pytest.fixture
def born(monkeypatch):
    """Every cache that is made, held weakly."""
    made: list[weakref.ref] = []
    make = Passes.cache

    def watched(self):
        cache = make(self)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(Passes, "cache", watched)
    return made


def test_a_cancelled_sequence_stops_and_its_cache_is_freed(toy, born):
    batch = toy.batch()
    gone = batch.submit(toy.request("<BOS> troll drinks", Basic(500, seed=1)))
    stays = batch.submit(toy.request(PROMPT, Basic(9, seed=2)))
    for _ in range(3):
        batch.step()
    assert batch.nbytes == 2 * toy_bytes(3 + 2)
    gone.cancel()
    gone.cancel()  # twice is once
    assert batch.running == 1
    gc.collect()
    assert [ref() is None for ref in born] == [True, False]
    while batch.step():
        pass
    assert [step.token for step in stays] == toy.generate(PROMPT, 9, seed=2).tokens
    assert (gone.finish, len(list(gone))) == ("cancelled", 3)
    gc.collect()
    assert [ref() for ref in born[:2]] == [None, None]


def test_what_waits_can_be_cancelled_before_it_begins(toy):
    batch = toy.batch(at_once=1)
    first = batch.submit(toy.request(PROMPT, Basic(3, seed=0)))
    second = batch.submit(toy.request(PROMPT, Basic(3, seed=0)))
    batch.step()
    second.cancel()
    while batch.step():
        pass
    assert (len(list(first)), list(second), batch.passes) == (3, [], 3)


def test_a_stream_that_is_closed_frees_its_cache(toy, born):
    stream = toy.stream(PROMPT, max_tokens=500, seed=0)
    next(stream)
    assert [ref().length for ref in born] == [3]
    stream.close()
    gc.collect()
    assert [ref() for ref in born] == [None]


def test_one_that_fails_fails_alone(toy):
    def broken(text: str) -> bool:
        raise RuntimeError("no such tool")

    batch = toy.batch()
    bad = batch.submit(toy.request(PROMPT, Basic(5, seed=1), {"until": broken}))
    good = batch.submit(toy.request(PROMPT, Basic(5, seed=1)))
    while batch.step():
        pass
    with pytest.raises(RuntimeError, match="no such tool"):
        list(bad)
    assert [step.token for step in good] == toy.generate(PROMPT, 5, seed=1).tokens


def test_a_callback_ends_a_response_when_it_has_seen_enough(toy):
    texts: list[str] = []

    def enough(text: str) -> bool:
        texts.append(text)
        return "mixes" in text

    out = toy.generate(PROMPT, 9, temperature=0, until=enough)
    assert (out.text, out.finish) == (" potion mixes", "callback")
    assert texts == [" potion", " potion mixes"]
    with pytest.raises(CutawayError, match="until is 3; it must be a function"):
        toy.generate(PROMPT, until=3)


# The queue, and other threads


def test_a_full_queue_refuses(toy):
    batch = toy.batch(at_once=1, waiting=2)
    request = toy.request(PROMPT, Basic(2, seed=0))
    for _ in range(2):
        batch.submit(request)
    with pytest.raises(QueueFull, match="2 requests are waiting, as many as may"):
        batch.submit(request)
    batch.step()  # one has begun
    batch.submit(request)
    assert (batch.running, batch.waiting) == (1, 2)


def test_an_owner_thread_serves_many_clients_who_come_and_go():
    model = cutaway.load("toy", engine="cpu")
    batch = model.batch(at_once=4)
    owner = threading.Thread(target=batch.run)
    owner.start()
    outcomes: dict[int, list[int]] = {}

    def client(seed: int) -> None:
        ticket = batch.submit(model.request(PROMPT, Basic(30, seed=seed)))
        tokens = []
        for step in ticket:
            tokens.append(step.token)
            if seed % 3 == 0 and len(tokens) == 4:
                ticket.cancel()
                break
        outcomes[seed] = tokens

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(12)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    batch.close()
    owner.join()
    assert (batch.running, batch.waiting, batch.nbytes) == (0, 0, 0)
    for seed, tokens in outcomes.items():
        alone = model.generate(PROMPT, 30, seed=seed).tokens
        assert tokens == (alone[:4] if seed % 3 == 0 else alone)
    with pytest.raises(CutawayError, match="closed"):
        batch.submit(model.request(PROMPT, Basic(1)))


def test_closing_without_draining_ends_everybody(toy):
    batch = toy.batch(at_once=1)
    tickets = [batch.submit(toy.request(PROMPT, Basic(100, seed=0))) for _ in range(3)]
    batch.step()
    batch.close(drain=False)
    assert batch.step() is False
    assert [ticket.finish for ticket in tickets] == ["cancelled"] * 3


# Counted and seen


def test_a_response_takes_as_many_passes_as_it_has_tokens_and_the_first_is_over_the_prompt():
    """Chapter 15.1: 500 tokens, 500 forward passes."""
    model = random_model(LLAMA, engine=CountingEngine())
    model.engine.multiplied.clear()
    out = model.generate([1, 2, 3, 4], 500, seed=0)
    rows = model.engine.rows_through(model.parameters.layers[0]["mlp.up"].weight)
    assert rows == [4] + [1] * 499
    assert (len(out.tokens), out.passes, out.tokens_per_pass) == (500, 500, 1.0)


def test_a_prompt_of_several_chunks_shows_how_far_it_was_read(monkeypatch):
    from contextlib import contextmanager

    import cutaway.generate.batch as batch

    moved: list[int] = []

    @contextmanager
    def watched(label, total, unit, *, after):
        assert (label, total, unit) == ("Reading the prompt", 3 * CHUNK + 9, "tokens")
        yield moved.append

    monkeypatch.setattr(batch, "progress", watched)
    model = random_model(LLAMA)
    ids = random_ids(LLAMA, 3 * CHUNK + 9).tolist()
    shown = model.generate(ids, 3, seed=0)
    assert moved == [2 * CHUNK]  # the rest is one more pass, after which the first token is there
    alone = Batch(passes_of(model), None, prompt_rows=10**6)
    ticket = alone.submit(model.request(ids, Basic(3, seed=0)))
    assert [step.token for step in alone.steps(ticket)] == shown.tokens


def test_a_hundred_requests_that_come_and_go_at_random_leave_nothing_behind(toy):
    random = np.random.default_rng(5)
    batch = toy.batch(at_once=5, waiting=40, retained=2)
    alone: dict[int, list[int]] = {}
    tickets: list[tuple[int, int, object]] = []
    heard: dict[int, list[int]] = {}
    refused = 0
    for number in range(100):
        seed, length = int(random.integers(0, 6)), int(random.integers(1, 12))
        settings = {"guess": 3} if number % 4 == 0 else {}
        try:
            ticket = batch.submit(toy.request(PROMPT, Basic(length, seed=seed), settings))
        except QueueFull:
            refused += 1
            batch.step()
            continue
        tickets.append((seed, length, ticket))
        for _ in range(int(random.integers(0, 3))):
            batch.step()
        if random.random() < 0.3:
            tickets[int(random.integers(0, len(tickets)))][2].cancel()
    while batch.step():
        pass
    assert (batch.running, batch.waiting) == (0, 0)
    cancelled = 0
    for place, (seed, length, ticket) in enumerate(tickets):
        alone.setdefault(seed, toy.generate(PROMPT, 12, seed=seed).tokens)
        heard[place] = [step.token for step in ticket.ready()]
        if ticket.finish == "cancelled":
            cancelled += 1
            assert heard[place] == alone[seed][: len(heard[place])]
        else:
            assert heard[place] == alone[seed][:length]
    assert 0 < cancelled < len(tickets)
    assert batch.nbytes <= 2 * toy_bytes(3 + 12)


def toy_bytes(tokens: int) -> int:
    return tokens * 3 * 2 * 6 * 8


@pytest.mark.parametrize("prompts", [PROMPT, b"dragon", 5, iter([PROMPT])])
def test_what_is_no_list_of_prompts_is_not_taken_for_one(prompts, toy):
    with pytest.raises(CutawayError, match="takes a list of prompts"):
        toy.generate_many(prompts, 2)
