"""Text and JSON of files and requests: read in one way, and what cannot be read is refused in the same words."""

import codecs
import json
import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf
from typing import Any

from cutaway.errors import CutawayError

MOST_BYTES = 1 << 28  # of a file that is read at one go: the longest tokenizers have an eighth
_AT_ONCE = 1 << 20  # bytes of what does not say how long it is
_SHOWN = 60  # characters of what is told back
_MARKS = {  # of encodings, the longer ones first: that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


class Unreadable(CutawayError):
    """Why something cannot be read, as the end of a sentence that says what and where: "it is empty"."""


def decoded(data: bytes, begins: bool = True) -> str:
    """The text of bytes in UTF-8; a byte order mark is no part of it, where it `begins` there.

    Raises Unreadable for other bytes.
    """
    for mark, encoding in _MARKS.items():
        if begins and data.startswith(mark):
            raise Unreadable(f"it is {encoding} text; save it as UTF-8")
    try:
        return (data.removeprefix(codecs.BOM_UTF8) if begins else data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02X}") from None


def parsed(told: str | bytes) -> Any:
    """The value that a JSON text holds.

    Raises Unreadable for what is no JSON, and for what JSON leaves open: a key that an object gives twice, NaN and
    Infinity, numbers larger than any that can be held.
    """
    text = decoded(told) if isinstance(told, bytes) else told.removeprefix("\ufeff")
    if not text.strip():
        raise Unreadable("it is empty")
    wrong: list[_NoNumber] = []

    def number(told: str) -> float:
        return wrong_number(told) if isinf(read := float(told)) else read

    def wrong_number(told: str) -> Any:
        wrong.append(_NoNumber(told))
        return wrong[-1]

    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=wrong_number, parse_float=number)
    except json.JSONDecodeError as error:
        raise Unreadable(f"{error.msg} at line {error.lineno}, character {error.colno}") from None
    except ValueError:  # how Python refuses to read an integer of thousands of digits
        raise Unreadable("it holds a number of thousands of digits") from None
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    if wrong:
        raise Unreadable(f"{_name_of(wrong[0], value)} is {wrong[0].told:.60}, which is no finite number")
    return value


def parsed_object(told: str | bytes) -> dict[str, Any]:
    """The object that a JSON text holds. Raises Unreadable as `parsed` does, and for any other value."""
    value = parsed(told)
    if not isinstance(value, dict):
        raise Unreadable(f"it holds {_KINDS[type(value)]} where an object is needed, {{…}}")
    return value


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES, *, piped: bool = True) -> bytes:
    """The bytes of a file, or with `piped` of what else gives bytes until it ends.

    Raises CutawayError for what cannot be read, and for more than `most` bytes: no file is trusted to end.
    """
    try:
        if not piped and not stat.S_ISREG(kind := os.stat(path).st_mode) and not stat.S_ISDIR(kind):
            raise CutawayError(f"{path} cannot be read: it is no file but a pipe or a device.")  # it may never end
        with open(path, "rb") as file:
            size, parts, left = os.fstat(file.fileno()).st_size, [], most + 1
            while size <= most and left and (part := file.read(min(left, max(size, _AT_ONCE)))):
                parts.append(part)
                left -= len(part)
    except OSError as error:
        raise CutawayError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError:  # a NUL, or half of a surrogate pair
        raise CutawayError(f"{str(path)!r} cannot be read: no file can have that name.") from None
    if size > most or not left:
        told = f"{size:,}" if size > most else f"more than {most:,}"
        raise CutawayError(f"{path} is {told} bytes long; such a file has at most {most:,}.")
    return b"".join(parts)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file, as `decoded` reads it, its line ends all written as one character.

    Raises CutawayError for what cannot be read.
    """
    try:
        return decoded(read_bytes(path)).replace("\r\n", "\n").replace("\r", "\n")
    except Unreadable as error:
        raise CutawayError(f"{path} cannot be read: {error}.") from None


def read_object(path: str | os.PathLike[str], most: int = MOST_BYTES) -> dict[str, Any]:
    """The object in a JSON file of `most` bytes at most. Raises CutawayError as `parsed_object` does, with the path."""
    try:
        return parsed_object(read_bytes(path, most, piped=False))
    except Unreadable as error:
        raise CutawayError(f"{path} cannot be read as JSON: {error}.") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise Unreadable(f"{_short(next(key for key, count in counts.items() if count > 1))} is given twice")
    return found


@dataclass(frozen=True, eq=False)
class _NoNumber:
    """What stood in the place of a number."""

    told: str


def _name_of(wanted: _NoNumber, value: Any) -> str:
    """The last two keys under which it stands, in whatever lists; "it" where it stands under none."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while waiting:
        names, value = waiting.pop()
        if value is wanted:
            return " of ".join(map(_short, names)) or "it"
        if isinstance(value, dict):
            waiting += [((key, *names[:1]), inside) for key, inside in value.items()]
        elif isinstance(value, list):
            waiting += [(names, inside) for inside in value]
    return "it"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"
