"""A saved trace reads back as it was, without the model; a file that is none, or cut off, is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import cutaway
from cutaway import CutawayError
from cutaway.trace.edits import Replace, Scale
from cutaway.trace.edits.without import Without
from random_models import GPT2, LIKE, LLAMA, POST, random_ids, random_model


@pytest.mark.parametrize("like", LIKE)
def test_a_saved_trace_opens_with_the_same_addresses_numbers_and_words(like, tmp_path):
    model, ids = random_model(LIKE[like]), random_ids(LIKE[like], 7)
    trace = model.trace(ids, points=["*", "layers.*.attn.pattern | top(2)"])
    opened = cutaway.open_trace(trace.save(tmp_path / "pass.safetensors"))
    assert opened.points == trace.points
    for point in trace.points:
        assert np.array_equal(opened[point], trace[point], equal_nan=True), point
        assert opened[point].dtype == trace[point].dtype
    assert (opened.spec, opened.prompt, opened.engine, opened.dtype) == (
        trace.spec,
        trace.prompt,
        trace.engine,
        trace.dtype,
    )
    assert np.array_equal(opened.last_logits, trace.last_logits)
    assert repr(opened) == repr(trace)
    assert len(opened.diff(trace)) == len(trace.points) and opened.diff(trace).first_change is None


def test_a_saved_trace_of_a_text_tells_the_next_tokens_and_draws_itself(tmp_path, toy, capsys):
    trace = toy.trace("<BOS> dragon drinks", points=["*"])
    opened = cutaway.open_trace(str(trace.save(tmp_path / "pass.safetensors")))
    assert opened.next_tokens(10) == trace.next_tokens(10)
    trace.show()
    expected = capsys.readouterr().out
    opened.show()
    assert capsys.readouterr().out == expected
    blocks = [(rows.tolist(), weights.shape) for rows, weights in opened.pattern_rows(0)]
    assert blocks == [([0, 1, 2], trace["layers.0.attn.pattern"].shape)]


def test_chosen_rows_and_heads_are_the_same_when_opened(tmp_path):
    model, ids = random_model(LLAMA), random_ids(LLAMA, 9)
    trace = model.trace(ids, ["*"], positions=[8, 2], heads=[3])
    opened = cutaway.open_trace(trace.save(tmp_path / "part.safetensors"))
    assert opened.rows.tolist() == [8, 2] and opened.heads == (3,)
    assert all(np.array_equal(opened[p], trace[p], equal_nan=True) for p in trace.points)


def test_an_opened_trace_is_a_source_of_edits(tmp_path):
    model, ids = random_model(LLAMA), random_ids(LLAMA, 9)
    source = model.trace(random_ids(LLAMA, 9, 4), points=["layers.0.attn.z"])
    opened = cutaway.open_trace(source.save(tmp_path / "source.safetensors"))
    runs = [model.trace(ids, [], edits=[Replace("layers.0.attn.z", one)]).last_logits for one in (source, opened)]
    assert np.array_equal(*runs)


def test_a_saved_edited_run_remembers_what_was_done(tmp_path):
    model, ids = random_model(LLAMA), random_ids(LLAMA, 5)
    trace = model.trace(ids, ["logits"], edits=[Without("mask"), Scale("layers.0.mlp.out", 2.0)])
    opened = cutaway.open_trace(trace.save(tmp_path / "edited.safetensors"))
    assert opened.told_edits == [str(report) for report in trace.edits]
    assert [t.id for t in opened.next_tokens(3)] == [t.id for t in trace.next_tokens(3)]
    assert not opened.spec.causal


def test_an_address_that_was_not_saved_is_refused(tmp_path):
    path = random_model(LLAMA).trace([1, 2], ["logits"]).save(tmp_path / "x.safetensors")
    with pytest.raises(CutawayError, match=r"layers\.0\.attn\.z was not captured in this trace"):
        cutaway.open_trace(path)["layers.0.attn.z"]


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_refused(tmp_path, part):
    path = random_model(LLAMA).trace([1, 2, 3], ["*"]).save(tmp_path / "x.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(CutawayError, match=r"is no whole safetensors file .*cut off"):
        cutaway.open_trace(path)


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    for name in (None, 5, ""):
        with pytest.raises(CutawayError, match="opened by the name of its file"):
            cutaway.open_trace(name)
    with pytest.raises(CutawayError, match="is a folder; name the file in it"):
        cutaway.open_trace(tmp_path)
    with pytest.raises(CutawayError, match=r"There is no file .*missing\.safetensors"):
        cutaway.open_trace(tmp_path / "missing.safetensors")
    save_file({"x": np.ones(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(CutawayError, match="is a safetensors file, but no trace"):
        cutaway.open_trace(tmp_path / "weights.safetensors")
    save_file({"x": np.ones(3)}, tmp_path / "half.safetensors", {"format": "cutaway trace 1"})
    with pytest.raises(CutawayError, match="its description cannot be read"):
        cutaway.open_trace(tmp_path / "half.safetensors")


# Two runs held against each other


def test_the_difference_of_two_runs_tells_where_they_part_and_how_far():
    model, ids = random_model(LLAMA), random_ids(LLAMA, 6)
    plain = model.trace(ids, ["*"])
    edited = model.trace(ids, ["*"], edits=[Scale("layers.1.attn.z", 0.5)])
    difference = edited.diff(plain)
    assert difference.first_change == "layers.1.attn.z"
    one = difference["layers.1.attn.z"]
    expected = np.abs(edited["layers.1.attn.z"] - plain["layers.1.attn.z"]).max()
    assert one.largest == expected and one.different == one.elements == 4 * 6 * 6
    assert one.relative == pytest.approx(0.5)
    assert difference["layers.0.mlp.out"].different == 0
    assert difference.moved == edited.edited.moved
    assert [row.address for row in difference] == plain.points
    told = str(difference).splitlines()
    same = plain.points.index("layers.1.attn.z")
    assert told[0] == f"{same} of {len(plain.points)} addresses hold the same numbers:"
    assert [line.split()[0] for line in told[1:-1]] == plain.points[same:]
    assert told[-1].startswith("logits moved by up to")


def test_a_difference_is_told_in_short_the_first_layer_in_full_and_what_the_others_leave():
    model = random_model(replace(LLAMA, layers=LLAMA.layers[:1] * 4))
    points = ["layers.*.attn.out", "layers.*.resid_mid", "layers.*.resid_post", "logits"]
    ids = random_ids(LLAMA, 6)
    told = str(model.trace(ids, points, edits=[Scale("layers.1.attn.out", 0.5)]).diff(model.trace(ids, points)))
    assert [line.split()[0] for line in told.splitlines()[1:-1]] == [
        "layers.1.attn.out",
        "layers.1.resid_mid",
        "layers.1.resid_post",
        "layers.2.resid_post",
        "layers.3.resid_post",
        "logits",
    ]
    assert str(model.trace(ids, points).diff(model.trace(ids, points))).startswith("13 of 13 addresses hold the same")


def test_runs_of_other_texts_of_the_same_length_have_a_difference_from_the_first_vector_on():
    model = random_model(GPT2)
    difference = model.trace([1, 2, 3], ["*"]).diff(model.trace([1, 5, 3], ["*"]))
    assert difference.first_change == "tokens"
    assert difference["embed.tokens"].different == GPT2.d_model
    assert model.trace([1, 2], ["*"]).diff(model.trace([1, 2], ["*"])).first_change is None


def test_what_only_one_run_holds_is_named():
    model = random_model(GPT2)
    difference = model.trace([1, 2], ["logits", "embed.out"]).diff(model.trace([1, 2], ["logits", "final.norm"]))
    assert (difference.only_first, difference.only_second) == (["embed.out"], ["final.norm"])
    with pytest.raises(CutawayError, match=r"'embed\.out' is not in both runs"):
        difference["embed.out"]


def test_runs_that_cannot_be_held_against_each_other_are_refused():
    model = random_model(GPT2)
    with pytest.raises(CutawayError, match="hold 2 and 3 rows"):
        model.trace([1, 2]).diff(model.trace([1, 2, 3]))
    with pytest.raises(CutawayError, match="at other positions or heads"):
        model.trace([1, 2, 3], positions=[0]).diff(model.trace([1, 2, 3], positions=[1]))
    with pytest.raises(CutawayError, match="share no address"):
        model.trace([1, 2], ["logits"]).diff(model.trace([1, 2], ["embed.out"]))


# Vectors in the place of tokens


@pytest.mark.parametrize("spec", [GPT2, LLAMA, POST], ids=lambda spec: spec.name)
def test_the_vectors_of_the_tokens_give_what_the_tokens_give(spec):
    model, ids = random_model(spec), random_ids(spec, 9)
    plain = model.trace(ids, ["*"])
    given_ = model.trace(np.array(plain["embed.tokens"]), ["*"])
    assert given_.points == [point for point in plain.points if point != "tokens"]
    assert all(np.array_equal(given_[point], plain[point], equal_nan=True) for point in given_.points)
    assert set(given_.prompt.ids) == {-1}


def test_vectors_between_two_tokens_can_be_run_and_edited():
    model = random_model(LLAMA)
    table = model.trace([3, 7], ["embed.tokens"])["embed.tokens"]
    trace = model.trace(table[:1] * 0.5 + table[1:] * 0.5, ["logits"], edits=[Scale("layers.0.mlp.out", 2.0)])
    assert trace.logits.shape == (1, 23)
    assert trace.edits[0].moved.largest > 0


def test_later_changes_to_the_callers_vectors_reach_no_trace():
    model = random_model(LLAMA)
    vectors = np.ones((2, 12))
    trace = model.trace(vectors, ["embed.tokens"])
    vectors[:] = 5
    assert (trace["embed.tokens"] == 1).all()


@pytest.mark.parametrize(
    ("vectors", "said"),
    [
        (np.ones((3, 11)), r"The vectors are \[3, 11\]; small-llama reads \[T, 12\]"),
        (np.ones((0, 12)), "at least one row"),
        (np.full((2, 12), np.nan), "must be finite numbers"),
        (np.ones(12), "A prompt is a text or one list"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(vectors, said):
    with pytest.raises(CutawayError, match=said):
        random_model(LLAMA).trace(vectors)


def test_of_vectors_there_are_no_tokens_to_capture():
    with pytest.raises(CutawayError, match="there are no tokens to capture"):
        random_model(LLAMA).trace(np.ones((2, 12)), ["tokens"])


@given(st.integers(1, 4))
def test_a_generation_starts_from_tokens_only(length):
    with pytest.raises(CutawayError, match="A prompt is a text or one list"):
        random_model(LLAMA).generate(np.ones((length, 12)), max_tokens=1)
