"""Patterns that an adapter's configuration names modules by: regular expressions, matched in bounded time.

Python's own matcher tries one way after another, and a pattern of a few characters can have more ways than there are
seconds: `(.*)*x` would never come to an end on one name. Here all ways are followed at once: from every place where a
part may begin, all places where it may end, each worked out once.
"""

import re
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from re import _constants as ops  # type: ignore[attr-defined]  # the steps of a pattern, as Python itself parses it
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MOST, DEEPEST = 10_000, 50  # characters of one pattern, and groups within one another

_CATEGORIES = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
    ops.CATEGORY_NOT_WORD: r"\W",
}
_PLACES = {
    ops.AT_BEGINNING: "^",
    ops.AT_BEGINNING_STRING: r"\A",
    ops.AT_BOUNDARY: r"\b",
    ops.AT_NON_BOUNDARY: r"\B",
    ops.AT_END: "$",
    ops.AT_END_STRING: r"\Z",
}


class ModulePattern:
    """A pattern for names of modules. Raises ValueError, with the reason, for a text that is none."""

    def __init__(self, text: str) -> None:
        if len(text) > MOST:
            raise ValueError(f"it has {len(text):,} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of brackets that may mean something else one day
                parsed = parser.parse(text)
            _refuse_foreign(parsed)
        except (re.error, OverflowError) as error:
            raise ValueError(str(error)) from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        self._parsed = parsed

    def matches(self, name: str, start: int = 0) -> bool:
        """Whether it matches all of a name from `start` on."""
        return len(name) in self.ends(name, start)

    def ends(self, name: str, start: int = 0) -> list[int]:
        """Where what it matches from `start` on may end, the nearest first."""
        return sorted(_Name(name, self._parsed.state.flags).after(self._parsed, frozenset((start,))))


@lru_cache(maxsize=1024)
def module_pattern(text: str) -> ModulePattern:
    """The pattern of a text; each is read once. Raises ValueError as `ModulePattern` does."""
    return ModulePattern(text)


class _Name:
    """One name, and where in it each part of a pattern was found to end."""

    def __init__(self, text: str, flags: int) -> None:
        self._text, self._flags = text, flags & (re.IGNORECASE | re.ASCII | re.DOTALL | re.MULTILINE)
        self._known: dict[tuple[int, int], frozenset[int]] = {}

    def after(self, steps: Iterable[Any], starts: frozenset[int]) -> frozenset[int]:
        """Where the steps of a pattern end that begin at any of these places."""
        for step in steps:
            starts = frozenset(end for start in starts for end in self._after_step(step, start))
            if not starts:
                break
        return starts

    def _after_step(self, step: Any, start: int) -> frozenset[int]:
        key = id(step), start
        if key not in self._known:
            self._known[key] = self._worked_out(step[0], step[1], start)
        return self._known[key]

    def _worked_out(self, kind: Any, given: Any, start: int) -> frozenset[int]:
        here = frozenset((start,))
        if kind is ops.BRANCH:
            return frozenset().union(*(self.after(branch, here) for branch in given[1]))
        if kind is ops.SUBPATTERN:
            before = self._flags
            self._flags = (before | given[1]) & ~given[2]
            ends = self.after(given[3], here)
            self._flags = before
            return ends
        if kind in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            return self._repeated(given[2], given[0], given[1], here)
        if kind in (ops.ASSERT, ops.ASSERT_NOT):
            behind, steps = given[0] < 0, given[1]
            starts = range(start + 1) if behind else (start,)
            reached = [self.after(steps, frozenset((one,))) for one in starts]
            found = any(start in ends for ends in reached) if behind else bool(reached[0])
            return here if found == (kind is ops.ASSERT) else frozenset()
        if kind is ops.AT:
            return here if _compiled(_PLACES[given], self._flags).match(self._text, start) else frozenset()
        if start < len(self._text) and self._is(kind, given, self._text[start]):
            return frozenset((start + 1,))
        return frozenset()

    def _repeated(self, steps: Any, least: int, most: int, starts: frozenset[int]) -> frozenset[int]:
        ends, times = starts if least == 0 else frozenset(), 0
        while starts and times < most:
            further = self.after(steps, starts)
            times += 1
            if times >= least:
                if further <= ends:
                    break
                ends |= further
            elif further == starts:  # and so it would be after any number of times
                return ends | further
            starts = further
        return ends

    def _is(self, kind: Any, given: Any, character: str) -> bool:
        """Whether one character is what one step of a pattern stands for."""
        if kind is ops.ANY:
            return character != "\n" or bool(self._flags & re.DOTALL)
        if kind is ops.IN:
            negated: bool = given[0][0] is ops.NEGATE
            return negated != any(self._is(one[0], one[1], character) for one in given[int(negated) :])
        if kind is ops.CATEGORY:
            return _compiled(_CATEGORIES[given], self._flags).match(character) is not None
        spelled = {character, character.lower(), character.upper()} if self._flags & re.IGNORECASE else {character}
        if kind is ops.RANGE:
            return any(len(one) == 1 and given[0] <= ord(one) <= given[1] for one in spelled)
        return (chr(given) in spelled) != (kind is ops.NOT_LITERAL)


@lru_cache(maxsize=256)
def _compiled(text: str, flags: int) -> re.Pattern[str]:
    return re.compile(text, flags)


def _refuse_foreign(steps: Iterable[Any], depth: int = 0) -> None:
    """Raise re.error for what looks back at what was matched before: there all ways cannot be followed at once."""
    if depth > DEEPEST:
        raise RecursionError
    inside: dict[Any, Callable[[Any], list[Any]]] = {
        ops.BRANCH: lambda given: given[1],
        ops.SUBPATTERN: lambda given: [given[3]],
        ops.MAX_REPEAT: lambda given: [given[2]],
        ops.MIN_REPEAT: lambda given: [given[2]],
        ops.ASSERT: lambda given: [given[1]],
        ops.ASSERT_NOT: lambda given: [given[1]],
    }
    simple = (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN, ops.AT)
    for kind, given in steps:
        if kind in inside:
            for part in inside[kind](given):
                _refuse_foreign(part, depth + 1)
        elif kind not in simple:
            raise re.error(f"{str(kind).lower()} is not understood here")
