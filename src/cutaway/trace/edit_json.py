"""Edits as plain data and back, `{"zero": "layers.3.attn.z", "heads": [5]}`, and the short name a cache goes by."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from cutaway.errors import CutawayError
from cutaway.trace.adapting import Adapter
from cutaway.trace.edit_kinds import KINDS, Edit
from cutaway.trace.edit_sources import file_stamp, source_traces
from cutaway.trace.without import Without

ALL_KINDS: dict[str, type[Edit]] = {**KINDS, Without.kind: Without, Adapter.kind: Adapter}

_serials: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_next = itertools.count(1)


def edit_to_json(edit: Edit) -> dict[str, Any]:
    """An edit as plain data. Raises CutawayError for a function, or a source that is a trace in memory."""
    first, *others = [f.name for f in fields(edit)]  # type: ignore[arg-type]
    told = {edit.kind: _plain(edit, first)}
    for name in others:
        value = getattr(edit, name)
        if value is not None and not _is_default(edit, name, value):
            told[name] = _plain(edit, name)
    return told


def edit_from_json(data: Any) -> Edit:
    """The edit that plain data, or a line of JSON, describes. Raises CutawayError for what is none."""
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except json.JSONDecodeError as error:
            raise CutawayError(
                f"The edit {data!r} is no JSON ({error.msg} at character {error.pos}); it looks like "
                '{"zero": "layers.3.attn.z", "heads": [5]}.'
            ) from None
    if not isinstance(data, Mapping) or not data:
        raise CutawayError(f'An edit is written as {{"zero": "layers.3.attn.z", "heads": [5]}}; {data!r} is none.')
    kinds = [name for name in data if name in ALL_KINDS and name != "function"]
    kinds = [next(iter(data))] if next(iter(data)) in kinds else kinds[:1]  # "scale" is also a setting of "add"
    if not kinds:
        known = [name for name in ALL_KINDS if name != "function"]
        close = get_close_matches(str(next(iter(data))), known, n=1)
        hint = f"did you mean {close[0]!r}? The" if close else "the"
        if "function" in data:
            hint = "a Python function has no form in JSON. The"
        raise CutawayError(
            f"{json.dumps(dict(data), default=str)} names no kind of edit; {hint} kinds are {', '.join(known)}."
        )
    kind = ALL_KINDS[kinds[0]]
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    unknown = [name for name in data if name != kinds[0] and name not in names[1:]]
    if unknown:
        raise CutawayError(f"{kinds[0]!r} takes {', '.join(names[1:])}; {unknown[0]!r} is none of them.")
    settings = {name: value for name, value in data.items() if name != kinds[0]}
    try:
        return kind(**{names[0]: data[kinds[0]]}, **settings)
    except TypeError as error:
        missing = str(error).rpartition("argument: ")[2]
        raise CutawayError(f"The edit {kinds[0]!r} needs {missing}.") from None


def read_edits(edits: Any) -> tuple[Edit, ...]:
    """Edits in any of their forms: records, plain data, lines of JSON; one or several."""
    if isinstance(edits, Edit | Mapping | str):
        edits = (edits,)
    if not isinstance(edits, Iterable):
        raise CutawayError(f"edits is {edits!r}; it must be a list of edits.")
    return tuple(edit if isinstance(edit, Edit) else edit_from_json(edit) for edit in edits)


def edit_key(edit: Edit) -> str:
    """A digest of what an edit does. Traces in memory and functions count by identity, files by name, time and size."""
    told: list[Any] = [edit.kind]
    for setting in fields(edit):  # type: ignore[arg-type]
        value = getattr(edit, setting.name)
        told.append((setting.name, _told(value)))
        if isinstance(edit, Adapter) and setting.name == "source":
            told.append(edit.stamps)
        elif setting.name == "source" and isinstance(value, str | Path):
            told.append(file_stamp(value))
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def edits_key(edits: Iterable[Edit]) -> str:
    """A digest of several edits in their order; "" for none."""
    keys = [edit.key for edit in edits]
    return hashlib.sha256("".join(keys).encode()).hexdigest()[:16] if keys else ""


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
