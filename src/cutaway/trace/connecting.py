"""A watched pass whose values stay connected, so that gradients can be followed back through it."""

import numpy as np

from cutaway.errors import CutawayError
from cutaway.trace.finite import first_nonfinite
from cutaway.trace.gradients import run_connected
from cutaway.trace.running import Machine, Watching
from cutaway.trace.trace import Prompt, Trace

# What a plain pass can be asked for and one with gradients cannot.
REFUSED = ("positions", "heads", "edits", "vectors", "limit", "spill")


def connected(machine: Machine, prompt: Prompt, asked: Watching) -> Trace:
    """Run `prompt` with its graph: a trace that has `backward`, `grad` and `tensors`.

    Every value that the graph needs is held, as many again as the pass computes. Raises CutawayError for an engine
    without gradients, for what goes with a plain pass only (`REFUSED`), and as `Model.trace` does.
    """
    for name in REFUSED:
        if getattr(asked, name) is not None and not (name == "edits" and not asked.edits):
            what = "prompt of vectors" if name == "vectors" else name
            raise CutawayError(f"With gradients=True the whole pass is kept as it is; {what} cannot be given as well.")
    ids = np.asarray(prompt.ids)
    ran = run_connected(machine.engine, machine.spec, machine.parameters, ids, asked.points, asked.types)
    for result in (ran.final, *([] if ran.logits is None else [ran.logits])):
        if not np.isfinite(result).all():
            where = first_nonfinite(machine.engine, machine.spec, machine.parameters, ids, asked.types)
            raise CutawayError(f"{machine.spec.name} computes no usable numbers: {where}")
    trace = Trace(
        machine.engine,
        machine.spec,
        machine.parameters,
        prompt,
        ran.plan,
        ran.layout,
        ran.values,
        None if ran.logits is None else ran.logits[-1],
        piece=machine.piece,
    )
    return trace.connect(ran.graph)
