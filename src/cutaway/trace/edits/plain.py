"""Edits out of plain data, `{"zero": "layers.3.attn.z", "heads": [5]}`; `Edit.to_json` writes it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from cutaway.errors import CutawayError
from cutaway.reading import Unreadable, parsed
from cutaway.trace.edits.adapting import Adapter
from cutaway.trace.edits.edit import Edit
from cutaway.trace.edits.kinds import KINDS
from cutaway.trace.edits.without import Without

ALL_KINDS: dict[str, type[Edit]] = {**KINDS, Without.kind: Without, Adapter.kind: Adapter}


def edit_from_json(data: Any) -> Edit:
    """The edit that plain data, or a line of JSON, describes. Raises CutawayError for what is none."""
    if isinstance(data, str):
        try:
            data = parsed(data)
        except Unreadable as error:
            raise CutawayError(
                f"The edit {data!r:.200} is no JSON ({error}); it looks like "
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
