"""Whatever goes wrong in a running batch, and wherever, everyone who waits gets a response or is told."""

import threading

import pytest

from cutaway import CutawayError
from cutaway.forward.cache import KVCache
from cutaway.generate import Basic, Batch, Ticket
from cutaway.generate.held import Held
from cutaway.generate.lane import Lane
from cutaway.generate.passes import Passes
from cutaway.generate.response import Response

PROMPT = "<BOS> dragon drinks"
OTHER = "<BOS> troll drinks"
# What a batch calls on the way from a request to its response.
CALLED = [
    (Held, "take"),
    (Held, "forget"),
    (Held, "keep"),
    (KVCache, "__init__"),
    (KVCache, "fork"),
    (KVCache, "due"),
    (KVCache, "settled"),
    (Passes, "claim"),
    (Passes, "chunk"),
    (Passes, "run"),
    (Response, "__init__"),
    (Response, "take"),
    (Lane, "__init__"),
    (Lane, "guess"),
    (Lane, "score"),
    (Lane, "accept"),
    (Batch, "_give_out"),
    (Batch, "_rows"),
]


def breaks(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, nth: int, error: BaseException) -> list[int]:
    """From now on the nth call of a method raises `error`; the calls are counted in the list."""
    whole, calls = getattr(owner, name), [0]

    def breaking(*given, **named):
        calls[0] += 1
        if calls[0] == nth:
            raise error
        return whole(*given, **named)

    monkeypatch.setattr(owner, name, breaking)
    return calls


def driven(batch: Batch) -> None:
    """Step to the end, as whoever drives a batch does who lives through everything."""
    while True:
        try:
            if not batch.step():
                return
        except (MemoryError, KeyboardInterrupt):
            pass


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()], ids=["memory", "interrupt"])
@pytest.mark.parametrize("nth", [1, 2, 3, 5])
@pytest.mark.parametrize(("owner", "name"), CALLED, ids=lambda one: getattr(one, "__name__", one))
def test_wherever_a_batch_breaks_all_are_answered_or_told_and_it_goes_on(owner, name, nth, error, toy, monkeypatch):
    asked = [(PROMPT, {}), (PROMPT, {"guess": 2}), (OTHER, {"score_prompt": True}), (PROMPT, {}), (OTHER, {})]
    alone = [toy.generate(prompt, 4, seed=3).tokens for prompt, _ in asked]
    batch = toy.batch(at_once=3, retained=1)
    requests = [toy.request(prompt, Basic(4, seed=3), settings) for prompt, settings in asked]
    with monkeypatch.context() as patched:
        calls = breaks(patched, owner, name, nth, error)
        tickets = batch.submit_all([(request, None) for request in requests])
        driven(batch)
    assert calls[0] > 0
    assert (batch.running, batch.waiting) == (0, 0)
    assert [ticket.done for ticket in tickets] == [True] * 5
    for ticket, tokens in zip(tickets, alone, strict=True):
        try:
            assert [step.token for step in ticket] == tokens
        except MemoryError as told:
            assert told is error
        except CutawayError as told:
            assert str(told) == "The batch was stopped (KeyboardInterrupt) before this response had ended."
            assert isinstance(error, KeyboardInterrupt)
    again = batch.submit(requests[0])
    driven(batch)
    assert [step.token for step in again] == alone[0]


def test_one_that_cannot_have_a_copy_of_the_prompts_rows_fails_alone(toy, monkeypatch):
    batch = toy.batch(at_once=4)
    requests = [toy.request(PROMPT, Basic(4, seed=seed)) for seed in range(3)]
    breaks(monkeypatch, KVCache, "fork", 1, MemoryError("no room"))
    reads, poor, rich = batch.submit_all([(request, None) for request in requests])
    driven(batch)
    with pytest.raises(MemoryError, match="no room"):
        list(poor)
    assert [step.token for step in reads] == toy.generate(PROMPT, 4, seed=0).tokens
    assert [step.token for step in rich] == toy.generate(PROMPT, 4, seed=2).tokens


def test_where_no_copy_can_be_kept_for_those_who_wait_they_read_the_prompt_themselves(toy, monkeypatch):
    batch = toy.batch(at_once=1)
    requests = [toy.request(PROMPT, Basic(4, seed=seed)) for seed in range(2)]
    breaks(monkeypatch, KVCache, "fork", 1, MemoryError("no room"))
    tickets = batch.submit_all([(request, None) for request in requests])
    driven(batch)
    for seed, ticket in enumerate(tickets):
        assert [step.token for step in ticket] == toy.generate(PROMPT, 4, seed=seed).tokens


