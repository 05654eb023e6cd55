"""Several responses to one prompt read it once, and each says bit for bit what it says alone."""

import gc
import weakref

import numpy as np
import pytest
from cached_models import ENGINES, SPECS, model_of

from cutaway import CutawayError
from cutaway.engines.layout import CHUNK
from cutaway.forward.cache import KVCache
from cutaway.generate import Basic, Batch, QueueFull
from random_models import LLAMA, CountingEngine, random_ids, random_model

PROMPT = "<BOS> dragon drinks"


def rows_of(model) -> list[int]:
    return model.engine.rows_through(model.parameters.layers[0]["mlp.up"].weight)


def run(batch: Batch) -> None:
    while batch.step():
        pass


@pytest.mark.parametrize(("engine", "dtype"), ENGINES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("at_once", [8, 2])
def test_responses_to_one_prompt_are_bit_for_bit_what_each_is_alone(spec, engine, dtype, at_once):
    model = model_of(spec, engine, dtype)
    ids = random_ids(spec, 21).tolist()
    together = model.generate_many([ids] * 5, 9, 0.9, seed=3, at_once=at_once)
    for index, out in enumerate(together):
        alone = model.generate(ids, 9, 0.9, seed=3 + index)
        assert (out.tokens, out.logprobs) == (alone.tokens, alone.logprobs)


def test_the_prompt_is_read_once_also_for_those_who_have_to_wait():
    model = random_model(LLAMA, engine=CountingEngine())
    ids = random_ids(LLAMA, 30).tolist()
    model.engine.multiplied.clear()
    outs = model.generate_many([ids] * 6, 4, seed=1, at_once=4)
    assert rows_of(model) == [30, 4, 4, 4, 2, 2, 2]
    assert [out.cache.appended[0] for out in outs] == [30, 0, 0, 0, 0, 0]
    assert [out.cache.reused[0] for out in outs] == [0, 30, 30, 30, 30, 30]
    assert [out.cache.flops[0] for out in outs[1:]] == [0] * 5


def test_a_prompt_of_several_chunks_is_joined_while_it_is_read():
    model = random_model(LLAMA, engine=CountingEngine())
    ids = random_ids(LLAMA, 2 * CHUNK + 5).tolist()
    batch = Batch(model.batch()._passes, None, prompt_rows=CHUNK)
    model.engine.multiplied.clear()
    first = batch.submit(model.request(ids, Basic(3, seed=1)))
    batch.step()
    second = batch.submit(model.request(ids, Basic(3, seed=2)))
    run(batch)
    assert rows_of(model) == [CHUNK, CHUNK, 5, 2, 2]
    assert [step.token for step in first] == model.generate(ids, 3, seed=1).tokens
    assert [step.token for step in second] == model.generate(ids, 3, seed=2).tokens


def test_each_has_settings_of_its_own():
    model = random_model(LLAMA)
    ids = random_ids(LLAMA, 12).tolist()
    asked = [
        (Basic(6, 0), {}),
        (Basic(6, 1.3, seed=5), {"alternatives": 2}),
        (Basic(1, seed=3), {}),
        (Basic(6, seed=3), {"force": {0: 4}}),
        (Basic(6, seed=3), {"guess": 3}),
        (Basic(6, seed=3), {"cache": False}),
    ]
    batch = model.batch()
    tickets = batch.submit_all([(model.request(ids, basic, settings), None) for basic, settings in asked])
    run(batch)
    for ticket, (basic, settings) in zip(tickets, asked, strict=True):
        alone = model.batch(1)
        one = alone.submit(model.request(ids, basic, settings))
        run(alone)
        assert [(s.token, s.logprob, s.alternatives) for s in ticket] == [
            (s.token, s.logprob, s.alternatives) for s in one
        ]


def test_when_the_one_that_reads_leaves_the_next_reads_on():
    model = random_model(LLAMA, engine=CountingEngine())
    ids = random_ids(LLAMA, 2 * CHUNK + 5).tolist()
    batch = Batch(model.batch()._passes, None, prompt_rows=CHUNK)
    model.engine.multiplied.clear()
    gone, also_gone, stays = batch.submit_all([(model.request(ids, Basic(3, seed=seed)), None) for seed in range(3)])
    batch.step()
    assert batch.running == 3
    gone.cancel()
    also_gone.cancel()
    assert batch.running == 1
    run(batch)
    assert rows_of(model) == [CHUNK, CHUNK, 5, 1, 1]
    assert [step.token for step in stays] == model.generate(ids, 3, seed=2).tokens
    assert (list(gone), gone.finish, also_gone.finish) == ([], "cancelled", "cancelled")


def test_nothing_is_left_of_a_prompt_when_all_have_gone(toy, monkeypatch):
    born: list[weakref.ref] = []
    make = KVCache.__init__

    def watched(self, *given):
        make(self, *given)
        born.append(weakref.ref(self))

    monkeypatch.setattr(KVCache, "__init__", watched)
    batch = toy.batch(at_once=2)
    tickets = batch.submit_all([(toy.request(PROMPT, Basic(50, seed=seed)), None) for seed in range(4)])
    batch.step()
    assert batch.nbytes == 3 * len(PROMPT.split()) * 3 * 2 * 6 * 8  # two under way, and one for those who wait
    for ticket in tickets[2:]:
        ticket.cancel()
    assert batch.nbytes == 2 * len(PROMPT.split()) * 3 * 2 * 6 * 8
    for ticket in tickets:
        ticket.cancel()
    gc.collect()
    assert (batch.nbytes, batch.running, batch.waiting) == (0, 0, 0)
    assert [ref() for ref in born] == [None] * len(born)


def test_a_pass_that_fails_fails_all_who_waited_for_it(toy, monkeypatch):
    batch = toy.batch()
    tickets = batch.submit_all([(toy.request(PROMPT, Basic(5, seed=seed)), None) for seed in range(3)])

    def broken(work, **shown):
        raise CutawayError("It broke.")

    monkeypatch.setattr(batch._passes, "run", broken)
    run(batch)
    for ticket in tickets:
        with pytest.raises(CutawayError, match="It broke"):
            list(ticket)
    assert batch.running == 0


def test_closing_cancels_those_too_who_wait_for_a_prompt_to_be_read(toy):
    batch = toy.batch(at_once=4)
    tickets = batch.submit_all([(toy.request(PROMPT, Basic(5, seed=seed)), None) for seed in range(6)])
    batch._admit()
    batch.close(drain=False)
    assert [ticket.finish for ticket in tickets] == ["cancelled"] * 6


def test_all_are_queued_or_none(toy):
    batch = toy.batch(at_once=1, waiting=3)
    request = toy.request(PROMPT, Basic(2, seed=0))
    batch.submit(request)
    with pytest.raises(QueueFull, match="1 request is waiting and 3 may: 3 more are too many now"):
        batch.submit_all([(request, None)] * 3)
    assert batch.waiting == 1


def test_requests_with_few_prompts_that_come_and_go_at_random_say_what_each_says_alone(toy):
    random = np.random.default_rng(8)
    prompts = [PROMPT, "<BOS> troll", PROMPT + " potion"]
    batch = toy.batch(at_once=3, retained=1)
    tickets = []
    for _ in range(80):
        prompt, seed = prompts[int(random.integers(0, 3))], int(random.integers(0, 4))
        count = int(random.integers(1, 4))
        asked = [(toy.request(prompt, Basic(7, seed=seed)), None)] * count
        tickets += [(prompt, seed, ticket) for ticket in batch.submit_all(asked)]
        for _ in range(int(random.integers(0, 4))):
            batch.step()
        if random.random() < 0.5:
            tickets[int(random.integers(0, len(tickets)))][2].cancel()
    run(batch)
    alone = {(p, s): toy.generate(p, 7, seed=s).tokens for p in prompts for s in range(4)}
    ended = 0
    for prompt, seed, ticket in tickets:
        said = [step.token for step in ticket.ready()]
        assert said == alone[prompt, seed][: len(said)]
        assert ticket.done and (ticket.finish == "cancelled" or len(said) == len(alone[prompt, seed]))
        ended += ticket.finish != "cancelled"
    assert ended > len(tickets) / 2
    assert (batch.running, batch.waiting) == (0, 0)


# A prompt that is scored


@pytest.mark.parametrize(("engine", "dtype"), ENGINES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_scored_prompt_tells_each_tokens_probability_and_changes_nothing(spec, engine, dtype):
    model = model_of(spec, engine, dtype)
    ids = random_ids(spec, CHUNK // 4 + 9).tolist()
    plain, out = model.generate(ids, 4, seed=1), model.generate(ids, 4, seed=1, score_prompt=True, alternatives=2)
    assert (out.tokens, out.logprobs) == (plain.tokens, plain.logprobs)
    told = out.steps[0].prompt
    assert [one.token for one in told] == ids and told[0].logprob is None
    expected = model.score(ids).logprobs[1:]
    np.testing.assert_allclose([one.logprob for one in told[1:]], expected, rtol=1e-9 if dtype == "float64" else 1e-5)
    for one in told[1:]:
        assert len(one.alternatives) == 2 and one.alternatives[0][1] >= one.logprob
    assert [step.prompt for step in out.steps[1:]] == [()] * 3


def test_a_long_prompt_is_scored_chunk_by_chunk_in_company_and_for_all_who_share_it():
    model = random_model(LLAMA, engine=CountingEngine())
    ids = random_ids(LLAMA, 2 * CHUNK + 9).tolist()
    batch = model.batch(at_once=2, retained=2)
    plain = batch.submit(model.request(ids[:-3], Basic(2, seed=0)))
    run(batch)
    model.engine.multiplied.clear()
    asked = [(model.request(ids, Basic(2, seed=seed), {"score_prompt": True}), None) for seed in range(3)]
    tickets = batch.submit_all(asked)
    run(batch)
    assert rows_of(model)[:3] == [CHUNK, CHUNK, 9]  # what was kept is not gone on from: its rows are wanted
    assert sum(rows_of(model)) == len(ids) + 3
    firsts = [next(iter(ticket)) for ticket in tickets]
    expected = model.score(ids).logprobs[1:]
    for first in firsts:
        np.testing.assert_allclose([one.logprob for one in first.prompt[1:]], expected, rtol=1e-9)
    assert len(list(plain)) == 2


def test_what_cannot_be_scored_is_refused(toy):
    with pytest.raises(CutawayError, match="score_prompt is 3; it must be True or False"):
        toy.generate(PROMPT, score_prompt=3)
    with pytest.raises(CutawayError, match="leave out cache"):
        toy.generate(PROMPT, score_prompt=True, cache=KVCache(toy.spec, toy.engine))
    with pytest.raises(CutawayError, match=r"ask for points=\['logits'\], not score_prompt"):
        toy.generate(PROMPT, score_prompt=True, points=["embed.out"])
    assert toy.generate(PROMPT, 2, 0, score_prompt=True, cache=False).steps[0].prompt
