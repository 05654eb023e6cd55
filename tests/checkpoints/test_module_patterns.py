"""Patterns for names of modules match what Python's own matcher matches, and come to an end on every name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway.checkpoints.module_patterns import ModulePattern

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "transformer.h.3.attn.c_attn",
    "lm_head",
    "q_proj",
    "",
]
PATTERNS = [
    r".*\.(q|k|v)_proj",
    r".*layers\.([0-9]|1[0-2])\..*_proj$",
    r"(?!.*mlp).*_proj",
    r".*(?<!down)_proj",
    r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)|(?:\blm_head)",
    r"(?:\w+\.)*[qd]\w+_proj",
    r"(?i)LM_HEAD|.*Q_PROJ",
    r"(?P<all>.*)",
    r"^[^.]*$",
    r"model\.layers\.\d{1,2}\.[a-z_]+?\.\S+\Z",
    r"(?:)*lm_head",
    r"(?-i:lm)_head|(?s:.)+proj",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", NAMES)
def test_they_match_what_python_matches(pattern: str, name: str) -> None:
    assert ModulePattern(pattern).matches(name) == (re.fullmatch(pattern, name) is not None)


def texts() -> st.SearchStrategy[str]:
    """Patterns of a few letters, as wild as they come."""
    letters = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\.", r"\w", "", "^", "$", r"\b"])
    return st.recursive(
        letters,
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{0,2}", "{1,}"])).map(
                lambda made: f"(?:{made[0]}){made[1]}"
            ),
            inner.map(lambda text: f"(?={text})"),
            inner.map(lambda text: f"(?!{text})"),
        ),
        max_leaves=6,
    )


@given(texts(), st.text("ab.", max_size=6))
def test_they_match_what_python_matches_whatever_the_pattern(pattern: str, name: str) -> None:
    assert ModulePattern(pattern).matches(name) == (re.fullmatch(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern", ["(.*)*x", "(a?){40}a{40}", "(a|a|aa)+b", ".*" * 60 + "x", "((a{0,999}){0,999}){999}x"]
)
def test_a_pattern_with_more_ways_than_there_are_seconds_comes_to_an_end(pattern: str) -> None:
    assert not ModulePattern(pattern).matches("a" * 39)
    assert ModulePattern(f"({pattern})|.*").matches("a" * 39)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "unterminated"),
        ("(" * 2000 + ")" * 2000, "nested too deeply"),
        ("(" * 99 + ")" * 99, "nested too deeply"),
        ("a{99999999999999999999}", "too large"),
        (r"(a)\1", "groupref is not understood here"),
        ("(?>a)", "atomic_group is not understood here"),
        ("a" * 10_001, "10,001 characters"),
        ("(?L)a", "inline flags"),
    ],
)
def test_what_is_no_pattern_is_told_why(pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ModulePattern(pattern)
