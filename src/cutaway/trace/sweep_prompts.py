"""The prompts of a sweep: a list, an iterator, or the lines of a file; taken one at a time."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sized
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.trace.prompts import PromptLike

_FIELDS = ("text", "prompt", "ids", "input_ids")


class SweepPrompts:
    """Prompts in their order. An iterator is taken once: what was skipped is gone."""

    def __init__(self, given: Iterable[PromptLike], total: int | None) -> None:
        self._given, self._total = iter(given), total
        self._taken = 0

    def count(self) -> int | None:
        """How many there are; None where that is not known."""
        return self._total

    def take(self, count: int) -> Iterator[PromptLike]:
        """The next `count` prompts, or as many as are left."""
        for prompt in islice(self._given, count):
            self._taken += 1
            yield prompt

    def peek(self) -> Iterator[PromptLike]:
        """The next prompt, which stays to be taken; nothing where there is none."""
        for prompt in islice(self._given, 1):
            self._given = chain([prompt], self._given)
            yield prompt

    def after(self, skipped: int) -> Iterator[PromptLike]:
        """All from prompt `skipped` on."""
        for _ in self.take(skipped - self._taken):
            pass
        yield from self._given


def prompts_of(given: Any) -> SweepPrompts:
    """Prompts from a list, an iterator, or a file: .jsonl, or text with one prompt a line.

    Raises CutawayError for anything else, and while it is read for a line that holds no prompt.
    """
    if isinstance(given, str | Path):
        path = Path(given)
        if len(str(given)) > 4096 or not path.is_file():
            raise CutawayError(
                f"A sweep takes a list of prompts, or the name of a file with one on each line; {str(given)[:60]!r} is "
                "no file. A single prompt is a list of one."
            )
        return SweepPrompts((prompt for _, prompt in lines_of(path)), sum(1 for _ in _lines(path)))
    if not isinstance(given, Iterable):
        raise CutawayError(f"A sweep takes a list of prompts, or the name of a file, not {type(given).__name__}.")
    if isinstance(given, Sized) and len(given) == 0:
        raise CutawayError("There are no prompts to sweep over.")
    if isinstance(given, list | tuple) and isinstance(given[0], int | np.integer):
        raise CutawayError("A sweep takes a list of prompts, not one prompt as a list of ids; write [[0, 5, 6]].")
    return SweepPrompts(given, len(given) if isinstance(given, Sized) else None)


def lines_of(path: Path) -> Iterator[tuple[int, PromptLike]]:
    """The prompts of a file, each with the number of its line. Empty lines are none.

    A line of a .jsonl file is a text, a list of ids, or an object with one of these as "text", "prompt", "ids" or
    "input_ids"; a line of another file is a text.
    """
    for number, line in _lines(path):
        yield number, _prompt_in(line, number, path) if path.suffix in (".jsonl", ".ndjson") else line


def prompt_digest(digest: Any, prompt: PromptLike) -> None:
    """Let a digest take a prompt, so that another text, or another parting of the same, gives another sum."""
    if isinstance(prompt, str):
        data = prompt.encode("utf-8", "surrogatepass")
        digest.update(b"text %d " % len(data) + data)
    else:
        ids = np.asarray(prompt).astype(np.int64)
        digest.update(b"ids %d " % ids.size + ids.tobytes())


def new_digest() -> Any:
    return hashlib.sha256()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line that is not empty, and its number; without its line break."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                line = line.removesuffix("\n").removesuffix("\r")
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise CutawayError(f"{path} is not UTF-8 text: it holds the byte 0x{error.object[error.start]:02X}.") from None
    except OSError as error:
        raise CutawayError(f"{path} could not be read: {error.strerror or error}.") from None


def _prompt_in(line: str, number: int, path: Path) -> PromptLike:
    try:
        told = json.loads(line)
    except json.JSONDecodeError as error:
        raise CutawayError(f"Line {number} of {path} is no JSON: {error.msg} at character {error.pos}.") from None
    if isinstance(told, dict):
        named = [name for name in _FIELDS if name in told]
        if len(named) != 1:
            held = "none of them" if not named else " and ".join(named)
            raise CutawayError(f"Line {number} of {path} must have one of {', '.join(_FIELDS)}; it has {held}.")
        told = told[named[0]]
    if not isinstance(told, str | list):
        raise CutawayError(f"Line {number} of {path} holds {told!r:.60}; a prompt is a text or a list of ids.")
    return told
