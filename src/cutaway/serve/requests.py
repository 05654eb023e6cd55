"""What pages ask for, read and checked: every field known, of its kind and within bounds, or refused in a sentence."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cutaway.errors import CutawayError
from cutaway.points import Point, parse_point, points_of, shape_of
from cutaway.serve.look import Look
from cutaway.serve.protocol import Format
from cutaway.serve.runs import Run
from cutaway.spec import ModelSpec

MOST_CHARACTERS = 200_000  # of a prompt
MOST_SLICES = 64  # tensors in one request
MOST_CELLS = 4_194_304  # numbers in one slice
MOST_STEPS = 64  # tokens of one continuation


class TooLong(CutawayError):
    """A prompt that this server does not take."""


@dataclass(frozen=True)
class Slice:
    """A part of a tensor: which heads, rows and columns (half open), pooled to how many, in which format."""

    point: Point
    head: int | None
    rows: tuple[int, int]
    columns: tuple[int, int]
    most_rows: int
    most_columns: int
    format: Format


def fields(body: object, known: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a JSON object. Raises CutawayError for anything else, and for a field that nobody knows."""
    if not isinstance(body, dict):
        raise CutawayError(f"The request must be a JSON object with {', '.join(known)}.")
    unknown = [str(name)[:40] for name in body if name not in known]
    if unknown:
        raise CutawayError(
            f"The request has a field {unknown[0]!r}, which nothing reads; there are {', '.join(known)}."
        )
    return body


def prompt_of(body: dict[str, Any]) -> str | list[int]:
    """The prompt, as text or ids; exactly one of them."""
    text, ids = body.get("prompt"), body.get("ids")
    if (text is None) == (ids is None):
        raise CutawayError("Give a prompt or ids, one of the two.")
    if ids is not None:
        if not isinstance(ids, list) or not all(type(token) is int and abs(token) < 2**31 for token in ids):
            raise CutawayError("ids must be a list of whole numbers.")
        return ids
    if not isinstance(text, str):
        raise CutawayError("The prompt must be a text.")
    if len(text) > MOST_CHARACTERS:
        raise TooLong(f"The prompt has {len(text):,} characters; this page takes {MOST_CHARACTERS:,}.")
    return text


def run_named(name: object) -> str | None:
    """The id of the run that a prompt follows, where one is given; it need not be held any more."""
    if name is not None and (not isinstance(name, str) or len(name) > 40):
        raise CutawayError(f"after is {str(name)[:40]!r}; it must be the id of a run.")
    return name


def slice_of(body: object, run: Run) -> Slice:
    """One slice, checked against the shape that its tensor has in this run."""
    asked = fields(body, ("point", "head", "rows", "columns", "most_rows", "most_columns", "format"))
    point = point_of(asked.get("point"), run)
    heads, height, width = shape3(point, run)
    head = asked.get("head")
    if head is not None and not 0 <= whole(head, "head") < heads:
        raise CutawayError(f"{point} has heads 0 to {heads - 1}, not {head}.")
    form = asked.get("format", "u8")
    if form not in ("u8", "f32"):
        raise CutawayError(f"The format is {str(form)[:20]!r}; it must be 'u8' or 'f32'.")
    return Slice(
        point,
        head,
        _range(asked.get("rows"), height, "rows"),
        _range(asked.get("columns"), width, "columns"),
        _most(asked.get("most_rows"), "most_rows"),
        _most(asked.get("most_columns"), "most_columns"),
        form,
    )


def point_of(text: object, run: Run) -> Point:
    """The point at an address of the run's model."""
    if not isinstance(text, str) or len(text) > 200 or "*" in text:
        raise CutawayError(f"A point is an address such as 'layers.0.attn.pattern', not {str(text)[:80]!r}.")
    return _addresses(run.model.spec).get(text) or parse_point(text, run.model.spec)


@lru_cache(maxsize=8)
def _addresses(spec: ModelSpec) -> dict[str, Point]:
    """Every address of a model: looking one up in here is a thousand times as fast as matching patterns."""
    return {str(point): point for point in points_of(spec)}


def shape3(point: Point, run: Run | Look) -> tuple[int, int, int]:
    """The shape of a point in a run as heads, rows, columns: one head where it has none, one column for ids."""
    shape = shape_of(point, run.model.spec, run.length)
    if len(shape) == 1:
        return 1, shape[0], 1
    if len(shape) == 2:
        return 1, *shape
    if point.name == "moe.expert_out":  # [T, k, d]: each chosen one like a head
        return shape[1], shape[0], shape[2]
    return shape[0], shape[1], shape[2]


def number_or_none(body: dict[str, Any], name: str) -> float | None:
    """A field that is a number or null. Raises CutawayError for anything else; its bounds are the sampler's."""
    value = body[name]
    if value is not None and type(value) not in (int, float):
        raise CutawayError(f"{name} is {str(value)[:40]!r}; it must be a number.")
    if type(value) is int and abs(value) >= 2**63:
        raise CutawayError(f"{name} is too large a number.")
    return value


def whole(value: object, name: str, low: int = 0, high: int = 2**31) -> int:
    """A whole number of the request. Raises CutawayError for anything else."""
    if type(value) is not int or not low <= value <= high:
        raise CutawayError(f"{name} is {str(value)[:40]}; it must be a whole number from {low} to {high}.")
    return value


def _most(value: object, name: str) -> int:
    return 2048 if value is None else whole(value, name, 1, 65_536)


def _range(value: object, length: int, name: str) -> tuple[int, int]:
    if value is None:
        return 0, length
    if not isinstance(value, list) or len(value) != 2:
        raise CutawayError(f"{name} must be [first, stop].")
    first, stop = whole(value[0], name), whole(value[1], name)
    if not first < stop <= length:
        raise CutawayError(f"{name} are {first}:{stop}; there are 0:{length}.")
    return first, stop
