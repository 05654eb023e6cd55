"""What a trace keeps, what it hands out, and that watching a pass does nothing to it."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.engines.cpu.engine import CpuEngine
from cutaway.engines.numpy import NumpyEngine
from cutaway.points import ROW_BLOCKS, Point, points_of
from random_models import (
    GPT2,
    LIKE,
    LLAMA,
    everything,
    random_ids,
    random_model,
    random_parameters,
    specs,
)

# Looking


@given(specs(), st.integers(1, 30))
def test_looking_at_everything_changes_no_bit_of_the_logits(spec, length):
    model, ids = random_model(spec), random_ids(spec, length)
    plain = model.trace(ids, points=[])
    watched = model.trace(ids, points=["*"])
    _ = [watched[point] for point in watched.points]
    assert np.array_equal(plain.last_logits, watched.last_logits)
    assert np.array_equal(model.trace(ids).last_logits, plain.last_logits)


@pytest.mark.parametrize("engine", [NumpyEngine("float32"), CpuEngine()], ids=["numpy", "cpu"])
@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("length", [1, 40, 64, 100])
def test_t_by_t_points_worked_out_on_access_are_those_of_the_pass_bit_for_bit(engine, like, length):
    """In whatever order they are read: one may be worked out from another that was read before."""
    spec = LIKE[like]
    ids = random_ids(spec, length)
    made = everything(engine, spec, random_parameters(spec, engine), ids)
    for order in (ROW_BLOCKS, ROW_BLOCKS[::-1], ROW_BLOCKS[::2]):
        trace = random_model(spec, engine=engine, dtype="float32").trace(ids, points=["*"])
        for point in [Point(name, layer) for layer in range(spec.n_layers) for name in order]:
            known = ~np.isnan(made[point])  # dots past what a block may see are not computed in a pass
            assert np.array_equal(trace[point][known], made[point][known]), str(point)
            assert not np.isnan(trace[point]).any()


@pytest.mark.parametrize("like", LIKE)
def test_every_other_point_is_the_very_number_that_the_pass_used(like):
    spec, engine = LIKE[like], NumpyEngine("float64")
    ids = random_ids(spec, 20)
    made = everything(engine, spec, random_parameters(spec, engine), ids)
    trace = random_model(spec).trace(ids, points=["*"])
    for point, value in made.items():
        if point.name not in ROW_BLOCKS:
            assert np.array_equal(trace[point], value), str(point)


def test_a_trace_hands_out_what_nobody_can_write_into():
    trace = random_model(LLAMA).trace(random_ids(LLAMA, 5), points=["*"])
    for point in trace.points:
        with pytest.raises(ValueError, match="read-only"):
            trace[point][...] = 0


def test_one_trace_is_not_changed_by_the_next():
    model = random_model(LLAMA)
    first = model.trace(random_ids(LLAMA, 6), points=["*"])
    before = {point: first[point].copy() for point in first.points}
    fresh = model.trace(random_ids(LLAMA, 6), points=["*"])  # not yet looked at when another pass runs
    model.trace(random_ids(LLAMA, 6, seed=1), points=["*"])
    for point in first.points:
        assert np.array_equal(first[point], before[point]), point
        assert np.array_equal(fresh[point], before[point]), point


def test_without_a_choice_a_trace_has_streams_what_is_added_and_all_attention():
    trace = random_model(LLAMA).trace(random_ids(LLAMA, 4))
    for name in ("tokens", "embed.out", "layers.1.resid_post", "layers.0.attn.out", "layers.1.mlp.out", "logits"):
        assert name in trace
    for name in ("dots", "scores", "masked", "pattern", "head_out"):
        assert f"layers.1.attn.{name}" in trace
    assert "layers.0.mlp.act" not in trace


def test_a_point_that_was_not_captured_is_refused_with_what_to_ask_for():
    trace = random_model(LLAMA).trace(random_ids(LLAMA, 4), points=["logits"])
    with pytest.raises(
        CutawayError, match=r"layers\.1\.mlp\.act was not captured .* points=\[…, 'layers\.1\.mlp\.act'\]"
    ):
        trace["layers.1.mlp.act"]
    with pytest.raises(CutawayError, match=r"layers\.1\.mlp\.act was not captured"):
        trace["layers.-1.mlp.act"]
    assert "layers.1.mlp.act" not in trace
    assert "logits" in trace


def test_a_point_that_does_not_exist_is_refused_when_it_is_asked_for_not_kept_silently():
    model = random_model(GPT2)
    with pytest.raises(CutawayError, match="nothing turns its queries"):
        model.trace([1, 2], points=["logits", "layers.0.attn.q_rot"])
    with pytest.raises(CutawayError, match="the closest are"):
        model.trace([1, 2])["layers.0.attn.patern"]


def test_points_are_listed_in_the_order_of_the_pass():
    asked = ["logits", "layers.*.attn.pattern", "tokens"]
    trace = random_model(LLAMA).trace([3, 1, 4], points=asked)
    assert trace.points == ["tokens", "layers.0.attn.pattern", "layers.1.attn.pattern", "logits"]


def test_a_trace_reads_like_a_dict_from_addresses_to_arrays():
    trace = random_model(LLAMA).trace([3, 1, 4], points=["layers.*.attn.out", "logits"])
    assert list(trace) == trace.keys() == trace.points
    assert len(trace) == 3
    whole = dict(trace)
    assert list(whole) == trace.points
    assert all(np.array_equal(whole[point], trace[point]) for point in trace)
    assert bool(random_model(LLAMA).trace([3, 1, 4], points=[]))


@pytest.mark.parametrize("point", ["layers.0.attn.patern", "layers.0.mlp.act", "layers.*.attn.q", 3, None])
def test_an_address_at_which_nothing_can_be_read_is_a_key_error_that_says_a_sentence(point):
    trace = random_model(LLAMA).trace([3, 1, 4], points=["logits"])
    with pytest.raises(KeyError) as caught:
        trace[point]
    assert isinstance(caught.value, CutawayError)
    assert str(caught.value).endswith(".") and not str(caught.value).startswith(('"', "'No"))


def test_a_trace_says_in_one_line_what_it_is(toy):
    assert repr(toy.trace("<BOS> dragon drinks", points=["logits"])) == (
        "<Trace of toy: 3 tokens '<BOS> dragon drinks', 1 point, float64>"
    )
    assert repr(toy.trace("<BOS>" + " dragon" * 9, points=["tokens", "logits"])) == (
        "<Trace of toy: 10 tokens '<BOS> dragon dragon dragon dragon drago…', 2 points, float64>"
    )
    assert repr(random_model(LLAMA).trace([3], points=[])) == "<Trace of small-llama: 1 token, 0 points, float64>"


# Choosing positions


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("positions", [[0], [2, 5], [-1], [5, 0, -2], [3, 3], [5, 4, 3, 2, 1, 0], list(range(6))])
def test_positions_choose_rows_of_every_point_in_the_order_asked(like, positions):
    spec = LIKE[like]
    model, ids = random_model(spec), random_ids(spec, 6)
    whole, part = model.trace(ids, points=["*"]), model.trace(ids, points=["*"], positions=positions)
    for point in points_of(spec):
        axis = point.info.shape.index("T")
        assert np.array_equal(part[point], np.take(whole[point], positions, axis=axis)), str(point)
    assert np.array_equal(part.last_logits, whole.last_logits)


@pytest.mark.parametrize("position", [6, -7, 100, 1.5, True, "last"])
def test_a_position_that_is_not_there_is_refused(position):
    with pytest.raises(CutawayError, match=f"Position {position!r} was asked for; the prompt has positions 0 to 5"):
        random_model(LLAMA).trace(random_ids(LLAMA, 6), positions=[0, position])


def test_no_position_at_all_is_refused():
    with pytest.raises(CutawayError, match="No position was asked for; name at least one"):
        random_model(LLAMA).trace(random_ids(LLAMA, 6), positions=[])


def test_rows_that_were_not_asked_for_are_let_go():
    model, ids = random_model(LLAMA), random_ids(LLAMA, 200)
    trace = model.trace(ids, points=["layers.*.resid_post", "layers.*.mlp.act"], positions=[-1])
    assert held_bytes(trace) < 8 * 200 * LLAMA.d_model


def test_a_trace_may_be_read_from_several_threads_at_once():
    trace = random_model(LLAMA).trace(random_ids(LLAMA, 30), points=["*"])
    expected = {point: trace[point].copy() for point in trace.points}

    def read(seed: int) -> bool:
        order = np.random.default_rng(seed).permutation(trace.points * 5)
        return all(np.array_equal(trace[str(point)], expected[point], equal_nan=True) for point in order)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(4)))


# Memory


def held_bytes(trace) -> int:
    """Bytes of the arrays that a trace keeps alive, views counted by what they are views of."""
    buffers = {}
    for value in trace._stored.kept.values():
        for array in value.values() if isinstance(value, dict) else [value]:
            while array.base is not None and isinstance(array.base, np.ndarray):
                array = array.base
            buffers[id(array)] = array.nbytes
    return sum(buffers.values())


@pytest.mark.parametrize(
    ("points", "rows"),
    [
        (["logits"], 1),
        (["layers.0.attn.out"], 1),
        (["layers.*.attn.pattern"], 8),
        (["layers.*.attn.head_out"], 4),
        ([], 0),
    ],
)
def test_a_trace_keeps_no_t_by_t_array_and_no_more_than_was_asked_for(points, rows):
    length = 300
    trace = random_model(LLAMA).trace(random_ids(LLAMA, length), points=points)
    widest = max(LLAMA.d_model, LLAMA.layers[0].attention.n_heads * LLAMA.layers[0].attention.d_head)
    assert held_bytes(trace) <= rows * length * widest * 8
    assert held_bytes(trace) < length * length * 8


def test_a_pass_that_nobody_watches_makes_no_t_by_t_array():
    """The largest array of scores is a block of query rows, whatever the length."""

    class Measuring(NumpyEngine):
        most = 0

        def dots(self, q, k):
            made = super().dots(q, k)
            self.most = max(self.most, made.size)
            return made

    engine, length = Measuring("float32"), 600
    random_model(LLAMA, engine=engine).trace(random_ids(LLAMA, length), points=["logits"])
    heads = LLAMA.layers[0].attention.n_heads
    assert engine.most <= heads * 64 * length < heads * length * length


# During generation


@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=lambda spec: spec.name)
def test_a_steps_trace_holds_the_rows_of_its_pass_and_sees_all_earlier_keys(spec):
    model, prompt = random_model(spec), random_ids(spec, 5).tolist()
    points = ["layers.*.attn.pattern", "layers.*.resid_post", "layers.*.attn.head_out", "tokens", "logits"]
    out = model.generate(prompt, max_tokens=4, temperature=0, points=points)
    whole = model.trace(prompt + out.tokens[:-1], points=points)
    assert [step.trace.past for step in out.steps] == [0, 5, 6, 7]
    assert [step.trace["tokens"].tolist() for step in out.steps] == [prompt, *([token] for token in out.tokens[:-1])]
    for step in out.steps:
        here = slice(step.trace.past, step.trace.past + len(step.trace["tokens"]))
        for layer in range(spec.n_layers):
            pattern = step.trace[f"layers.{layer}.attn.pattern"]
            assert pattern.shape[1:] == (here.stop - here.start, here.stop)
            np.testing.assert_allclose(pattern, whole[f"layers.{layer}.attn.pattern"][:, here, : here.stop], atol=1e-12)
            for name in ("resid_post", "attn.head_out"):
                found, expected = step.trace[f"layers.{layer}.{name}"], whole[f"layers.{layer}.{name}"][..., here, :]
                np.testing.assert_allclose(found, expected, atol=1e-11)
        np.testing.assert_allclose(step.trace.logits, whole.logits[here], atol=1e-10)
        np.testing.assert_allclose(step.trace.last_logits, step.trace.logits[-1], atol=1e-12)


@pytest.mark.parametrize("spec", [GPT2, LLAMA], ids=lambda spec: spec.name)
def test_the_first_steps_trace_is_the_trace_of_the_prompt_bit_for_bit(spec):
    model, prompt = random_model(spec), random_ids(spec, 70).tolist()
    first = model.generate(prompt, max_tokens=1, seed=0, points=["*"]).steps[0].trace
    alone = model.trace(prompt, points=["*"])
    for point in alone.points:
        assert np.array_equal(first[point], alone[point]), point
    assert held_bytes(first) == held_bytes(alone)


def test_no_step_of_a_generation_shows_a_number_that_was_not_computed():
    for step in random_model(LLAMA).generate([1, 2, 3, 4], max_tokens=3, seed=0, points=["*"]).steps:
        assert not any(np.isnan(step.trace[point]).any() for point in step.trace.points)


def test_watching_a_generation_changes_nothing_in_it():
    model = random_model(LLAMA)
    plain = model.generate([1, 2, 3], max_tokens=20, seed=4)
    watched = model.generate([1, 2, 3], max_tokens=20, seed=4, points=["*"])
    assert plain.tokens == watched.tokens
    assert plain.logprobs == watched.logprobs
    assert [step.trace for step in plain.steps] == []


# What comes next


def test_next_tokens_are_the_likeliest_first_with_their_logits_and_probabilities(toy):
    trace = toy.trace("<BOS> dragon drinks")
    tokens = trace.next_tokens(10)
    assert [token.text for token in tokens[:3]] == ["potion", "fire", "glowing"]
    assert [token.probability for token in tokens] == sorted((t.probability for t in tokens), reverse=True)
    assert sum(token.probability for token in tokens) == pytest.approx(1)
    for token in tokens:
        assert token.logit == trace.last_logits[token.id] == trace.logits[-1, token.id]
    assert len(trace.next_tokens(99)) == 10
    with pytest.raises(CutawayError, match="0 next tokens were asked for; ask for at least 1"):
        trace.next_tokens(0)


def test_among_equally_likely_tokens_the_lowest_id_comes_first():
    model = random_model(GPT2)
    trace = model.trace([1], points=[])
    trace._last_logits = np.zeros(GPT2.vocab_size)
    assert [token.id for token in trace.next_tokens(4)] == [0, 1, 2, 3]
