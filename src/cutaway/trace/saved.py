"""A trace that was saved, read back: the same addresses and numbers, without the model."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.errors import CutawayError
from cutaway.points import Point, parse_point
from cutaway.reading import Unreadable, parsed_object
from cutaway.spec import ModelSpec
from cutaway.spec.plain import spec_from_json
from cutaway.trace.capture.plan import Plan, split_address
from cutaway.trace.capture.recorder import Cut
from cutaway.trace.capture.reductions import Reduced, parse_reduction
from cutaway.trace.export import FORMAT, LAST_LOGITS
from cutaway.trace.prompt import Prompt
from cutaway.trace.trace import Trace


def open_trace(path: str | Path) -> Trace:
    """The trace that `Trace.save` wrote to `path`; its arrays are read when they are asked for.

    Gradients and other edits need the model, and are not there. Raises CutawayError for a file that is missing, cut
    off, or no saved trace.
    """
    from safetensors import SafetensorError, safe_open

    if not isinstance(path, str | os.PathLike) or path == "":
        raise CutawayError(f"A saved trace is opened by the name of its file; {path!r} is none.")
    if os.path.isdir(path):
        raise CutawayError(f"{path} is a folder; name the file in it that Trace.save wrote.")
    if not os.path.isfile(path):
        raise CutawayError(f"There is no file {path}.")
    try:
        file = safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CutawayError(
            f"{path} is no whole safetensors file ({error}); it may be cut off. Save the trace again."
        ) from None
    told = file.metadata() or {}
    if told.get("format") != FORMAT:
        raise CutawayError(f"{path} is a safetensors file, but no trace that this version of cutaway saved.")
    try:
        prompt, run = parsed_object(told["prompt"]), parsed_object(told["run"])
        spec = spec_from_json(parsed_object(told["spec"]))
    except (KeyError, ValueError, Unreadable) as error:
        raise CutawayError(f"{path} says it is a trace, but its description cannot be read ({error}).") from None
    return SavedTrace(file, spec, told, prompt, run)


class _Lazily(dict[Any, Any]):
    """Arrays of a file by address, each read when it is asked for."""

    def __init__(self, file: Any, addresses: dict[str, Point | Reduced]) -> None:
        super().__init__({at: address for address, at in addresses.items()})
        self._file = file

    def __getitem__(self, at: Any) -> np.ndarray:
        array: np.ndarray = self._file.get_tensor(super().__getitem__(at))
        return array


class SavedTrace(Trace):
    """A trace out of a file. What was derived when it was saved is stored there."""

    def __init__(self, file: Any, spec: ModelSpec, told: dict[str, str], prompt: Any, run: Any) -> None:
        names = [name for name in file.keys() if name != LAST_LOGITS]  # noqa: SIM118, a safetensors file is no dict
        addresses = _in_order(names, spec)
        points = tuple(at for at in addresses.values() if isinstance(at, Point))
        reduced = tuple(at for at in addresses.values() if isinstance(at, Reduced))
        plan = Plan(points, frozenset(points), True, reduced)
        rows, past, count = run["rows"], run["past"], len(prompt["ids"])
        pieces = {int(token): piece for token, piece in run["next"]}
        super().__init__(
            NumpyEngine(told["dtype"] if told["dtype"] in ("float32", "float64") else "float32"),
            spec,
            None,  # type: ignore[arg-type]  # nothing is worked out from weights
            Prompt(tuple(prompt["ids"]), tuple(prompt["pieces"]), run["added"], prompt["text"]),
            plan,
            Layout.of([count], [past]),
            {},
            file.get_tensor(LAST_LOGITS) if LAST_LOGITS in file.keys() else None,  # noqa: SIM118
            None if rows == list(range(count)) else rows,
            lambda token: pieces.get(token, f"<{token}>"),
            heads=run["heads"],
            cut=Cut(),
            fused_layers=run.get("fused", ()),
        )
        self._stored.kept = _Lazily(file, addresses)
        self.engine, self.dtype = told["engine"], told["dtype"]
        self.predicts = run["predicts"]
        self.told_edits: list[str] = run["edits"]


def _in_order(names: list[str], spec: ModelSpec) -> dict[str, Point | Reduced]:
    """The addresses of a file in the order of the pass, whole values before reduced ones."""
    from cutaway.points import all_points

    found: dict[str, Point | Reduced] = {}
    for name in names:
        address, how = split_address(name)
        point = parse_point(address, spec)
        found[name] = point if how is None else Reduced(point, parse_reduction(how))
    order = {point: index for index, point in enumerate(all_points(spec))}

    def place(item: tuple[str, Point | Reduced]) -> tuple[bool, int, str]:
        at = item[1]
        return isinstance(at, Reduced), order[at.point if isinstance(at, Reduced) else at], item[0]

    return dict(sorted(found.items(), key=place))
