"""From the last stream to one score per vocabulary entry (chapter 13), and to one vector for the whole text."""

from collections.abc import Sequence

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Ending, Engine
from cutaway.errors import CutawayError
from cutaway.forward.norm import norm
from cutaway.forward.parameters import Parameters
from cutaway.points import Tap
from cutaway.spec import ModelSpec


def ending(spec: ModelSpec, parameters: Parameters, layout: Layout, rows: Sequence[int], tap: Tap) -> Ending | None:
    """The last norm and the plain head, for an engine that can go on with them after its last layers.

    None where more has to be done, where somebody alters what lies between, or where not all rows are asked for.
    """
    if spec.headless or spec.head_transform is not None or spec.logit_cap is not None or "final.norm" in tap.altered:
        return None
    head = parameters.head
    if head.added or len(rows) != layout.rows:
        return None
    return Ending(spec.final_norm, parameters.final_norm, head)


def logits(
    engine: Engine, spec: ModelSpec, parameters: Parameters, x: Array, layout: Layout, rows: Sequence[int]
) -> Array:
    """x W_Uᵀ (+ b) of the rows asked for, `[len(rows), V]`; a row comes out the same whichever others are asked.

    x holds all rows of the layout, or just these.

    With a tied head W_U is the embedding matrix: a logit is the dot product with a token's own vector
    (chapter 13.2). Raises CutawayError for an encoder without a head.
    """
    if spec.headless:
        raise CutawayError(f"{spec.name} is an encoder without a head: it gives vectors, not logits.")
    asked = layout.only(rows)
    if len(x) != asked.rows:
        x = x[list(rows)]
    if spec.head_transform is not None and parameters.head_transform is not None:
        turned = engine.activate(engine.linear(x, parameters.head_transform, asked), spec.head_transform.activation)
        x = norm(engine, spec.head_transform.norm, parameters.head_norm, turned)
    scores = engine.linear(x, parameters.head, asked)
    return scores if spec.logit_cap is None else engine.cap(scores, spec.logit_cap)


def pooled(engine: Engine, parameters: Parameters, x: Array, layout: Layout) -> Array:
    """tanh(W x + b) of each sequence's first token: `[sequences, d]`. (BERT, Devlin et al. 2018)"""
    if parameters.pooler is None:
        raise CutawayError("This model has no pooler.")
    first = [segment.start for segment in layout.segments]
    return engine.activate(engine.linear(x[first], parameters.pooler, layout.only(first)), "tanh")
