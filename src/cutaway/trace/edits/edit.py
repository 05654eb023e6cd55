"""What all edits are: written down as plain data, and known by a short name that a cache can go by."""

import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from cutaway.errors import CutawayError
from cutaway.trace.edits.sources import file_stamp, source_traces

_serials: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_next = itertools.count(1)


class Edit:
    """What all edits have: equal where they do the same, with a `key` that a cache can go by."""

    kind: ClassVar[str]

    @property
    def key(self) -> str:
        """A short name of what this edit does, the same in every process where its values are plain numbers."""
        return _digest(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON, which `edit_from_json` reads. Raises CutawayError for what has no such form."""
        return _written(self)

    @property
    def source_stamp(self) -> Any:
        """What tells the file that its source names from the one that was there before; None where it names none."""
        source = getattr(self, "source", None)
        return file_stamp(source) if isinstance(source, str | Path) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edit) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def edits_key(edits: Iterable[Edit]) -> str:
    """A digest of several edits in their order; "" for none."""
    keys = [edit.key for edit in edits]
    return hashlib.sha256("".join(keys).encode()).hexdigest()[:16] if keys else ""


def _written(edit: Edit) -> dict[str, Any]:
    """An edit as plain data. Raises CutawayError for a function, or a source that is a trace in memory."""
    first, *others = [f.name for f in fields(edit)]  # type: ignore[arg-type]
    told = {edit.kind: _plain(edit, first)}
    for name in others:
        value = getattr(edit, name)
        if value is not None and not _is_default(edit, name, value):
            told[name] = _plain(edit, name)
    return told


def _digest(edit: Edit) -> str:
    """A digest of what an edit does. Traces in memory and functions count by identity, files by name, time and size."""
    told: list[Any] = [edit.kind]
    for setting in fields(edit):  # type: ignore[arg-type]
        value = getattr(edit, setting.name)
        told.append((setting.name, _told(value)))
        if setting.name == "source" and (stamp := edit.source_stamp) is not None:
            told.append(stamp)
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _plain(edit: Edit, name: str) -> Any:
    value = getattr(edit, name)
    if name == "at":
        return value[0] if len(value) == 1 else list(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if name == "source" and value is not None and not isinstance(value, str) and source_traces(value):
        raise CutawayError(
            f"The source of this {edit.kind} is a trace in memory; save it and give the name of its file, then the "
            "edit can be written down."
        )
    if callable(value):
        raise CutawayError("A Python function has no form in JSON; it lives in this process only.")
    return _lists(value)


def _is_default(edit: Edit, name: str, value: Any) -> bool:
    default = next(f.default for f in fields(edit) if f.name == name)  # type: ignore[arg-type]
    return type(value) is type(default) and bool(value == default)


def _lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_lists(one) for one in value] if isinstance(value, list | tuple) else value


def _told(value: Any) -> Any:
    """What stands for a value in a digest."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()]
    if isinstance(value, list | tuple):
        return [_told(one) for one in value]
    try:
        if value not in _serials:
            _serials[value] = next(_next)
        return f"{type(value).__name__} {_serials[value]} of this process"
    except TypeError:  # what cannot be held weakly: its own place in memory tells it apart while the edit lives
        return f"{type(value).__name__} at {id(value)}"
