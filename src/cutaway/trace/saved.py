"""A trace that was saved, read back: the same addresses and numbers, without the model."""

import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cutaway.spec as specs
from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.errors import CutawayError
from cutaway.points import Point, parse_point
from cutaway.spec import ModelSpec
from cutaway.trace.plan import Plan, split_address
from cutaway.trace.recorder import Cut
from cutaway.trace.reductions import Reduced, parse_reduction
from cutaway.trace.trace import Prompt, Trace

FORMAT = "cutaway trace 1"
LAST_LOGITS = "last_logits"  # the tensor beside the points: of the last position, which no point may hold


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


def metadata_of(trace: Trace) -> dict[str, str]:
    """What stands in a saved trace beside its tensors."""
    prompt = {"ids": trace.prompt.ids, "pieces": trace.prompt.pieces, "text": trace.prompt.text}
    rest = {
        "added": trace.prompt.added,
        "past": trace.past,
        "rows": trace.rows.tolist(),
        "tokens": trace.past + len(trace.prompt.ids),
        "heads": trace.heads,
        "predicts": trace.predicts,
        "fused": sorted(trace.fused_layers),
        "edits": [str(report) for report in trace.edits],
        "next": [(token.id, token.text) for token in trace.likeliest(200)],
    }
    return {
        "format": FORMAT,
        "model": trace.spec.name,
        "engine": trace.engine,
        "dtype": trace.dtype,
        "prompt": json.dumps(prompt),
        "spec": json.dumps(spec_to_json(trace.spec)),
        "run": json.dumps(rest),
    }


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
        prompt, run = json.loads(told["prompt"]), json.loads(told["run"])
        spec = spec_from_json(json.loads(told["spec"]))
    except (KeyError, ValueError) as error:
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