def test_a_thread_that_is_stopped_takes_nobody_with_it_and_the_batch_takes_no_more(toy, monkeypatch):
    batch = toy.batch(at_once=1)
    tickets = [batch.submit(toy.request(PROMPT, Basic(9, seed=0))) for _ in range(3)]
    breaks(monkeypatch, Passes, "run", 2, KeyboardInterrupt())
    ended: list[BaseException] = []

    def owner() -> None:
        try:
            batch.run()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=owner)
    thread.start()
    thread.join()
    assert [type(error) for error in ended] == [KeyboardInterrupt]
    assert [ticket.done for ticket in tickets] == [True] * 3
    for ticket in tickets:
        with pytest.raises(CutawayError, match=r"The batch was stopped \(KeyboardInterrupt\)"):
            list(ticket)
    with pytest.raises(CutawayError, match="closed"):
        batch.submit(toy.request(PROMPT, Basic(1)))


def test_a_taker_that_goes_wrong_at_everything_disturbs_nobody(toy):
    def broken(event: object) -> None:
        raise ValueError("nobody listens")

    batch = toy.batch()
    bad = batch.submit(toy.request(PROMPT, Basic(5, seed=1)), broken)
    good = batch.submit(toy.request(PROMPT, Basic(5, seed=1)))
    driven(batch)
    assert bad.done
    assert [step.token for step in good] == toy.generate(PROMPT, 5, seed=1).tokens
    last = [batch.submit(toy.request(PROMPT, Basic(5, seed=1)), taker) for taker in (broken, None)]
    batch.close(drain=False)
    assert [ticket.finish for ticket in last] == ["cancelled"] * 2


def test_a_follower_that_cannot_take_over_is_told_and_the_next_does(toy, monkeypatch):
    batch = toy.batch()
    requests = [toy.request(PROMPT, Basic(4, seed=seed)) for seed in range(3)]
    leaves, poor, rich = batch.submit_all([(request, None) for request in requests])
    batch._admit()
    with monkeypatch.context() as patched:
        breaks(patched, Response, "__init__", 1, MemoryError("no room"))
        leaves.cancel()
    driven(batch)
    assert list(leaves) == []
    with pytest.raises(MemoryError, match="no room"):
        list(poor)
    assert [step.token for step in rich] == toy.generate(PROMPT, 4, seed=2).tokens


def test_whoever_asks_a_ticket_once_more_does_not_wait(toy):
    batch = toy.batch()
    ended, cancelled = (batch.submit(toy.request(PROMPT, Basic(2, seed=0))) for _ in range(2))
    batch.step()
    cancelled.cancel()
    driven(batch)
    assert [len(list(ticket)) for ticket in (ended, ended, cancelled, cancelled)] == [2, 0, 1, 0]
    assert list(ended.ready()) == []
    elsewhere = batch.submit(toy.request(PROMPT, Basic(2, seed=0)), lambda event: None)
    with pytest.raises(CutawayError, match="go to the function that it was submitted with"):
        list(elsewhere)
    assert isinstance(elsewhere, Ticket)


@pytest.mark.parametrize("ends", ["stopped", "cancelled", "failed"])
def test_several_who_take_from_one_ticket_share_its_steps_and_none_waits_for_ever(ends, toy, monkeypatch):
    batch = toy.batch()
    ticket = batch.submit(toy.request(PROMPT, Basic(6, seed=1)))
    taken: list[list[int] | str] = []

    def take() -> None:
        mine: list[int] = []
        try:
            for step in ticket:
                mine.append(step.token)  # one by one: an error leaves those that came before it
        except MemoryError:
            taken.append("failed")
        taken.append(mine)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    if ends == "failed":
        breaks(monkeypatch, Passes, "run", 3, MemoryError("no room"))
    for _ in range(2):
        batch.step()
    if ends == "cancelled":
        ticket.cancel()
    driven(batch)
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    tokens = [token for mine in taken if mine != "failed" for token in mine]
    whole = toy.generate(PROMPT, 6, seed=1).tokens
    assert sorted(tokens) == sorted(whole[: len(whole) if ends == "stopped" else 2])
    assert ("failed" in taken) == (ends == "failed")
