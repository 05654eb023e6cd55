"""One pass that is watched: the plan and its bill, the edits, the run, and the trace that it leaves."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Engine
from cutaway.errors import CutawayError
from cutaway.forward.cache import KVCache
from cutaway.forward.context import warn_beyond_context
from cutaway.forward.layers_shown import layers_shown
from cutaway.forward.parameters import Parameters
from cutaway.forward.transformer import transformer
from cutaway.points import Pattern, Point, Tap, shape_symbols
from cutaway.spec import ModelSpec
from cutaway.trace.capture.bill import Bill, bill
from cutaway.trace.capture.plan import Plan, make_plan
from cutaway.trace.capture.recorder import Cut, Recorder
from cutaway.trace.capture.spill import Spill
from cutaway.trace.edits.adapting import adapted
from cutaway.trace.edits.edit import Edit
from cutaway.trace.edits.edited import Edited
from cutaway.trace.edits.editing import Editing
from cutaway.trace.edits.selection import selection
from cutaway.trace.finite import first_nonfinite
from cutaway.trace.prompt import Prompt
from cutaway.trace.trace import Trace, rows_asked

Step = TypeVar("Step")
Points = Pattern | Iterable[Pattern] | None


@dataclass(frozen=True, eq=False)
class Watching:
    """What is asked of a watched pass; see `Model.trace`. `vectors` `[T, d]` stand in the place of the tokens."""

    points: Points = None
    positions: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    types: np.ndarray | None = None
    vectors: np.ndarray | None = None
    limit: int | None = None
    spill: str | Path | None = None
    edits: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        if self.limit is None:
            return
        if isinstance(self.limit, bool) or not isinstance(self.limit, Real) or not self.limit >= 0:
            raise CutawayError(f"limit is {self.limit!r}; it must be a number of bytes, as in 2_000_000_000.")


@dataclass(frozen=True, eq=False)
class Machine:
    """What passes run on."""

    engine: Engine
    spec: ModelSpec
    parameters: Parameters
    piece: Callable[[int], str] | None = field(default=None)

    @property
    def tokens_per_pass(self) -> int:
        """How many tokens of many texts it best computes together."""
        return getattr(self.engine, "tokens_per_pass", 2048)


def traced(
    machine: Machine,
    prompt: Prompt,
    asked: Watching,
    *,
    cache: KVCache | None = None,
    editing: Editing | None = None,
    prepared: tuple[Plan, Cut] | None = None,
    shown: bool = True,
) -> Trace:
    """Run `prompt`, after what `cache` holds, and keep what was asked for. Raises CutawayError as `Model.trace` does.

    `editing` are the edits of a generation, of which this pass is one step, `prepared` what it keeps.
    """
    engine, parameters = machine.engine, machine.parameters
    if editing is None:
        editing = Editing(asked.edits, machine.spec, len(prompt.ids), unedited=unedited_run(machine, prompt, asked))
    spec = editing.spec
    layout = Layout.of([len(prompt.ids)], None if cache is None else [cache.length])
    plan, cut = prepared if prepared is not None else planned(spec, asked, layout, editing)
    if prepared is None and asked.spill is None:
        past, dtype = layout.segments[0].position, value_type(engine)
        bill(plan, spec, layout.rows, cut, dtype, past=past, edited=editing.altered).refuse_over(asked.limit)
    spill = None if asked.spill is None else Spill(asked.spill)
    recorder = Recorder(engine, layout, plan.kept, spec=spec, reduced=plan.taken(spec), cut=cut, spill=spill)
    reads_logits = any(point.name == "logits" for point in (*plan.points, *(one.point for one in plan.reduced)))
    rows = editing.logit_rows(layout, all_rows=reads_logits)
    edited = editing.tap(engine, layout, recorder, layout.last_rows if rows is None else rows)
    watching: Tap = edited if editing.edits else recorder
    sequence = np.asarray(prompt.ids) if asked.vectors is None else asked.vectors
    caches = None if cache is None else [cache]
    counted = adapted(parameters, editing.edits, edited.count)
    parameters = adapted(parameters, editing.edits)  # for what is worked out later: it is no part of the pass
    with spill or nullcontext(), layers_shown(spec, watching) if shown else nullcontext(watching) as tap:
        ran = transformer(engine, spec, counted, [sequence], caches=caches, tap=tap, rows=rows, types=asked.types)
        recorder.finish()
        whole = sequence if cache is None else np.asarray(cache.ids)
        last = finite_results(engine, spec, parameters, ran, recorder, whole, asked.types, editing)
        editing.finish(edited.done, layout.segments[0].end)
    trace = Trace(
        engine,
        spec,
        parameters,
        prompt,
        plan,
        layout,
        recorder.kept,
        last,
        asked.positions,
        machine.piece,
        heads=cut.heads,
        cut=cut,
        edited=Edited(machine.spec, edited.done, last, rerun(machine, prompt, asked, whole, editing))
        if editing.edits
        else None,
        fused_layers=ran.fused,
    )
    # Taps refer to one another in a ring, which is found only now and then: what they hold would pile up.
    recorder.kept.clear()
    edited.known.clear()
    return trace


def planned(spec: ModelSpec, asked: Watching, layout: Layout, editing: Editing) -> tuple[Plan, Cut]:
    """What a pass of this layout keeps, and which part of each value."""
    rows = None if asked.positions is None else rows_asked(asked.positions, layout.rows)
    plan = make_plan(
        spec,
        asked.points,
        stored=layout.segments[0].position > 0,
        altered=editing.altered,
        some_rows=rows is not None,
        tokens=asked.vectors is None,
    )
    return plan, Cut(rows, heads_kept(asked.heads, plan, spec), plan.whole(spec))


def billed(machine: Machine, prompt: Prompt, asked: Watching) -> Bill:
    """What `traced` would keep; nothing runs."""
    editing = Editing(asked.edits, machine.spec, len(prompt.ids), unedited=lambda points: None)
    layout = Layout.of([len(prompt.ids)])
    plan, cut = planned(editing.spec, asked, layout, editing)
    return bill(plan, editing.spec, layout.rows, cut, value_type(machine.engine), edited=editing.altered)


def unedited_run(machine: Machine, prompt: Prompt, asked: Watching) -> Callable[[list[Point]], Trace]:
    """What runs the same prompt without edits, for those that take their values from there."""

    def run(points: list[Point]) -> Trace:
        return traced(machine, prompt, Watching(points, types=asked.types, vectors=asked.vectors))

    return run


def rerun(
    machine: Machine, prompt: Prompt, asked: Watching, whole: np.ndarray, editing: Editing
) -> Callable[[Sequence[Edit]], np.ndarray | None]:
    """The same text from its beginning under other edits: the last logits."""

    def run(edits: Sequence[Edit]) -> np.ndarray | None:
        told = prompt if asked.vectors is not None else Prompt(tuple(whole.tolist()), (), "")
        again = Watching((), types=asked.types, vectors=asked.vectors)
        base = unedited_run(machine, told, again)
        others = Editing(edits, machine.spec, editing.length, grows=editing.grows, unedited=base)
        with warnings.catch_warnings():  # the run itself has told what it had to tell
            warnings.simplefilter("ignore", UserWarning)
            return traced(machine, told, again, editing=others, shown=False).last_logits

    return run


def finite_results(
    engine: Engine,
    spec: ModelSpec,
    parameters: Parameters,
    ran: Any,
    recorder: Recorder,
    whole: np.ndarray,
    types: np.ndarray | None,
    editing: Editing,
) -> np.ndarray | None:
    """The last logits, once everything that a pass gives was found to be numbers. Raises CutawayError where not."""
    results = [engine.numpy(ran.final)]  # every row: with a window some reach no later one
    pooled = recorder.kept.get(Point("pooler.out"))
    if pooled is not None:
        results.append(engine.numpy(pooled))
    last = None if ran.logits is None else engine.numpy(ran.logits)[-1]
    if last is not None:
        results.append(last)
    if not all(np.isfinite(result).all() for result in results):
        where = first_nonfinite(engine, spec, parameters, whole, types, edits_around(engine, editing, len(whole)))
        raise CutawayError(
            f"{spec.name} computes no usable numbers{' with these edits' * bool(editing.edits)}: {where}"
        )
    return last


def edits_around(engine: Engine, editing: Editing, length: int) -> Callable[[Tap], Tap] | None:
    """What puts the edits of a run around a tap that looks at a pass over all of its text; None where it has none."""
    if not editing.edits:
        return None
    layout = Layout.of([length])
    return lambda tap: editing.tap(engine, layout, tap, layout.last_rows)


def heads_kept(heads: Any, plan: Plan, spec: ModelSpec) -> tuple[int, ...] | None:
    """The heads that were asked for. Raises CutawayError for one that is not there, and where no point has heads."""
    chosen = selection("heads", heads)
    fewest = min(layer.attention.n_heads for layer in spec.layers)
    for head in chosen or ():
        if head >= fewest:
            raise CutawayError(f"Head {head} was asked for; {spec.name} has heads 0 to {fewest - 1}.")
    named = [*plan.points, *(one.point for one in plan.reduced)]
    if chosen and named and not any({"H", "H_kv"} & set(point.info.shape) for point in named):
        first = named[0]
        others = "" if len(named) == 1 else f", and no other of the {len(named)} points that were asked for has any"
        raise CutawayError(
            f"{first} is [{', '.join(shape_symbols(first, spec))}] and has no heads to choose from{others}; "
            "leave heads out."
        )
    return chosen if chosen is None else tuple(chosen)


def value_type(engine: Engine) -> np.dtype:
    """The type in which values come out of an engine."""
    return engine.numpy(engine.empty((1,))).dtype


class Stepping:
    """A generation that is watched or edited: one pass a token, each step's rows only, from one cache.

    `ids` are those of the prompt. Raises CutawayError as `Editing` does, before anything runs.
    """

    def __init__(self, machine: Machine, ids: Sequence[int], asked: Watching, pieces: Callable[[Sequence[int]], Any]):
        self._machine, self._asked, self._pieces = machine, asked, pieces
        self._editing = Editing(asked.edits, machine.spec, len(ids), grows=True)
        self._cache = KVCache(self._editing.spec, machine.engine)
        make_plan(self._editing.spec, asked.points)  # an unknown point is told now
        self._later: tuple[Plan, Cut] | None = None

    def advance(self, pending: list[int]) -> tuple[np.ndarray, Trace]:
        """Run the ids that the cache does not hold yet: the logits of the next token `[V]`, and the pass's trace."""
        cache, spec = self._cache, self._editing.spec
        warn_beyond_context(spec, cache.length, cache.length + len(pending), stacklevel=2)
        first = cache.length == 0  # the pass over the prompt; later there is text on the terminal, and no bar
        due = cache.due(pending).tolist()
        prompt = Prompt(tuple(due), tuple(self._pieces(due)), "")
        prepared = None  # for the first pass it is made and billed; all later ones keep alike
        if cache.length > 0:
            layout = Layout.of([len(due)], [cache.length])
            prepared = self._later = self._later or planned(spec, self._asked, layout, self._editing)
        trace = traced(
            self._machine, prompt, self._asked, cache=cache, editing=self._editing, prepared=prepared, shown=first
        )
        return trace.last_logits, trace

    def room(self) -> int:
        """How many tokens fit into the arrays of the cache."""
        return self._cache.room

    def told(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps that `advance` makes; at their end it is told which edits never acted."""
        yield from steps
        self._editing.warn_unreached()
