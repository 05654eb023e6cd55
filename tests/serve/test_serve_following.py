"""A text that shares its beginning with the former one is computed from there on, and no bit of it is another."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from following import cpu_model, differing, every_spec, overviews, run
from hypothesis import given, settings
from hypothesis import strategies as st

from cutaway.engines.cpu.engine import CpuEngine
from cutaway.engines.numpy import NumpyEngine
from cutaway.points import Point, points_of
from cutaway.serve import passes
from cutaway.serve.joined import MOST_PARTS
from cutaway.serve.look import Look
from cutaway.serve.routes import Page
from cutaway.serve.runs import Runs
from random_models import LLAMA, POST, random_ids, random_model, specs


@every_spec
def test_a_text_that_grows_branches_and_shrinks_keeps_every_bit(spec):
    ids = random_ids(spec, 60).tolist()
    texts = [ids[:37], ids[:38], ids[:39], [*ids[:20], 1, 2, 3], [*ids[:20], 1], ids[:50], ids[:50], ids[40:]]
    for patched in (False, True):
        with overviews() if patched else pytest.MonkeyPatch.context():
            former = None
            for text in texts:
                former = run(cpu_model(spec) if former is None else former.model, text, former)
                assert differing(former, text) == []
                assert former.captured == ("overview" if patched else "all")


@given(
    spec=specs(causal=True),
    seed=st.integers(0, 9),
    ways=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 35)), min_size=2, max_size=4),
    short=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_any_model_does_on_both_engines(spec, seed, ways, short):
    for engine in (CpuEngine(), NumpyEngine("float64")):
        model = random_model(spec, seed, engine, dtype="float32")
        former, text = None, random_ids(spec, 20, seed).tolist()
        for kept, more in ways:
            text = [*text[:kept], *random_ids(spec, more, seed + more).tolist()]
            with pytest.MonkeyPatch.context() if short else overviews():
                former = run(model, text, former)
                assert differing(former, text) == []


def test_the_numpy_engine_goes_on_where_a_chunk_of_rows_ends(rows):
    model = random_model(LLAMA)
    ids = random_ids(LLAMA, 300).tolist()
    first = run(model, ids[:290])
    second = run(model, ids, first)
    assert rows.seen == [290, 300 - 256]
    assert differing(second, ids) == []
    rows.seen.clear()
    run(model, ids[:200], second)  # no chunk ends before it does: everything is run
    assert rows.seen == [200]


def test_a_step_computes_one_row(rows):
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 100).tolist()
    former = run(model, ids[:50])
    for end in range(51, 100):
        former = run(model, ids[:end], former)
    assert rows.seen == [50, *[1] * 49]
    assert former.text is not None and len(former.text.parts) <= MOST_PARTS
    assert differing(former, ids[:99]) == []


def test_a_long_text_that_grows_keeps_the_layer_that_is_looked_at(rows):
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 50).tolist()
    with overviews():
        former = run(model, ids[:40])
        points = former.layer_points(1)
        assert former.missing(points)
        former.look(points)
        for end in (41, 42):
            former = run(model, ids[:end], former)
            assert former.missing(points) == []
            assert differing(former, ids[:end]) == []


def test_a_letter_typed_in_the_middle_leaves_the_rows_before_it(rows):
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 60).tolist()
    first = run(model, ids)
    changed = [*ids[:45], (ids[45] + 1) % LLAMA.vocab_size, *ids[46:]]
    run(model, changed, first)
    assert rows.seen == [60, 15]


def test_the_former_run_can_still_be_read_after_others_went_on_from_it():
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 40).tolist()
    first = run(model, ids[:30])
    second = run(model, ids[:33], first)
    third = run(model, [*ids[:10], 1, 1, 1], second)
    for one, text in ((first, ids[:30]), (second, ids[:33]), (third, [*ids[:10], 1, 1, 1])):
        assert differing(one, text) == []
        last = model.trace(text).last_logits
        assert (one.trace.last_logits == last).all()


def test_two_pages_do_not_touch_each_other(rows):
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 40).tolist()
    mine, other = run(model, ids[:30]), run(model, ids[:30])
    assert mine.strand is not other.strand and rows.seen == [30, 30]
    run(model, [*ids[:5], *((token + 1) % LLAMA.vocab_size for token in ids[5:8])], other)
    assert differing(run(model, ids[:31], mine), ids[:31]) == []
    assert rows.seen[:4] == [30, 30, 3, 1]


def test_another_model_or_a_model_without_a_cache_runs_the_whole_text(rows):
    ids = random_ids(LLAMA, 30).tolist()
    former = run(cpu_model(LLAMA), ids)
    assert differing(run(cpu_model(LLAMA, 1), ids, former), ids) == []
    encoder = random_model(POST)
    both = random_ids(POST, 12).tolist()
    read = run(encoder, both)
    assert differing(run(encoder, both[:11], read), both[:11]) == []


def test_a_short_text_after_a_long_one_is_kept_in_full():
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 40).tolist()
    with overviews():
        former = run(model, ids)
    short = run(model, ids[:20], former)
    assert short.captured == "all" and short.missing(points_of(LLAMA)) == []
    assert differing(short, ids[:20]) == []


def test_what_a_request_asked_for_stays_whatever_others_ask_for_meanwhile():
    spec = replace(LLAMA, layers=LLAMA.layers * 3)
    model, ids = cpu_model(spec), random_ids(spec, 40).tolist()
    with overviews():
        one = run(model, ids)
    points = [Point("mlp.act", layer) for layer in range(spec.n_layers)]
    first, every = one.look(points[:1]), one.look(points)
    assert len(one.missing(points)) == spec.n_layers - 2  # no more are held on to
    whole = model.trace(ids, points=["layers.*.mlp.act"])
    assert (first.value(points[0]) == whole[points[0]]).all()
    assert all((every.value(point) == whole[point]).all() for point in points)


def test_a_layer_that_goes_while_a_request_looks_for_it_is_still_told(monkeypatch):
    spec = replace(LLAMA, layers=LLAMA.layers * 3)
    model, ids, wanted = cpu_model(spec), random_ids(spec, 40).tolist(), Point("mlp.act", 0)
    with overviews():
        one = run(model, ids)
    one.look([wanted])
    seen = Look.missing

    def others_come(look: Look, points: Sequence[Point]) -> list[Point]:
        found = seen(look, points)
        monkeypatch.undo()
        one.look([Point("mlp.act", layer) for layer in (1, 2, 3)])  # as the owner thread may at any moment
        return found

    monkeypatch.setattr(Look, "missing", others_come)
    page = Page(Any, Any, Any, 100, "a model")  # nobody of the server is asked
    found = asyncio.run(page._look(Any, one, [wanted]))
    assert one.missing([wanted]) == [wanted]
    assert (found.value(wanted) == model.trace(ids, points=[wanted])[wanted]).all()


def test_lengths_of_rows_are_those_of_the_whole():
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 40).tolist()
    grown = run(model, ids, run(model, ids[:35]))
    np.testing.assert_allclose(grown.norms(), run(model, ids).norms(), rtol=1e-6)
    assert grown.norms().shape == (4 * LLAMA.n_layers + 1, 40)


def test_what_runs_share_is_counted_once_and_let_go_with_the_last():
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 80).tolist()
    runs, former = Runs(), None
    for end in range(40, 80):
        former = run(model, ids[:end], former)
        runs.add(former)
    alone = Runs()
    alone.add(run(model, ids[:79]))
    assert alone.nbytes < runs.nbytes < 2 * alone.nbytes + 40 * alone.nbytes // 40
    assert former is not None
    runs.leave(former.id)
    assert (len(runs), runs.nbytes) == (0, 0)


def test_runs_past_the_limits_go_and_the_latest_stays():
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 80).tolist()
    few, light = Runs(most=3), Runs(most_bytes=1)
    for _ in range(5):
        one = run(model, ids)
        few.add(one)
        light.add(one)
    assert (len(few), len(light)) == (3, 1) and few.find(one.id) is one and light.find(one.id) is one


def test_rows_that_nobody_reads_any_more_are_not_held():
    """A text that shares one token with a long one does not keep the long one's rows."""
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 80).tolist()
    former = run(model, ids)
    other = run(model, [ids[0], *ids[40:42]], former)
    assert other.text is not None
    assert sum(part.rows for part, _ in other.text.parts) == 3


def test_a_stream_of_one_layer_gives_what_the_pass_gave():
    spec = replace(LLAMA, layers=LLAMA.layers * 2)
    model, ids = cpu_model(spec), random_ids(spec, 70).tolist()
    trace = model.trace(ids, points=["*"])
    for layer in range(spec.n_layers):
        rows = passes.layer_rows(model, trace, layer)
        again = passes.layer_trace(model, model.prompt(ids), rows)
        for point in (Point("resid_post", layer), Point("attn.pattern", layer), Point("attn.head_out", layer)):
            assert np.array_equal(again[point], trace[point])
