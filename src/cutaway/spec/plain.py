"""A spec as plain data, and back: how a file holds one."""

from dataclasses import fields, is_dataclass
from typing import Any

import cutaway.spec as specs
from cutaway.errors import CutawayError


def spec_to_json(spec: Any) -> Any:
    """A spec as plain data: every record an object with the name of its kind."""
    if is_dataclass(spec) and not isinstance(spec, type):
        return {"record": type(spec).__name__, **{f.name: spec_to_json(getattr(spec, f.name)) for f in fields(spec)}}
    return [spec_to_json(one) for one in spec] if isinstance(spec, tuple) else spec


def spec_from_json(data: Any) -> Any:
    """The spec that `spec_to_json` wrote. Raises CutawayError for a record that this version does not know."""
    if isinstance(data, list):
        return tuple(spec_from_json(one) for one in data)
    if not isinstance(data, dict):
        return data
    kind = getattr(specs, str(data.get("record")), None)
    if not is_dataclass(kind) or not isinstance(kind, type):
        raise CutawayError(f"The file describes a {data.get('record')!r}, which this version of cutaway does not know.")
    try:
        return kind(**{name: spec_from_json(value) for name, value in data.items() if name != "record"})
    except TypeError as error:
        raise CutawayError(f"The file's {data['record']} is of another version of cutaway: {error}.") from None
