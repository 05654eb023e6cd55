"""Stop strings end the text before themselves, however tokens cut them, and nothing of them is shown too early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.generate.stopping import StopStrings


def run(pieces: list[str], stops) -> tuple[str, str | None, list[str]]:
    """All that was shown, the stop string found, and what was shown after each piece."""
    watcher = StopStrings(stops)
    shown = [watcher.push(piece) for piece in pieces]
    return "".join(shown) + watcher.flush(), watcher.found, shown


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "found"),
    [
        (["Hello", " world"], [], "Hello world", None),
        (["abc"], ["b"], "a", "b"),
        (["a", "b", "c"], ["b"], "a", "b"),
        (["The end", "\n", "\n", "More"], ["\n\n"], "The end", "\n\n"),
        (["The end\n", "not yet\n", "\n"], ["\n\n"], "The end\nnot yet", "\n\n"),
        (["x<", "|e", "nd|", ">y"], ["<|end|>"], "x", "<|end|>"),
        (["x<|end"], ["<|end|>"], "x<|end", None),
        (["aa", "ab"], ["aab"], "a", "aab"),
        (["abab", "ac"], ["abac"], "ab", "abac"),
        (["one. two"], ["two", "."], "one", "."),
        (["onetwo"], ["two", "onetwo"], "", "onetwo"),
        (["ab", "c"], ["abc", "b"], "a", "b"),
        (["abc"], ["abc", "b"], "a", "b"),
        (["stop here"], "stop", "", "stop"),
        (["é", "ß"], ["ß"], "é", "ß"),
    ],
)
def test_text_ends_before_the_stop_string(pieces, stops, text, found):
    assert run(pieces, stops)[:2] == (text, found)


def test_text_that_may_become_a_stop_string_is_held_back_and_given_out_when_it_does_not():
    _, _, shown = run(["a", "b<", "|", "e", "x", "c"], ["<|end|>"])
    assert shown == ["a", "b", "", "", "<|ex", "c"]


def test_nothing_is_shown_after_a_stop_string():
    watcher = StopStrings(["."])
    assert watcher.push("a.b") == "a"
    assert watcher.push("more") == ""
    assert watcher.flush() == ""


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.text("ab", min_size=1, max_size=4))
def test_one_stop_string_is_found_where_find_finds_it(pieces, stop):
    whole = "".join(pieces)
    at = whole.find(stop)
    text, found, _ = run(pieces, [stop])
    assert (text, found) == ((whole, None) if at < 0 else (whole[:at], stop))


@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_of_several_the_one_that_is_complete_first_wins_however_the_text_is_cut(whole, stops, data):
    ends = [(whole.find(stop) + len(stop), whole.find(stop), stop) for stop in stops if stop in whole]
    expected = (whole, None) if not ends else (whole[: min(ends)[1]], min(ends)[2])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert run(pieces, stops)[:2] == expected
    assert run(list(whole), stops)[:2] == expected


@given(st.lists(st.text("abc", max_size=4), max_size=8), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_what_is_shown_is_never_taken_back(pieces, stops):
    text, _, shown = run(pieces, stops)
    assert text.startswith("".join(shown))


@pytest.mark.parametrize("stops", [[""], "", ["a", ""], [3], [None]])
def test_a_stop_string_that_is_none_is_refused(stops):
    with pytest.raises(CutawayError, match=r"A stop string is .*; it must be a text of at least one character"):
        StopStrings(stops)
