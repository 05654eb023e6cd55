"""Many prompts, one after another: packed several to a pass, each with the result that it has alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from cutaway.errors import CutawayError
from cutaway.forward.context import warn_beyond_context
from cutaway.points import find_points
from cutaway.progress import progress
from cutaway.trace.adapting import ReadAdapter
from cutaway.trace.bill import free_memory
from cutaway.trace.plan import listed, make_plan
from cutaway.trace.prompts import Fed, Given, PromptLike, fed
from cutaway.trace.running import Machine, Points, Watching, heads_kept
from cutaway.trace.sweep_pass import InPrompt, Packed
from cutaway.trace.sweep_prompts import SweepPrompts, prompts_of
from cutaway.trace.trace import Prompt, Trace, is_whole

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


@dataclass(frozen=True, eq=False)
class Sweep:
    """What a sweep runs. `read` makes a prompt of what was given; `reduce` makes a result of a trace."""

    machine: Machine
    read: Callable[[PromptLike], Prompt]
    prompts: SweepPrompts
    asked: Watching
    reduce: Callable[[Trace], Mapping[str, Any]] | None
    tokens_per_pass: int

    def results(self, skipped: int = 0) -> Iterator[tuple[Given, Prompt, Any]]:
        """What was given, what was run for it, and its trace, or what `reduce` made of it; in the order of the prompts.

        The first `skipped` prompts are left out. A bar shows how many are done.
        """
        with progress("Sweeping", self.prompts.count(), "prompts", after=1.0) as advance:
            advance(skipped)
            packed = Packed(self.machine, self.asked)
            for first, given, prompts in self._packs(packed, skipped):
                traces = _traces(packed, first, prompts)[::-1]
                for index, (raw, prompt) in enumerate(zip(given, prompts, strict=True)):
                    trace = traces.pop()  # so that it can go before the pack does
                    result = trace if self.reduce is None else _reduced(self.reduce, trace, first + index)
                    del trace
                    yield raw, prompt.prompt, result
                    del result
                    advance(1)

    def told(self, given: Given) -> Fed:
        """What is run for what was given. Raises CutawayError for what cannot be."""
        return fed(given, self.machine.spec, self.read)

    def _packs(self, packed: Packed, skipped: int) -> Iterator[tuple[int, list[Given], list[Fed]]]:
        """As many prompts at a time as fit into a pass and, with what they keep, into a quarter of the free memory.

        Prompts given as vectors share passes with one another only.
        """
        free = free_memory()
        room = self.asked.limit if self.asked.limit is not None else None if free is None else free // 4
        given: list[Given] = []
        prompts: list[Fed] = []
        first, tokens, kept = skipped, 0, 0
        for index, raw in enumerate(self.prompts.after(skipped), skipped):
            try:
                prompt = self.told(raw)
                cost = packed.bytes(prompt)
            except CutawayError as error:
                raise CutawayError(f"Prompt {index}: {error}") from None
            length = len(prompt.sequence)
            warn_beyond_context(self.machine.spec, 0, length)
            over = tokens + length > self.tokens_per_pass or (room is not None and kept + cost > room)
            if prompts and (over or (prompt.vectors is None) != (prompts[0].vectors is None)):
                yield first, given, prompts
                given, prompts, first, tokens, kept = [], [], index, 0, 0
            given.append(raw)
            prompts.append(prompt)
            tokens, kept = tokens + length, kept + cost
        if prompts:
            yield first, given, prompts


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
    from cutaway.trace.sweep_files import write_sweep
    from cutaway.trace.sweep_layout import Layout

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


def _reduced(reduce: Callable[[Trace], Mapping[str, Any]], trace: Trace, index: int) -> dict[str, np.ndarray]:
    made = reduce(trace)
    if not isinstance(made, Mapping):
        raise CutawayError(
            f"Prompt {index}: the function given as reduce returned {type(made).__name__}; it must return a dict of "
            "names and numbers or arrays."
        )
    return {str(name): np.asarray(value) for name, value in made.items()}


def _traces(packed: Packed, first: int, prompts: list[Fed]) -> list[Trace]:
    """One pass; an error about one of its prompts names the place in the whole sweep."""
    try:
        return packed.run(prompts)
    except InPrompt as error:
        raise CutawayError(f"Prompt {first + error.index}: {error.why}") from None


def _at_least_one(name: str, value: Any) -> int:
    if not is_whole(value) or value < 1:
        raise CutawayError(f"{name} is {value!r}; it must be a whole number, at least 1.")
    return int(value)
