"""A watched pass whose values stay connected, so that gradients can be followed back through it."""

from typing import Any

import numpy as np

from cutaway.engines.layout import Layout
from cutaway.errors import CutawayError
from cutaway.points import Tap
from cutaway.trace.connected import require_gradients
from cutaway.trace.edits.adapting import adapted
from cutaway.trace.edits.edited import Edited
from cutaway.trace.edits.editing import Editing
from cutaway.trace.finite import first_nonfinite
from cutaway.trace.gradients.edited_graph import EditedGraph
from cutaway.trace.gradients.graph import run_connected
from cutaway.trace.prompt import Prompt
from cutaway.trace.running import Machine, Watching, edits_around, rerun, unedited_run
from cutaway.trace.trace import Trace

# What a plain pass can be asked for and one with gradients cannot.
REFUSED = ("positions", "heads", "limit", "spill")


def connected(machine: Machine, prompt: Prompt, asked: Watching) -> Trace:
    """Run `prompt` with its graph: a trace that has `backward`, `grad` and `tensors`.

    Every value that the graph needs is held, as many again as the pass computes. With edits the graph is that of the
    edited run. Raises CutawayError for an engine without gradients, for what goes with a plain pass only (`REFUSED`),
    and as `Model.trace` does.
    """
    for name in REFUSED:
        if getattr(asked, name) is not None:
            raise CutawayError(f"With gradients=True the whole pass is kept as it is; {name} cannot be given as well.")
    engine = machine.engine
    require_gradients(engine)
    sequence = np.asarray(prompt.ids) if asked.vectors is None else asked.vectors
    length = len(sequence)
    editing = Editing(asked.edits, machine.spec, length, unedited=unedited_run(machine, prompt, asked))
    passes: list[EditedGraph] = []

    def around(tap: Tap, layout: Layout) -> Tap:
        passes.append(EditedGraph(editing, engine, layout, tap, range(length)))
        return passes[-1] if editing.edits else tap

    def count(*told: Any) -> None:
        passes[-1].count(*told)

    spec, parameters = editing.spec, adapted(machine.parameters, editing.edits)
    counted = adapted(machine.parameters, editing.edits, count)
    ran = run_connected(engine, spec, counted, sequence, asked.points, asked.types, editing.altered, around)
    for result in (ran.final, *([] if ran.logits is None else [ran.logits])):
        if not np.isfinite(result).all():
            where = first_nonfinite(
                engine, spec, parameters, sequence, asked.types, edits_around(engine, editing, length)
            )
            raise CutawayError(
                f"{spec.name} computes no usable numbers{' with these edits' * bool(editing.edits)}: {where}"
            )
    done = passes[-1].done
    editing.finish(done, length)
    last = None if ran.logits is None else ran.logits[-1]
    again = rerun(machine, prompt, asked, sequence, editing)
    trace = Trace(
        engine,
        spec,
        parameters,
        prompt,
        ran.plan,
        ran.layout,
        ran.values,
        last,
        piece=machine.piece,
        edited=Edited(machine.spec, done, last, again) if editing.edits else None,
    )
    return trace.connect(ran.graph)
