"""The prompts of a sweep: a list, an iterator, or the lines of a file; taken one at a time."""

import hashlib
from collections.abc import Iterable, Iterator, Sized
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.reading import Unreadable, decoded, parsed
from cutaway.trace.prompts import Given, PromptLike, is_vectors

_FIELDS = ("text", "prompt", "ids", "input_ids")
_TYPES = ("types", "token_type_ids")
_END = object()


class SweepPrompts:
    """Prompts in their order. An iterator is taken once: what was skipped is gone."""

    def __init__(self, given: Iterable[Given], total: int | None) -> None:
        self._given, self._total = iter(given), total
        self._taken = 0

    def count(self) -> int | None:
        """How many there are; None where that is not known."""
        return self._total

    def take(self, count: int) -> Iterator[Given]:
        """The next `count` prompts, or as many as are left."""
        for prompt in islice(self._given, count):
            self._taken += 1
            yield prompt

    def peek(self) -> Iterator[Given]:
        """The next prompt, which stays to be taken; nothing where there is none."""
        for prompt in islice(self._given, 1):
            self._given = chain([prompt], self._given)
            yield prompt

    def after(self, skipped: int) -> Iterator[Given]:
        """All from prompt `skipped` on."""
        for _ in self.take(skipped - self._taken):
            pass
        yield from self._given

    def untyped(self) -> Iterator[PromptLike]:
        """All prompts, for those who cannot use the kinds of tokens. Raises CutawayError for one that tells them."""
        for index, one in enumerate(self._given):
            if one.types is not None:
                raise CutawayError(f"Text {index} tells the types of its tokens, which mean nothing here.")
            yield one.prompt


def prompts_of(given: Any, types: Any = None) -> SweepPrompts:
    """Prompts from a list, an iterator, or a file: .jsonl, or text with one prompt a line.

    `types` are the kinds of each prompt's tokens, in the same order, None where one has none. Raises CutawayError for
    anything else, and while they are read for a line that holds no prompt, and for more or fewer types than prompts.
    """
    prompts = _listed(given)
    if types is None:
        return prompts
    if isinstance(types, str | bytes) or not isinstance(types, Iterable):
        raise CutawayError(
            f"types of a sweep are a list with one entry for each prompt, as in [[0, 0, 1], None]; not {types!r:.60}."
        )
    count = prompts.count()
    if isinstance(types, Sized) and count is not None and len(types) != count:
        raise CutawayError(f"There are {count} prompts and types of {len(types)}; there must be one entry for each.")
    return SweepPrompts(_with_types(prompts.after(0), iter(types)), count)


def _with_types(prompts: Iterator[Given], types: Iterator[Any]) -> Iterator[Given]:
    index = -1
    for index, one in enumerate(prompts):
        own = next(types, _END)
        if own is _END:
            raise CutawayError(f"Prompt {index}: there are types of {index} prompts only; give one entry for each.")
        if own is not None and one.types is not None:
            raise CutawayError(f"Prompt {index}: its types stand in the file, and are given besides; leave one out.")
        yield Given(one.prompt, one.types if own is None else own)
    if next(types, _END) is not _END:
        raise CutawayError(f"There are types of more than the {index + 1} prompts; give one entry for each.")


def _listed(given: Any) -> SweepPrompts:
    if isinstance(given, str | Path):
        path = Path(given)
        if len(str(given)) > 4096 or not path.is_file():
            raise CutawayError(
                f"A sweep takes a list of prompts, or the name of a file with one on each line; {str(given)[:60]!r} is "
                "no file. A single prompt is a list of one."
            )
        return SweepPrompts((prompt for _, prompt in lines_of(path)), sum(1 for _ in _lines(path)))
    if isinstance(given, dict | set | frozenset):
        raise CutawayError(f"A sweep takes a list of prompts, in order, not a {type(given).__name__}.")
    if not isinstance(given, Iterable):
        raise CutawayError(f"A sweep takes a list of prompts, or the name of a file, not {type(given).__name__}.")
    if isinstance(given, Sized) and len(given) == 0:
        raise CutawayError("There are no prompts to sweep over.")
    if isinstance(given, list | tuple) and isinstance(given[0], int | np.integer):
        raise CutawayError("A sweep takes a list of prompts, not one prompt as a list of ids; write [[0, 5, 6]].")
    if is_vectors(given):
        raise CutawayError("A sweep takes a list of prompts, not one prompt as vectors; write [vectors].")
    return SweepPrompts(map(Given, given), len(given) if isinstance(given, Sized) else None)


def lines_of(path: Path) -> Iterator[tuple[int, Given]]:
    """The prompts of a file, each with the number of its line. Empty lines are none.

    A line of a .jsonl file is a text, a list of ids, or an object with one of these as "text", "prompt", "ids" or
    "input_ids", and beside it, if wanted, "types" or "token_type_ids"; a line of another file is a text.
    """
    for number, line in _lines(path):
        yield number, _prompt_in(line, number, path) if path.suffix in (".jsonl", ".ndjson") else Given(line)


def prompt_digest(digest: Any, given: Given) -> None:
    """Let a digest take a prompt, so that another text, or another parting of the same, gives another sum."""
    prompt = given.prompt
    if isinstance(prompt, str):
        data = prompt.encode("utf-8", "surrogatepass")
        digest.update(b"text %d " % len(data) + data)
    elif is_vectors(prompt):
        vectors = np.asarray(prompt, dtype=np.float64)  # which holds every number of the shorter floats
        digest.update(b"vectors %d %d " % vectors.shape + vectors.tobytes())
    else:
        digest.update(b"ids " + _told(prompt))
    if given.types is not None:
        digest.update(b"types " + _told(given.types))


def _told(numbers: Any) -> bytes:
    """Whole numbers as bytes; what is none, and is refused where it is run, as it is written."""
    try:
        array = np.asarray(numbers)
    except ValueError:  # lists of different lengths in a list
        return repr(numbers).encode()
    if array.dtype.kind not in "iu" and array.size:
        return repr(numbers).encode()
    return b"%d " % array.size + array.astype(np.int64).tobytes()


def new_digest() -> Any:
    return hashlib.sha256()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line that is not empty, and its number; without its line break."""
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                line = decoded(data, begins=number == 1).removesuffix("\n").removesuffix("\r")
                if line.strip():
                    yield number, line
    except Unreadable as error:
        raise CutawayError(f"{path} cannot be read from line {number} on: {error}.") from None
    except OSError as error:
        raise CutawayError(f"{path} could not be read: {error.strerror or error}.") from None


def _prompt_in(line: str, number: int, path: Path) -> Given:
    try:
        told = parsed(line)
    except Unreadable as error:
        raise CutawayError(f"Line {number} of {path} is no JSON: {error}.") from None
    types = None
    if isinstance(told, dict):
        types = next((told[name] for name in _TYPES if told.get(name) is not None), None)
        told = told[_one_of(_FIELDS, told, number, path)]
    if not isinstance(told, str | list):
        raise CutawayError(f"Line {number} of {path} holds {told!r:.60}; a prompt is a text or a list of ids.")
    return Given(told, types)


def _one_of(names: tuple[str, ...], told: dict[str, Any], number: int, path: Path) -> str:
    named = [name for name in names if name in told]
    if len(named) != 1:
        held = "none of them" if not named else " and ".join(named)
        raise CutawayError(f"Line {number} of {path} must have one of {', '.join(names)}; it has {held}.")
    return named[0]
