"""The one object that people hold: what it promises whatever it is asked to do, and by how many at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import cutaway
from cutaway.engines import make_engine
from cutaway.model import Model
from random_models import LLAMA, random_ids, random_model

THREADS, TURNS = 4, 3


def toy_model() -> Model:
    return cutaway.load("toy", engine="numpy", dtype="float64")


def llama_model() -> Model:
    return random_model(LLAMA, engine=make_engine("cpu"), dtype="float32")


def traced(model: Model, seed: int) -> list:
    """Every value of a pass: some stored, some worked out when they are read."""
    trace = model.trace(random_ids(model.spec, 5 if model.spec.name == "toy" else 70 + seed, seed), points=["*"])
    return [trace[point].tobytes() for point in trace.points]


def generated(model: Model, seed: int) -> list:
    out = model.generate(random_ids(model.spec, 3, seed), max_tokens=6, seed=seed, points=["layers.*.attn.pattern"])
    patterns = [step.trace["layers.1.attn.pattern"].tobytes() for step in out.steps if step.trace is not None]
    return [out.tokens, out.logprobs, out.text, patterns]


def verified(model: Model, seed: int) -> list:
    ids = random_ids(model.spec, 6, seed)
    return [(check.name, check.deviation, check.where, check.holds) for check in model.verify(ids)]


WORK = (traced, generated, verified)


@pytest.mark.parametrize("make", [toy_model, llama_model], ids=["toy on numpy", "llama on cpu"])
def test_threads_that_trace_generate_and_verify_at_once_get_bit_for_bit_what_each_gets_alone(make):
    """The threads begin together on a model that nobody has used, so that they also meet at whatever is made once."""
    jobs = [[(WORK[(thread + turn) % 3], 10 * thread + turn) for turn in range(TURNS)] for thread in range(THREADS)]
    lone = make()
    alone = [[work(lone, seed) for work, seed in mine] for mine in jobs]
    shared, gate = make(), threading.Barrier(THREADS)

    def run(mine: list) -> list:
        gate.wait()
        return [work(shared, seed) for work, seed in mine]

    with ThreadPoolExecutor(THREADS) as threads:
        together = list(threads.map(run, jobs))
    assert together == alone
    checks = [check for mine in together for found in mine for check in found if isinstance(check, tuple)]
    assert checks and all(holds for *_, holds in checks)
