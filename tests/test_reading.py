"""Text and JSON, wherever they come from: a byte order mark is no fault, and what cannot be read is told in one way."""

import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutaway
from cutaway import CutawayError
from cutaway.reading import Unreadable, decoded, parsed, parsed_object, read_bytes, read_object, read_text

MARK = b"\xef\xbb\xbf"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_what_was_written_as_json_is_read_back_with_a_mark_and_without(value):
    told = json.dumps(value)
    assert parsed(told) == parsed(told.encode()) == parsed(MARK + told.encode()) == value


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (MARK, "it is empty"),
        ('{"a": 1}'.encode("utf-16"), "it is UTF-16 text; save it as UTF-8"),
        (b"\xfe\xff" + '{"a": 1}'.encode("utf-16-be"), "it is UTF-16 text; save it as UTF-8"),
        ('{"a": 1}'.encode("utf-32"), "it is UTF-32 text; save it as UTF-8"),
        (b'{"a": "\xe9"}', "it is not UTF-8 text: byte 7 is 0xE9"),
        (b'{"a": 1', "Expecting ',' delimiter at line 1, character 8"),
        (b'{"a":\n 1} x', "Extra data at line 2, character 5"),
        (b'{"a": 1, "b": {"c": 1, "d": 2, "c": 1}}', "'c' is given twice"),
        (b'{"a": [1, {"b": [0.5, NaN]}]}', "'b' of 'a' is NaN, which is no finite number"),
        (b"[-Infinity]", "it is -Infinity, which is no finite number"),
        (b'{"a": 1e999}', "'a' is 1e999, which is no finite number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "it holds a number of thousands of digits"),
        (b"[" * 200_000, "it is nested too deeply"),
    ],
    ids=repr,
)
def test_what_is_no_json_is_refused_with_the_reason(told: bytes, why: str, tmp_path: Path):
    with pytest.raises(Unreadable) as refused:
        parsed(told)
    assert str(refused.value) == why
    (tmp_path / "x.json").write_bytes(told)
    with pytest.raises(CutawayError) as refused:
        read_object(tmp_path / "x.json")
    assert str(refused.value) == f"{tmp_path / 'x.json'} cannot be read as JSON: {why}."


@pytest.mark.parametrize(
    ("told", "kind"),
    [("[]", "a list"), ('"x"', "a text"), ("3", "a number"), ("0.5", "a number"), ("true", "true"), ("null", "null")],
)
def test_a_value_in_the_place_of_an_object_is_named_in_the_words_of_json(told, kind):
    with pytest.raises(Unreadable, match=f"it holds {kind}.* where an object is needed"):
        parsed_object(told)


def test_a_text_has_its_lines_and_no_mark(tmp_path):
    (tmp_path / "x.txt").write_bytes(MARK + "a\r\nb\rü\n".encode())
    assert read_text(tmp_path / "x.txt") == "a\nb\nü\n"
    assert decoded(MARK + b"a", begins=False) == "\ufeffa"
    (tmp_path / "x.txt").write_bytes("a".encode("utf-16"))
    with pytest.raises(CutawayError, match=r"x\.txt cannot be read: it is UTF-16 text; save it as UTF-8"):
        read_text(tmp_path / "x.txt")
    with pytest.raises(CutawayError, match="none cannot be read: No such file"):
        read_text(tmp_path / "none")
    with pytest.raises(CutawayError, match="none cannot be read: No such file"):
        read_object(tmp_path / "none")


def test_an_edit_in_json_is_read_as_all_json_is():
    toy = cutaway.load("toy")
    edit = '{"zero": "layers.0.attn.out"}'
    told = [toy.trace("<BOS> dragon", edits=[one]).logits.tolist() for one in (edit, "\ufeff" + edit)]
    assert told[0] == told[1]
    for wrong in ("[" * 200_000, '{"scale": "layers.0.attn.out", "factor": ' + "9" * 5000 + "}"):
        with pytest.raises(CutawayError, match="is no JSON") as refused:
            toy.trace("<BOS>", edits=[wrong])
        assert len(str(refused.value)) < 500


def test_what_never_ends_is_not_read_to_its_end(tmp_path):
    (tmp_path / "long.json").write_bytes(b" " * 3000 + b"{}")
    for read in (lambda path: read_bytes(path, 1000), lambda path: read_object(path, 1000)):
        with pytest.raises(CutawayError, match=r"long\.json is 3,002 bytes long; such a file has at most 1,000"):
            read(tmp_path / "long.json")
    (tmp_path / "long.json").write_bytes(b" " * 998 + b"{}")
    assert read_object(tmp_path / "long.json", 1000) == {}
    if os.path.exists("/dev/zero"):
        with pytest.raises(CutawayError, match=r"/dev/zero is more than 5,000,000 bytes long"):
            read_bytes("/dev/zero", 5_000_000)
        with pytest.raises(CutawayError, match=r"/dev/zero cannot be read: it is no file but a pipe or a device"):
            read_object("/dev/zero")


def test_a_pipe_gives_a_text_but_nobody_waits_for_one_where_an_object_should_lie(tmp_path):
    if not hasattr(os, "mkfifo"):
        return  # a system without pipes that have names
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CutawayError, match="it is no file but a pipe or a device"):
        read_object(tmp_path / "config.json")
    writer = threading.Thread(target=(tmp_path / "config.json").write_text, args=("told\r\n",))
    writer.start()
    assert read_text(tmp_path / "config.json") == "told\n"
    writer.join()


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have_is_refused(name):
    for read in (read_bytes, read_text, read_object):
        with pytest.raises(CutawayError, match="cannot be read: no file can have that name"):
            read(name)
