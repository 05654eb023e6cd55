"""A trace is saved for other programs whole or not at all."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from cutaway import CutawayError


def test_a_saved_trace_reads_back_in_another_program_point_by_point(tmp_path, toy):
    trace = toy.trace("<BOS> dragon drinks", points=["*"])
    path = trace.save(tmp_path / "pass.safetensors")
    stored = load_file(path)
    assert np.array_equal(stored.pop("last_logits"), trace.last_logits)
    assert list(stored) and set(stored) == set(trace.points)
    for point in trace.points:
        assert np.array_equal(stored[point], trace[point])
        assert stored[point].dtype == trace[point].dtype
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    assert (metadata["model"], metadata["engine"], metadata["dtype"]) == ("toy", "numpy", "float64")
    prompt = json.loads(metadata["prompt"])
    assert prompt == {"ids": [0, 5, 6], "pieces": ["<BOS>", "dragon", "drinks"], "text": "<BOS> dragon drinks"}
    assert [file.name for file in tmp_path.iterdir()] == ["pass.safetensors"]


def test_a_saved_trace_of_chosen_positions_holds_those_rows(tmp_path, toy):
    trace = toy.trace("<BOS> dragon drinks", points=["logits"], positions=[-1])
    stored = load_file(trace.save(str(tmp_path / "row.safetensors")))
    assert stored["logits"].shape == (1, 10)


def test_a_trace_that_cannot_be_written_leaves_nothing_behind(tmp_path, toy):
    trace = toy.trace("<BOS> dragon drinks")
    with pytest.raises(CutawayError, match=r"could not be written to .*No such file or directory"):
        trace.save(tmp_path / "missing" / "pass.safetensors")
    with pytest.raises(CutawayError, match=r"'\.': that names no file"):
        trace.save("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CutawayError, match="could not be written"):
        trace.save(tmp_path / "folder")
    assert [(f.name, f.is_dir()) for f in tmp_path.iterdir()] == [("folder", True)]
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_full_disk_leaves_an_older_file_as_it_was(tmp_path, toy, monkeypatch):
    import errno
    import os

    path = tmp_path / "pass.safetensors"
    path.write_bytes(b"what was there before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CutawayError, match=r"could not be written to .*: No space left on device"):
        toy.trace("<BOS> dragon drinks").save(path)
    assert path.read_bytes() == b"what was there before"
    assert [file.name for file in tmp_path.iterdir()] == ["pass.safetensors"]


def test_a_saved_file_may_be_read_by_whoever_may_read_the_folders_other_files(tmp_path, toy):
    beside = tmp_path / "beside"
    beside.write_text("x")
    path = toy.trace("<BOS> dragon drinks").save(tmp_path / "pass.safetensors")
    assert path.stat().st_mode == beside.stat().st_mode
