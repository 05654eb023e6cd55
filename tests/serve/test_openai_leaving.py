"""Clients that leave, and what the server does for those that stay: nothing is wrong, left over or lost."""

import asyncio
import importlib.util
import json
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
from live_server import client_of, live

import cutaway
from cutaway.errors import CutawayError
from cutaway.generate import Basic, Batch
from cutaway.model import Model
from cutaway.serve.models import Models
from cutaway.serve.openai import OpenAI
from cutaway.serve.openai.driver import Driver
from cutaway.serve.owner import Owner

LONG = {"model": "toy", "prompt": "<BOS> dragon", "max_tokens": 60, "seed": 1}


@pytest.fixture(scope="module")
def clients() -> ModuleType:
    """The clients of the server's benchmark."""
    path = Path(__file__).parents[2] / "benchmarks" / "server.py"
    spec = importlib.util.spec_from_file_location("server_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every step that a batch makes, each of which takes at least 20 ms now."""
    made: list[float] = []
    step = Batch.step

    def slow(batch: Batch) -> bool:
        time.sleep(0.02)
        made.append(time.perf_counter())
        return step(batch)

    monkeypatch.setattr(Batch, "step", slow)
    return made


def health(port: int) -> dict:
    plain = client_of(port).with_options(base_url=f"http://127.0.0.1:{port}")
    return json.loads(plain.get("/health", cast_to=str))


def wait_until_idle(port: int) -> None:
    while (told := health(port))["running"] or told["waiting"]:
        time.sleep(0.01)


def test_a_client_that_leaves_its_stream_stops_the_work(steps):
    with live() as port, client_of(port) as client:
        stream = client.completions.create(stream=True, n=2, **LONG)
        next(iter(stream))
        assert health(port)["running"] == 2
        stream.close()
        wait_until_idle(port)
        assert len(steps) < 50
        assert client.completions.create(**LONG | {"max_tokens": 2}).usage.completion_tokens == 2


def test_a_client_that_gives_up_waiting_stops_the_work(steps, clients):
    with live() as port:
        asyncio.run(clients.leave(port, "/v1/completions", json.dumps(LONG).encode(), 1 << 20, 0.3))
        wait_until_idle(port)
        assert 0 < len(steps) < 50


def test_a_client_that_leaves_the_queue_is_never_computed_for(steps, clients):
    with live(at_once=1) as port, client_of(port) as client:
        stream = client.completions.create(stream=True, **LONG)
        next(iter(stream))
        asyncio.run(clients.leave(port, "/v1/completions", json.dumps(LONG).encode(), 1 << 20, 0.2))
        while health(port)["waiting"]:
            time.sleep(0.01)
        assert health(port)["running"] == 1
        assert len(list(stream)) == 59


def test_responses_under_way_are_finished_when_the_server_is_told_to_stop(steps):
    with ExitStack() as stack, client_of(stack.enter_context(live())) as client:
        stream = iter(client.completions.create(stream=True, **LONG))
        first = next(stream)
        closing = threading.Thread(target=stack.pop_all().close)
        closing.start()
        time.sleep(0.1)
        parts = [first, *stream]
        assert len(steps) >= 60
        closing.join(30)
    assert len(parts) == 60 and parts[-1].choices[0].finish_reason == "length"


def test_the_page_has_its_turn_while_responses_are_under_way(steps):
    with live() as port, client_of(port) as client:
        stream = iter(client.completions.create(stream=True, **LONG))
        next(stream)
        page = client.with_options(base_url=f"http://127.0.0.1:{port}")
        run = json.loads(page.post("/api/run", body={"model": "toy", "prompt": "<BOS> dragon"}, cast_to=str))
        assert run["run"] and health(port)["running"] == 1
        assert len(list(stream)) == 59


def test_what_a_response_left_is_given_up_with_it(toy: Model):
    async def left() -> int:
        owner = Owner()
        driver = Driver(toy, owner, at_once=2, waiting=8)
        flow = driver.submit([toy.request("<BOS> dragon", Basic(100), {}) for _ in range(4)], whole=False)
        async for _ in flow:
            break
        assert driver.batch.nbytes > 0 and not driver.idle
        flow.close()
        await owner.run(lambda: None)
        assert driver.idle and not driver.batch.running and not driver.batch.waiting
        owner.close()
        return driver.batch.nbytes

    assert asyncio.run(left()) == 0


def test_a_failure_in_a_pass_reaches_whoever_waits_and_nobody_else(toy: Model, monkeypatch):
    async def failing() -> None:
        owner = Owner()
        driver = Driver(toy, owner, at_once=2, waiting=8)
        with monkeypatch.context() as patched:
            patched.setattr(Batch, "_admit", lambda batch: (_ for _ in ()).throw(MemoryError("no room")))
            flow = driver.submit([toy.request("<BOS>", Basic(3), {})], whole=True)
            with pytest.raises(MemoryError):
                async for _ in flow:
                    pass
            flow.close()
        again = driver.submit([toy.request("<BOS>", Basic(3), {})], whole=True)
        assert len([step async for step in again]) == 3
        again.close()
        waiting = driver.submit([toy.request("<BOS>", Basic(100), {})], whole=True)
        driver.close()
        with pytest.raises(CutawayError, match="closing"):
            async for _ in waiting:
                pass
        owner.close()

    asyncio.run(failing())


@pytest.mark.parametrize("begun", [False, True])
def test_what_comes_when_the_server_is_closing_is_told_so_and_does_not_wait(begun, toy: Model, monkeypatch):
    async def closing() -> None:
        owner, go = Owner(), threading.Event()
        step = Batch.step
        monkeypatch.setattr(Batch, "step", lambda batch: step(batch) and go.wait())
        if not begun:
            owner.soon(go.wait, lambda: None)
        driver = Driver(toy, owner, at_once=2, waiting=8)
        flow = driver.submit([toy.request("<BOS>", Basic(100), {}) for _ in range(3)], whole=True)
        while begun and not driver.batch.running:
            time.sleep(0.001)
        owner.close()
        go.set()
        owner._pool.shutdown(wait=True)
        assert all(ticket.done for ticket in flow.tickets)
        with pytest.raises(CutawayError, match="closing"):
            async for _ in flow:
                pass
        flow.close()
        late = Driver(toy, owner, at_once=2, waiting=8)
        for _ in range(2):
            with pytest.raises(CutawayError, match="closing"):
                late.submit([toy.request("<BOS>", Basic(3), {})], whole=True)
        assert late.idle and not late.batch.waiting

    asyncio.run(closing())


def test_a_pass_that_waits_when_the_server_closes_is_told_so():
    async def closing() -> None:
        owner, go = Owner(), threading.Event()
        first = asyncio.ensure_future(owner.run(go.wait))
        second = asyncio.ensure_future(owner.run(lambda: None))
        await asyncio.sleep(0)
        owner.close()
        go.set()
        assert await first
        for late in (second, owner.run(lambda: None)):
            with pytest.raises(CutawayError, match="closing"):
                await late

    asyncio.run(closing())


def test_a_loading_that_was_interrupted_is_begun_again():
    async def interrupted() -> str:
        models = Models()
        models.begin("toy").cancel()
        await asyncio.sleep(0)
        return (await models.get("toy")).spec.name

    assert asyncio.run(interrupted()) == "toy"


def test_responses_of_a_model_that_was_loaded_anew_end_with_the_server(toy: Model):
    async def closing() -> None:
        owner, go = Owner(), threading.Event()
        owner.soon(go.wait, lambda: None)
        programs = OpenAI(Models(), owner, "toy")
        flow = programs._driver("toy", toy).submit([toy.request("<BOS>", Basic(100), {})], whole=True)
        assert programs._driver("toy", cutaway.load("toy")).idle
        programs.close()
        owner.close()
        go.set()
        assert [ticket.done for ticket in flow.tickets] == [True]
        with pytest.raises(CutawayError, match="closing"):
            async for _ in flow:
                pass

    asyncio.run(closing())


def test_a_stream_that_fails_says_so_in_the_stream(monkeypatch):
    import openai

    step = Batch.step
    made: list[int] = []

    def failing(batch: Batch) -> bool:
        made.append(1)
        if len(made) == 3:
            for lane in list(batch._lanes):
                batch._fail(lane, CutawayError("The numbers ran out."))
            return True
        return step(batch)

    monkeypatch.setattr(Batch, "step", failing)
    with live() as port, client_of(port) as client:
        stream = iter(client.completions.create(stream=True, **LONG))
        with pytest.raises(openai.APIError, match=r"The numbers ran out\."):
            list(stream)
        made.clear()
        with pytest.raises(openai.InternalServerError, match=r"The numbers ran out\."):
            client.completions.create(**LONG)


def test_in_a_storm_no_answer_is_wrong_none_is_missing_and_memory_stays(clients):
    """A server in a process of its own, as it is started on the command line; ended by SIGTERM."""
    with clients.serving("--model", "toy", "--waiting", "8") as (process, port):
        asyncio.run(clients.storm(port, process.pid, 50, seed=1))
        found = asyncio.run(clients.storm(port, process.pid, 150))
    assert found.wrong == []
    assert sum(found.ended.values()) - found.ended["429"] == 150
    assert found.left_over == 0
    assert found.memory[-1] / found.memory[0] < 1.05
    assert process.returncode in (0, -15)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_where_no_further_step_can_be_asked_for_all_are_told_and_later_ones_are_served(nth, monkeypatch):
    toy, calls, soon = cutaway.load("toy"), [0], Owner.soon

    def failing(self, *given):
        calls[0] += 1
        if calls[0] == nth:
            raise MemoryError("no room")
        soon(self, *given)

    async def told(driver: Driver) -> list[int] | str:
        try:
            flow = driver.submit([toy.request("<BOS> dragon", Basic(4, seed=1))], whole=False)
        except MemoryError as error:
            return str(error)
        try:
            return [step.token async for _, step in flow]
        except MemoryError as error:
            return str(error)
        finally:
            flow.close()

    async def serve() -> None:
        owner = Owner()
        driver = Driver(toy, owner, 2, 8)
        alone = toy.generate("<BOS> dragon", 4, seed=1).tokens
        answers = await asyncio.wait_for(asyncio.gather(*(told(driver) for _ in range(4))), 60)
        assert "no room" in answers
        assert all(answer in (alone, "no room") for answer in answers)
        assert await asyncio.wait_for(told(driver), 60) == alone
        assert driver.idle
        owner.close()

    monkeypatch.setattr(Owner, "soon", failing)
    asyncio.run(serve())
