"""From the last stream to one score per vocabulary entry (chapter 13)."""

from collections.abc import Sequence

from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Array, Engine
from cutaway.forward.norm import norm
from cutaway.forward.parameters import Parameters
from cutaway.points import Tap
from cutaway.spec import ModelSpec


def final_norm(engine: Engine, spec: ModelSpec, parameters: Parameters, x: Array, tap: Tap) -> Array:
    """The norm before the head, where the model has one."""
    if spec.final_norm is None or parameters.final_norm is None:
        return x
    return tap("final.norm", norm(engine, spec.final_norm, parameters.final_norm, x))


def logits(engine: Engine, parameters: Parameters, x: Array, layout: Layout, rows: Sequence[int]) -> Array:
    """x W_Uᵀ (+ b) of the rows asked for, `[len(rows), V]`; a row comes out the same whichever others are asked.

    With a tied head W_U is the embedding matrix: a logit is the dot product with a token's own vector
    (chapter 13.2).
    """
    return engine.linear(x[list(rows)], parameters.head, layout.only(rows))
