"""What an earlier call has read need not be read again, and how much of it there is can be seen."""

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from cached_models import DYNAMIC, ENGINES, LATENT, SPECS, WINDOWED, model_of, passes_of
from rich.console import Console

from cutaway import CutawayError, load
from cutaway.engines.layout import CHUNK
from cutaway.generate import Basic
from cutaway.spec.work import total_flops
from cutaway.trace.drawing.page import Page
from random_models import GPT2, LLAMA, CountingEngine, random_ids, random_model, with_attention

PROMPT = "<BOS> dragon drinks"


# Prefixes that were read already


@pytest.mark.parametrize("spec", [GPT2, LLAMA, WINDOWED, LATENT, DYNAMIC], ids=lambda spec: spec.name)
def test_a_cache_from_an_earlier_call_spares_the_prompt_that_it_holds(spec):
    model = random_model(spec, engine=CountingEngine())
    ids = random_ids(spec, 14).tolist()
    cache = passes_of(model).cache()
    first = model.generate(ids, 4, seed=1, cache=cache)
    assert cache.ids == [*ids, *first.tokens[:-1]]
    turn = [*ids, *first.tokens, 3, 4]
    model.engine.multiplied.clear()
    second = model.generate(turn, 4, seed=2, cache=cache)
    whole = model.generate(turn, 4, seed=2)
    assert second.tokens == whole.tokens
    np.testing.assert_allclose(second.logprobs, whole.logprobs, rtol=1e-9)
    rows = model.engine.rows_through(model.parameters.layers[0]["mlp.up"].weight)
    assert rows[0] == (20 if spec is DYNAMIC else 3)  # where angles hang on the length, nothing stays true


def test_what_differs_from_a_cache_is_cut_off_and_the_last_token_always_runs(toy):
    cache = passes_of(toy).cache()
    toy.generate([0, 5, 6, 3, 1], 3, seed=1, cache=cache)
    for prompt in ([0, 5, 6], [0, 5, 6, 4], [1], [0, 5, 6, 3, 1, 2, 2, 2]):
        again = toy.generate(prompt, 3, seed=1, cache=cache)
        assert again.tokens == toy.generate(prompt, 3, seed=1).tokens
        assert cache.ids == [*prompt, *again.tokens[:-1]]


def test_a_batch_keeps_caches_for_prompts_that_begin_alike():
    model = random_model(LLAMA, engine=CountingEngine())
    batch = model.batch(retained=2)
    long = random_ids(LLAMA, 40).tolist()
    for prompt, new in ((long, 40), ([*long, 1, 2], 3 - 1), ([7, *long], 41), ([*long, 1, 2, 5], 1)):
        model.engine.multiplied.clear()
        ticket = batch.submit(model.request(prompt, Basic(1, seed=0)))
        while batch.step():
            pass
        assert model.engine.rows_through(model.parameters.layers[0]["mlp.up"].weight)[0] == new
        assert ticket.reused == len(prompt) - new
        assert [step.token for step in ticket] == model.generate(prompt, 1, seed=0).tokens


def test_a_cache_that_a_caller_lent_is_given_to_nobody_else(toy):
    batch, cache, prompt = toy.batch(retained=1), passes_of(toy).cache(), [0, 5, 6, 3, 1] * 5
    batch.submit(toy.request(prompt, Basic(1, seed=0)), cache=cache)
    while batch.step():
        pass
    other = batch.submit(toy.request([*prompt, 2], Basic(4, seed=1)))
    batch.step()
    toy.generate(prompt, 2, seed=0, cache=cache)
    while batch.step():
        pass
    assert other.reused == 0
    assert [step.token for step in other] == toy.generate([*prompt, 2], 4, seed=1).tokens


def test_settings_that_no_traced_run_can_have_are_refused(toy):
    for setting in ({"guess": 4}, {"cache": passes_of(toy).cache()}):
        with pytest.raises(CutawayError, match="leave out guess and cache"):
            toy.generate(PROMPT, points=["logits"], **setting)
    with pytest.raises(CutawayError, match="There is no setting 'tempo'"):
        toy.generate(PROMPT, tempo=3)


# A cache that one can see


@pytest.mark.parametrize("spec", [GPT2, LLAMA, WINDOWED, LATENT], ids=lambda spec: spec.name)
def test_each_step_says_what_it_found_and_what_it_added_and_what_that_cost(spec):
    model = random_model(spec, engine=CountingEngine())
    ids = random_ids(spec, 9).tolist()
    model.engine.multiplied.clear()
    out = model.generate(ids, 5, seed=1)
    assert out.cache.reused == (0, 9, 10, 11, 12)
    assert list(out.cache.appended) == model.engine.rows_through(model.parameters.layers[0]["mlp.up"].weight)
    assert out.cache.flops == (total_flops(spec, 9, logits=1), *(total_flops(spec, 1, n, 1) for n in range(9, 13)))
    assert out.cache.flops_without == tuple(total_flops(spec, n, logits=1) for n in range(9, 14))
    assert (out.cache.rows, out.cache.room) == (13, 256)
    assert out.cache.nbytes == spec.count().kv_bytes(13, 8) == 13 * out.cache.row_bytes
    assert out.cache.reserved == spec.count().kv_bytes(256, 8)


