"""An edit is plain data: written as JSON it reads back as the same edit, and what has no such form is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from cutaway import CutawayError
from cutaway.trace.edits import (
    Add,
    Drop,
    Freeze,
    Function,
    Keep,
    Knockout,
    Mean,
    Replace,
    Resample,
    Scale,
    Zero,
)
from cutaway.trace.edits.edit import edits_key
from cutaway.trace.edits.plain import edit_from_json, read_edits
from random_models import LLAMA, random_model


def test_an_edit_written_as_json_reads_back_as_the_same_edit(tmp_path):
    model = random_model(LLAMA)
    file = model.trace([1, 2, 3], points=["layers.0.attn.z"]).save(tmp_path / "source.safetensors")
    edits = [
        Zero("layers.3.attn.z", heads=[5]),
        Mean(["layers.0.mlp.act", "layers.1.mlp.act"], neurons=[1, 2]),
        Resample("layers.0.attn.z", str(file), 7),
        Replace("layers.0.attn.z", str(file), positions=[2], source_positions=[0]),
        Replace("layers.0.attn.z", np.ones((2, 3)).tolist()),
        Freeze("layers.*.attn.pattern"),
        Add("layers.0.resid_post", np.array([0.1, 1 / 3], np.float32), 2.5, positions="3:"),
        Scale("layers.*.mlp.out", 0.5),
        Knockout("layers.0.attn.masked", [[5, 2]]),
        Drop("layers.0.attn.masked", keys=[3]),
        Keep("layers.0.attn.z", heads=[1]),
    ]
    for edit in edits:
        written = json.dumps(edit.to_json())
        again = edit_from_json(written)
        assert again.to_json() == edit.to_json()
        assert type(again) is type(edit)
    assert edits[0].to_json() == {"zero": "layers.3.attn.z", "heads": [5]}
    trace = model.trace([4, 5, 6], points=["layers.0.attn.z"], edits=[edits[3].to_json()])
    assert np.array_equal(trace["layers.0.attn.z"][:, 2], model.trace([1])["layers.0.attn.z"][:, 0])


def test_edits_are_equal_and_share_a_key_where_they_do_the_same():
    assert Zero("layers.0.attn.z", heads=[1]) == Zero(["layers.0.attn.z"], heads=(1,))
    assert Zero("layers.0.attn.z", heads=[1]).key != Zero("layers.0.attn.z", heads=[2]).key
    assert Add("embed.out", [1.0]) == Add("embed.out", np.array([1.0]))
    assert Add("embed.out", [1.0]) != Add("embed.out", [1.5])
    assert Zero("layers.0.attn.z").key == "6e38b6509d69cef3"  # the same in every process
    first, second = Zero("embed.out"), Scale("embed.out", 2.0)
    assert edits_key([first, second]) != edits_key([second, first])
    assert edits_key([]) == ""
    one, other = (random_model(LLAMA).trace([1], points=["embed.out"]) for _ in range(2))
    assert Replace("embed.out", one) == Replace("embed.out", one) != Replace("embed.out", other)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("{", "is no JSON"),
        ('["zero"]', "is none"),
        ('{"zap": "layers.0.attn.z"}', "names no kind of edit; the kinds are zero,"),
        ('{"zerro": "layers.0.attn.z"}', r"did you mean 'zero'\? The kinds are"),
        ('{"zero": "layers.0.attn.z", "head": [1]}', "'head' is none of them"),
        ('{"add": "embed.out"}', "needs 'vector'"),
        ('{"zero": 3}', "addressed by a point or a pattern, not by 3"),
        ('{"zero": "embed.out", "positions": "a"}', "a range of them is written"),
        ('{"zero": "embed.out", "heads": [1.5]}', r"heads holds 1\.5"),
        ('{"zero": "embed.out", "heads": [-1]}', "whole numbers from 0"),
        ('{"knockout": "layers.0.attn.masked", "edges": [3]}', "pairs of positions"),
        ('{"drop": "layers.0.attn.z"}', "needs what to drop"),
        ('{"function": "embed.out"}', "names no kind of edit; a Python function has no form in JSON. The kinds are"),
        ('{"scale": "embed.out", "factor": "2"}', "factor of a scale must be a number; it is '2'"),
        ('{"add": "embed.out", "vector": [1], "scale": null}', "scale of a vector must be a number"),
        ('{"add": "embed.out", "vector": ["x"]}', "must be finite numbers"),
        ('{"resample": "embed.out", "source": "x", "seed": -1}', "0 or a positive whole number"),
    ],
)
def test_what_is_no_edit_is_refused_with_what_would_be(written, said):
    with pytest.raises(CutawayError, match=said):
        read_edits(written)


def test_what_lives_in_this_process_only_has_no_json():
    source = random_model(LLAMA).trace([1], points=["embed.out"])
    with pytest.raises(CutawayError, match="save it and give the name of its file"):
        Replace("embed.out", source).to_json()
    with pytest.raises(CutawayError, match="no form in JSON"):
        Function("embed.out", lambda v, p: v).to_json()


def test_an_edit_is_frozen_and_its_vector_cannot_be_changed_afterwards():
    vector = np.ones(12)
    edit = Add("embed.out", vector)
    vector[:] = 5
    assert edit.vector.tolist() == [1.0] * 12
    with pytest.raises(ValueError, match="read-only"):
        edit.vector[0] = 2
    with pytest.raises(AttributeError):
        edit.scale = 3


def test_settings_out_of_numpy_are_plain_numbers():
    edits = [Scale("embed.out", np.float32(0.5)), Resample("embed.out", np.ones((2, 12)).tolist(), np.int64(3))]
    edits += [Zero("layers.0.attn.z", heads=np.arange(2), positions=slice(1, None))]
    assert json.loads(json.dumps([edit.to_json() for edit in edits]))[2] == {
        "zero": "layers.0.attn.z",
        "positions": "1:",
        "heads": [0, 1],
    }


def test_a_dataclass_copy_of_an_edit_is_an_edit():
    assert replace(Zero("embed.out"), positions=[1]) == Zero("embed.out", positions=[1])
