"""The cpu engine's fused operations in company: several threads, forked children, small machines, and their memory."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from both_ways import ByStages, Poisoned, Side, assert_same_bits, showable
from cutaway.engines.cpu import threads
from cutaway.engines.cpu.engine import CpuEngine
from cutaway.engines.cpu.stack import MOST_PROGRAMS
from cutaway.engines.protocol import Scoring
from cutaway.forward.cache import KVCache
from cutaway.forward.parameters import Parameters
from cutaway.forward.transformer import transformer
from cutaway.spec import FeedForwardSpec, RotarySpec
from random_models import LLAMA, random_ids, random_model, random_weights, with_attention

WINDOWED = with_attention(LLAMA, window=9)


@pytest.mark.parametrize(("past", "rows", "window"), [(60, 1, 9), (60, 5, 9), (200, 1, 30), (33, 2, 17), (15, 1, 16)])
def test_keys_before_the_first_visible_sixteen_are_never_read(past: int, rows: int, window: int) -> None:
    """They may be anything at all, and change no bit; the first key that is seen changes some."""
    rng = np.random.default_rng(past)
    length = past + rows
    q = rng.normal(size=(4, rows, 24)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, length, 24)).astype(np.float32)
    last = np.arange(past + 1, length + 1)
    first = np.maximum(last - window, 0)
    engine, rule = CpuEngine(), Scoring(0.2, first, last)
    expected = engine.attend(q, k, v, rule)
    start = int(first[0]) // 16 * 16
    k[:, :start], v[:, :start] = np.nan, np.inf
    assert np.array_equal(engine.attend(q, k, v, rule), expected)
    v[:, first[0]] += 1
    assert not np.array_equal(engine.attend(q, k, v, rule), expected)


def test_a_fused_layer_never_reads_keys_that_its_window_has_left_behind() -> None:
    sides = [Side(Poisoned(), WINDOWED, random_weights(WINDOWED, 0, "float32"), 1) for _ in range(2)]
    for side in sides:
        side.run([random_ids(WINDOWED, 60)], (), [0])
    for layer in range(WINDOWED.n_layers):
        for kept in sides[1].caches[0].reserve(layer, 60):
            kept[:, :48] = np.nan  # token 60 sees tokens 52 to 60
    one, other = (side.run([random_ids(WINDOWED, 1)], showable(WINDOWED), [0])[0] for side in sides)
    assert_same_bits(*({key: value for key, value in seen.items() if key[0] not in ("keys", "values")}
                       for seen in (one, other)))  # fmt: skip


def loaded(engine: CpuEngine, seed: int = 0) -> Parameters:
    return Parameters(LLAMA, random_weights(LLAMA, seed, "float32"), engine)


def decoded(parameters: Parameters, engine: CpuEngine, prompt: np.ndarray, steps: int) -> np.ndarray:
    """The logits of greedy steps after a prompt, `[steps, V]`, with a cache of their own."""
    cache, pending, rows = KVCache(LLAMA, engine), prompt, []
    for _ in range(steps):
        ran = transformer(engine, LLAMA, parameters, [pending], caches=[cache])
        assert ran.fused == ({0, 1} if len(pending) <= 32 else set())
        rows.append(ran.logits[-1])
        pending = np.array([int(rows[-1].argmax())])
    return np.array(rows)


def test_threads_that_decode_at_once_each_get_what_they_get_alone() -> None:
    """Two clients of one model, prompts of unequal length, Python handing over as often as it can."""
    engine = CpuEngine()
    parameters = loaded(engine)
    prompts = [random_ids(LLAMA, length, length) for length in (3, 21)]
    alone = [decoded(parameters, engine, prompt, 60) for prompt in prompts]
    results: list[np.ndarray | None] = [None, None]
    interval = sys.getswitchinterval()

    def work(i: int) -> None:
        results[i] = decoded(parameters, engine, prompts[i], 60)

    sys.setswitchinterval(1e-5)
    try:
        workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    for found, expected in zip(results, alone, strict=True):
        assert found is not None and np.array_equal(found, expected)


def test_a_layer_large_enough_for_all_threads_has_the_same_bits_whoever_helps() -> None:
    """Again and again, so that helpers come and go; then by the calling thread alone, as on a busy machine."""
    attention = replace(LLAMA.layers[0].attention, n_heads=8, n_kv_heads=4, d_head=32, rotary=RotarySpec(10_000.0, 32))
    layer = replace(LLAMA.layers[0], attention=attention, feed_forward=FeedForwardSpec(700, "silu", gated=True))
    spec = replace(LLAMA, d_model=256, layers=(layer, layer))
    engine, side = CpuEngine(), Side(ByStages(), spec, random_weights(spec, 0, "float32"), 1)
    side.run([random_ids(spec, 250)], (), [0])
    parameters, cache = Parameters(spec, side.parameters.stored, engine), KVCache(spec, engine)
    transformer(engine, spec, parameters, [random_ids(spec, 250)], caches=[cache])
    pool = threads._the_pool()
    for length in (1, 4, 20):
        ids = random_ids(spec, length)
        expected = side.run([ids], (), [0])[0]["final"]
        for time in range(80):
            if time == 60:
                pool._alone_until = float("inf")
            ran = transformer(engine, spec, parameters, [ids], caches=[cache])
            assert ran.fused == {0, 1} and np.array_equal(ran.final, expected)
            cache.truncate(250)
        pool._alone_until = 0.0 if threads.thread_count() > 1 else float("inf")
        side.caches[0].truncate(250)


def test_two_clients_of_one_model_get_the_texts_that_they_get_alone() -> None:
    model = random_model(LLAMA, 0, CpuEngine(), dtype="float32")
    alone = [list(model.generate([i + 1, 2, 3], max_tokens=30, temperature=1.0, seed=i).tokens) for i in range(2)]
    texts: list[list[int]] = [[], []]

    def work(i: int) -> None:
        texts[i] = list(model.generate([i + 1, 2, 3], max_tokens=30, temperature=1.0, seed=i).tokens)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert texts == alone


def test_a_finished_text_leaves_no_cache_behind() -> None:
    engine = CpuEngine()
    parameters = loaded(engine)
    kept = []
    for count in (1, 2, 3):
        caches = [KVCache(LLAMA, engine) for _ in range(count)]
        transformer(engine, LLAMA, parameters, [random_ids(LLAMA, 2)] * count, caches=caches)
        kept += [weakref.ref(part) for cache in caches for layer in (0, 1) for part in cache.reserve(layer, 2)]
    del caches
    gc.collect()
    assert len(kept) == 24 and not any(part() is not None for part in kept)


def test_many_kinds_of_batches_leave_a_bounded_number_of_programs() -> None:
    engine = CpuEngine()
    parameters = loaded(engine)
    first = [random_ids(LLAMA, length) for length in (1, 2)]
    expected = transformer(engine, LLAMA, parameters, first).logits
    for one in range(1, 10):
        for other in range(1, 10):
            transformer(engine, LLAMA, parameters, [random_ids(LLAMA, length) for length in (one, other)])
    assert [len(layer.prepared) for layer in parameters.layers] == [MOST_PROGRAMS, 0]
    assert np.array_equal(transformer(engine, LLAMA, parameters, first).logits, expected)


def test_other_weights_in_the_place_of_a_layers_are_used_at_once() -> None:
    engine = CpuEngine()
    one, other = loaded(engine, 1), loaded(engine, 2)
    ids = [random_ids(LLAMA, 3)]
    before, wanted = (transformer(engine, LLAMA, parameters, ids).logits for parameters in (one, other))
    assert not np.array_equal(before, wanted)
    one.held, layers = other.held, one.layers
    for mine, theirs in zip(layers, other.layers, strict=True):
        mine.update(theirs)
    assert np.array_equal(transformer(engine, LLAMA, one, ids).logits, wanted)


def test_another_spec_of_the_same_weights_is_used_at_once() -> None:
    engine = CpuEngine()
    parameters, ids = loaded(engine), [random_ids(LLAMA, 3)]
    other = with_attention(LLAMA, scale=1.0)
    wanted = transformer(engine, other, loaded(engine), ids)
    assert wanted.fused == set(range(LLAMA.n_layers))
    before = transformer(engine, LLAMA, parameters, ids).logits
    assert not np.array_equal(before, wanted.logits)
    assert np.array_equal(transformer(engine, other, parameters, ids).logits, wanted.logits)
    assert np.array_equal(transformer(engine, LLAMA, parameters, ids).logits, before)


START = """
import os, signal, sys, threading
import numpy as np
import cutaway

