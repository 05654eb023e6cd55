"""The one object that people hold: what it promises whatever it is asked to do, and by how many at once."""

import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import cutaway
from cutaway.engines import make_engine
from cutaway.forward import layers_shown
from cutaway.forward.cache import KVCache
from cutaway.forward.transformer import transformer
from cutaway.model import Model
from cutaway.points import Unwatched
from random_models import LLAMA, random_ids, random_model

THREADS, TURNS = 4, 3
SHORT = replace(LLAMA, context_length=8)


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


def test_what_the_package_offers_is_listed_before_anything_of_it_is_used():
    code = "import cutaway, sys; print(*dir(cutaway)); print('numpy' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["CutawayError Model Trace __version__ count edits load open_sweep open_trace", "False"]


def test_a_model_and_a_response_say_in_one_line_what_they_are():
    model = toy_model()
    assert repr(model) == "<Model toy: 2,286 parameters in 3 layers, numpy engine, float64>"
    response = model.generate("<BOS> dragon drinks", max_tokens=2, temperature=0)
    assert repr(response) == f"<Generation of 2 tokens, finish 'length': {response.text!r}>"


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.trace(None),
        lambda model: model.trace(b"<BOS>"),
        lambda model: model.trace(7),
        lambda model: model.trace("<BOS>", positions="ab"),
        lambda model: model.trace("<BOS>", positions=0),
        lambda model: model.trace("<BOS>", points=3),
        lambda model: model.trace("<BOS>", points=[3]),
        lambda model: model.trace("<BOS>").next_tokens("a"),
        lambda model: model.trace("<BOS>").show(layer="a"),
        lambda model: model.trace("<BOS>").save(3),
        lambda model: model.generate("<BOS>", stop=3),
        lambda model: model.generate("<BOS>", points=3),
        lambda model: model.embed(None),
        lambda model: model.embed([None]),
        lambda model: cutaway.count(None),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused_with_a_sentence(ask):
    with pytest.raises(cutaway.CutawayError) as caught:
        ask(toy_model())
    assert str(caught.value).endswith(".")


def test_a_text_longer_than_a_rotary_model_was_made_for_runs_and_that_is_said():
    model = random_model(SHORT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.trace(random_ids(SHORT, 8))
        model.generate(random_ids(SHORT, 4), max_tokens=4, seed=0)
    said = "9 tokens are more than the 8 that small-llama was made for"
    with pytest.warns(UserWarning, match=said) as told:
        trace = model.trace(random_ids(SHORT, 9))
    assert told[0].filename == __file__
    assert np.isfinite(trace.last_logits).all()
    with pytest.warns(UserWarning, match=said):
        model.embed([random_ids(SHORT, 3), random_ids(SHORT, 9)])


def test_checks_of_a_model_with_a_short_context_are_no_use_of_it_and_warn_of_nothing(monkeypatch):
    monkeypatch.setattr("cutaway.model.against_transformers", lambda trace, path: iter([len(trace.prompt.ids)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(random_model(SHORT).compare()) == [90]
        assert all(check.holds for check in random_model(SHORT).verify())


def test_a_response_that_grows_past_what_the_model_was_made_for_says_so_once():
    with pytest.warns(UserWarning, match="9 tokens are more than the 8 that small-llama was made for") as told:
        response = random_model(SHORT).generate(random_ids(SHORT, 4), max_tokens=8, seed=0)
    assert len(told) == 1
    assert len(response.tokens) == 8


def test_a_bar_over_the_layers_touches_no_bit(monkeypatch):
    """As on a terminal where every pass takes over a second; only the pass over a prompt has a bar."""
    model, ids = random_model(LLAMA), random_ids(LLAMA, 70)
    plain, said = model.trace(ids, points=["*"]), model.generate(ids, max_tokens=3, seed=1)
    moves: list[int] = []

    @contextmanager
    def progress(label, total, unit, *, after):
        assert (label, total, unit) == ("Running small-llama", LLAMA.n_layers, "layers")
        yield moves.append

    monkeypatch.setattr(layers_shown, "progress", progress)
    watched, heard = model.trace(ids, points=["*"]), model.generate(ids, max_tokens=3, seed=1)
    assert moves == [1] * (LLAMA.n_layers - 1) * 2
    assert all(watched[point].tobytes() == plain[point].tobytes() for point in plain)
    assert (heard.tokens, heard.logprobs) == (said.tokens, said.logprobs)


def test_the_bar_moves_as_layers_are_done():
    """Not before: whoever waits for a long pass sees where it is."""
    model, seen = random_model(LLAMA), []

    class Noting(Unwatched):
        def __init__(self, layer=None):
            self._layer = layer

        def __call__(self, name, value):
            if name == "resid_pre":
                seen.append(f"layer {self._layer}")
            return value

        def at(self, layer):
            return Noting(layer)

    with layers_shown.layers_shown(model.spec, Noting()) as tap:
        tap._advance = lambda count: seen.append(f"{count} done")
        transformer(model.engine, model.spec, model.parameters, [np.array(random_ids(LLAMA, 70))], tap=tap)
    expected = ["layer 0"]
    for layer in range(1, LLAMA.n_layers):
        expected += ["1 done", f"layer {layer}"]
    assert seen == expected


def test_on_the_cpu_engine_decoding_is_the_whole_pass_bit_for_bit():
    model = llama_model()
    engine, spec, parameters = model.engine, model.spec, model.parameters
    ids = np.array(random_ids(spec, 90, 1))
    whole = transformer(engine, spec, parameters, [ids], rows=range(90)).logits
    cache = KVCache(spec, engine)
    pieces = [ids[:20], ids[20:55], *(ids[t : t + 1] for t in range(55, 90))]
    ends = np.cumsum([len(piece) for piece in pieces]) - 1
    for end, piece in zip(ends, pieces, strict=True):
        step = transformer(engine, spec, parameters, [piece], caches=[cache]).logits
        assert np.array_equal(step[-1], whole[end])
