"""A sweep as people ask for it: its settings, checked, and the results one by one or in files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from cutaway.errors import CutawayError
from cutaway.points import find_points
from cutaway.spec.check import is_whole
from cutaway.trace.capture.plan import listed, make_plan
from cutaway.trace.edits.adapting import ReadAdapter
from cutaway.trace.prompt import Prompt
from cutaway.trace.prompts import PromptLike
from cutaway.trace.running import Machine, Points, Watching, heads_kept
from cutaway.trace.sweep.files import write_sweep
from cutaway.trace.sweep.layout import Layout
from cutaway.trace.sweep.packing import Sweep
from cutaway.trace.sweep.prompts import prompts_of
from cutaway.trace.trace import Trace

Reduce = str | Callable[[Trace], Mapping[str, Any]] | None


class Sweeping(TypedDict, total=False):
    """What else may be said of a sweep; see `Model.sweep`."""

    positions: Sequence[int] | None
    heads: Sequence[int] | None
    edits: Any
    types: Any
    reduce: Reduce
    layout: str
    dtype: str | None
    tokens_per_pass: int
    shard_tokens: int
    limit: int | None


def sweep(
    machine: Machine,
    read: Callable[[PromptLike], Prompt],
    prompts: Any,
    points: Points,
    to: str | Path | None,
    settings: Sweeping,
    edits: Any,
) -> Any:
    """What `Model.sweep` gives: an iterator of results, or the folder that they were written to."""
    unknown = set(settings) - set(Sweeping.__annotations__)
    if unknown:
        raise CutawayError(f"A sweep knows no {min(unknown)!r}; it takes {', '.join(Sweeping.__annotations__)} and to.")
    reduce = settings.get("reduce")
    if isinstance(reduce, str):
        points = _with_reduction(points, reduce, machine)
    elif reduce is not None and not callable(reduce):
        raise CutawayError(f"reduce is {reduce!r}; it may be a reduction such as 'mean', or a function of a trace.")
    heads_kept(settings.get("heads"), make_plan(machine.spec, points), machine.spec)  # what is not there is told now
    asked = Watching(points, settings.get("positions"), settings.get("heads"), limit=settings.get("limit"), edits=edits)
    tokens = _at_least_one("tokens_per_pass", settings.get("tokens_per_pass", machine.tokens_per_pass))
    if any(isinstance(edit, ReadAdapter) and edit.on_experts for edit in edits):
        tokens = 1  # what an expert is sent has lost its place in the pass: each prompt alone, so that it is counted
    given = prompts_of(prompts, settings.get("types"))
    made = Sweep(machine, read, given, asked, reduce if callable(reduce) else None, tokens)
    if to is None:
        for name in ("layout", "dtype", "shard_tokens"):
            if settings.get(name) is not None:
                raise CutawayError(f"{name} is about files; say where they go with to='a folder', or leave it out.")
        return (result for _, _, result in made.results())
    shard_tokens = _at_least_one("shard_tokens", settings.get("shard_tokens", 16384))
    layout = Layout.read(settings.get("layout", "prompts"), settings.get("dtype"))
    return write_sweep(made, Path(to), layout, shard_tokens)


def _with_reduction(points: Points, reduce: str, machine: Machine) -> list[Any]:
    if points is None:
        raise CutawayError(f"Which points are to be reduced by {reduce!r}? Name them: points=['layers.*.resid_post'].")
    made: list[Any] = []
    for pattern in listed(points):
        if isinstance(pattern, str) and "|" in pattern:
            made.append(pattern)
        else:
            made += [f"{point} | {reduce}" for point in find_points([pattern], machine.spec)]
    return made


def _at_least_one(name: str, value: Any) -> int:
    if not is_whole(value) or value < 1:
        raise CutawayError(f"{name} is {value!r}; it must be a whole number, at least 1.")
    return int(value)