model = cutaway.load("toy", engine="cpu")

def told():
    trace = model.trace([1, 2, 3], points=["*"])
    assert trace.fused_layers == set(range(model.spec.n_layers))
    return trace.logits.tobytes().hex() + str(model.generate([1, 2], max_tokens=5, temperature=0.0).tokens)
"""


def run(script: str, **variables: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + script],
        capture_output=True, text=True, timeout=300, env={**os.environ, **variables}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_children_forked_while_another_thread_computes_get_the_same() -> None:
    script = """
expected, done = told(), threading.Event()

def work():
    while not done.is_set():
        told()

worker = threading.Thread(target=work)
worker.start()
codes = []
for _ in range(15):
    child = os.fork()
    if child == 0:
        signal.alarm(250)  # one that waits for a lock would wait for ever
        os._exit(0 if told() == expected else 9)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done.set()
worker.join()
assert told() == expected
print(codes)
"""
    assert run(script, CUTAWAY_THREADS="2") == f"{[0] * 15}\n"


SMALL_MACHINE = """
class NoThreadingLayer:
    def find_spec(self, name, path=None, target=None):
        if name.rpartition(".")[2] in ("omppool", "tbbpool", "workqueue") or name == "tbb":
            raise ImportError(f"there is no {name} here")

sys.meta_path.insert(0, NoThreadingLayer())
print(told())
assert not getattr(sys.modules.get("numba.np.ufunc.parallel"), "_is_initialized", False)
maps = "/proc/self/maps"
assert not os.path.exists(maps) or not any(name in open(maps).read() for name in ("libgomp", "omppool", "libtbb"))
assert threading.active_count() == int(os.environ["CUTAWAY_THREADS"])
"""


def test_without_libgomp_or_any_layer_of_numba_the_bits_are_the_same(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As in containers: one with two processors, and one with a single one and a home that cannot be written."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")  # so that no folder can be made in it, not even by root
    temporary = tmp_path_factory.getbasetemp().parent  # kept from run to run, so that kernels compile there once
    plain = run("print(told())")
    assert run(SMALL_MACHINE, CUTAWAY_THREADS="2") == plain
    assert run(SMALL_MACHINE, CUTAWAY_THREADS="1", CUTAWAY_CACHE=str(blocked / "kept"), TMPDIR=str(temporary)) == plain
    assert blocked.read_text() == "not a folder"


def test_one_thread_and_two_give_the_real_model_the_same_bits() -> None:
    script = """
model = cutaway.load("smollm2-135m", engine="cpu")
print([model.trace(list(range(length))).logits.tobytes().hex()[:4000] for length in (1, 7)])
"""
    one, two = (run(script, CUTAWAY_THREADS=count) for count in ("1", "2"))
    assert one == two != ""