def test_a_layer_says_of_what_kind_its_rows_are_and_which_of_them_the_next_token_sees():
    chunked = with_attention(LLAMA, chunk=8)
    for spec in (LLAMA, WINDOWED, LATENT, chunked):
        out = random_model(spec).generate(random_ids(spec, 18).tolist(), 3, seed=0)
        layer = out.cache.layers[1]
        seen = min(20, (spec.layers[1].attention.window or 99) - 1, 20 % (spec.layers[1].attention.chunk or 99))
        assert (layer.layer, layer.rows, layer.in_reach) == (1, 20, seen)
        assert layer.nbytes == 20 * layer.values * 8
    latent = random_model(LATENT).generate([1, 2], 1, seed=0).cache.layers[0]
    assert (latent.kind, latent.values) == ("latents and one shared key", 6 + 4)
    assert "window of 5" in random_model(WINDOWED).generate([1], 1, seed=0).cache.layers[0].kind


@pytest.mark.parametrize(("engine", "dtype"), ENGINES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_without_a_cache_every_step_runs_the_whole_text_and_says_the_same(spec, engine, dtype):
    model = model_of(spec, engine, dtype)
    ids = random_ids(spec, 70).tolist()
    naive, cached = model.generate(ids, 12, seed=3, cache=False), model.generate(ids, 12, seed=3)
    assert naive.tokens == cached.tokens
    if engine == "cpu":
        assert naive.logprobs == cached.logprobs  # bit for bit
    np.testing.assert_allclose(naive.logprobs, cached.logprobs, rtol=1e-9 if dtype == "float64" else 1e-4)
    assert naive.cache.appended == tuple(range(70, 82)) and set(naive.cache.reused) == {0}
    assert naive.cache.flops == naive.cache.flops_without == cached.cache.flops_without
    assert naive.cache.flops_with == cached.cache.flops
    assert (naive.cache.kept, naive.cache.rows, naive.cache.nbytes) == (False, 0, 0)
    assert cached.cache.kept


def test_without_a_cache_a_long_text_is_run_in_chunks_and_others_in_the_batch_keep_theirs():
    model = random_model(LLAMA, engine=CountingEngine())
    ids = random_ids(LLAMA, 3 * CHUNK).tolist()
    batch = model.batch()
    one = batch.submit(model.request(ids, Basic(3, seed=1), {"cache": False}))
    other = batch.submit(model.request(ids[:7], Basic(9, seed=2)))
    while batch.step():
        pass
    naive, kept = list(one), list(other)
    assert [step.token for step in naive] == model.generate(ids, 3, seed=1).tokens
    assert [step.cache.appended for step in naive] == [3 * CHUNK, 3 * CHUNK + 1, 3 * CHUNK + 2]
    assert [step.cache.appended for step in kept] == [7] + [1] * 8


def test_a_text_past_what_the_model_was_made_for_is_warned_of_once_with_and_without_a_cache():
    model = random_model(replace(LLAMA, context_length=10))
    for cache in (None, False):
        with pytest.warns(UserWarning) as warned:
            model.generate(random_ids(LLAMA, 7).tolist(), 8, seed=0, cache=cache)
        assert [str(one.message).split(" that ")[0] for one in warned] == ["11 tokens are more than the 10"]


def test_what_an_earlier_call_left_is_seen_to_be_reused():
    model = random_model(LLAMA)
    cache, ids = passes_of(model).cache(), random_ids(LLAMA, 14).tolist()
    first = model.generate(ids, 4, seed=1, cache=cache)
    second = model.generate([*ids, *first.tokens, 3, 4], 3, seed=2, cache=cache)
    assert second.cache.steps[0].reused == 17 and second.cache.appended == (3, 1, 1)
    assert cache.layers == second.cache.layers
    assert repr(cache) == f"<KVCache of small-llama: 22 tokens, {cache.nbytes:,} of {cache.reserved:,} bytes>"


def test_where_angles_hang_on_the_length_nothing_is_reused_past_it_and_the_cost_says_so():
    out = random_model(DYNAMIC).generate(random_ids(DYNAMIC, 14).tolist(), 5, seed=1)
    assert out.cache.reused == (0, 14, 15, 0, 0)
    assert out.cache.appended == (14, 1, 1, 17, 18)
    assert out.cache.flops[3:] == out.cache.flops_without[3:]


def test_guesses_that_did_not_come_true_were_run_too(monkeypatch):
    monkeypatch.setattr("cutaway.generate.speculation.Payoff.wanted", lambda self: True)
    model = random_model(LLAMA, engine=CountingEngine())
    model.engine.multiplied.clear()
    out = model.generate([1, 2, 3, 1, 2, 3, 1, 2], 12, seed=0, guess=3, force={1: 3, 2: 1, 3: 5, 4: 1, 5: 2, 6: 3})
    run = model.engine.rows_through(model.parameters.layers[0]["mlp.up"].weight)
    assert [rows for rows in out.cache.appended if rows] == run
    assert max(run[1:]) > 1
    assert out.cache.rows == 19
    assert out.cache.flops_without == model.generate([1] * 8, 12, seed=0).cache.flops_without


def test_watched_steps_tell_of_their_cache_too(toy):
    watched, plain = toy.generate(PROMPT, 4, 0, points=["logits"]), toy.generate(PROMPT, 4, 0)
    assert watched.cache.as_dict() == plain.cache.as_dict()


def test_the_cache_is_drawn_filling_beside_both_curves(toy, capsys):
    out = toy.generate(PROMPT, 40, 1.0, seed=0)
    out.cache.show()
    drawn = capsys.readouterr().out
    assert "layers 0" in drawn or "layer 0" in drawn
    steps = [line for line in drawn.splitlines() if "█" in line and "run" not in line]
    assert len(steps) == 16 and steps[0].split()[:3] == ["0", "0", "3"]
    ended = len(out.tokens) - 1
    assert steps[-1].split()[:3] == [str(ended), str(3 + ended - 1), "1"]
    filled = [line.count("░") + line.count("█") for line in steps]
    assert filled == sorted(filled) and filled[-1] == 40
    assert "×" in drawn and "●" in drawn
    assert f"With a cache {3 + ended} rows are run" in drawn
    assert f"Without, {sum(range(3, 4 + ended)):,}" in drawn
    assert str(out.cache) in drawn


@pytest.mark.parametrize("cache", [True, 3, "x", {}])
def test_what_is_no_cache_is_refused(toy, cache):
    with pytest.raises(CutawayError, match="it must be a KVCache that an earlier call left, or False"):
        toy.generate(PROMPT, cache=cache)


def test_a_guess_without_a_cache_is_refused(toy):
    with pytest.raises(CutawayError, match="needs a cache; leave out guess"):
        toy.generate(PROMPT, cache=False, guess=3)


# A cache in the wrong hands


def test_a_cache_of_another_model_is_refused_before_anything_runs(toy):
    other = random_model(LLAMA)
    with pytest.raises(CutawayError, match="The cache was made for small-llama, not for toy"):
        toy.stream(PROMPT, 3, cache=passes_of(other).cache())
    with pytest.raises(CutawayError, match="made on the cpu engine in float32, the model runs on the numpy engine"):
        toy.stream(PROMPT, 3, cache=passes_of(model_of_toy("cpu")).cache())
    same_shape = random_model(LLAMA, seed=1)
    cache = passes_of(other).cache()
    other.generate([1, 2, 3], 2, seed=0, cache=cache)
    with pytest.raises(CutawayError, match="of another small-llama, loaded by itself, whose weights may differ"):
        same_shape.stream([1, 2, 3, 4], 2, cache=cache)


def model_of_toy(engine: str):
    return load("toy", engine=engine)


def test_of_two_responses_that_take_one_cache_the_later_has_it(toy):
    cache = passes_of(toy).cache()
    first = toy.stream(PROMPT, 6, seed=1, cache=cache)
    begun = [next(first).token, next(first).token]
    second = toy.generate("<BOS> troll", 4, seed=2, cache=cache)
    assert second.tokens == toy.generate("<BOS> troll", 4, seed=2).tokens
    with pytest.raises(CutawayError, match="Another response took this cache over"):
        next(first)
    assert begun == toy.generate(PROMPT, 6, seed=1).tokens[:2]
    assert toy.generate(PROMPT, 4, seed=3, cache=cache).tokens == toy.generate(PROMPT, 4, seed=3).tokens


def test_many_responses_cannot_take_one_cache(toy):
    with pytest.raises(CutawayError, match="One cache cannot serve several responses"):
        toy.generate_many([PROMPT] * 2, 3, cache=passes_of(toy).cache())


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_on_a_terminal_of_any_width_no_line_of_the_drawing_is_cut(toy, columns):
    console = Console(width=columns, force_terminal=True, color_system=None, file=StringIO())
    toy.generate(PROMPT, 9, seed=1).cache.show(Page.on(console))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert sum("×" in line or "●" in line for line in lines) >= 5
    assert not any("…" in line for line in lines)
