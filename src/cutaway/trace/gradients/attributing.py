"""What gradients say of a change: how far each value of one pass, put into another, would move a number."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cutaway.errors import CutawayError
from cutaway.points import Point
from cutaway.trace.gradients.graph import Metric

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace


class Traces(Protocol):
    """What `attribution` asks of a model."""

    def trace(self, prompt: Any, points: Any = ..., *, gradients: bool = ...) -> "Trace": ...


def attribution(
    model: Traces, clean: Any, corrupt: Any, metric: Metric, points: Iterable[str | Point] | None = None
) -> dict[str, np.ndarray]:
    """How much each number at `points`, put from the `clean` pass into the `corrupt` one, would move the metric.

    To first order: (clean − corrupt) · gradient of the metric in the corrupt pass, for all points from two passes
    and one way back, where patching needs a pass for each (Nanda 2023, "attribution patching"). By address, arrays
    in the shape of the point; their sum over a head, a position, a whole point is the estimate for patching that.
    Exact where all that follows is linear. Raises CutawayError for prompts of unequal lengths.
    """
    target = model.trace(corrupt, points, gradients=True)
    source = model.trace(clean, points)
    if len(source.prompt.ids) != len(target.prompt.ids):
        raise CutawayError(
            f"The clean prompt has {len(source.prompt.ids)} tokens and the corrupt one {len(target.prompt.ids)}; "
            "they must have equally many, so that each number has its counterpart."
        )
    target.backward(metric)
    found = {}
    for address, slope in target.grad.items():
        with np.errstate(invalid="ignore"):  # −∞ − −∞ where both passes mask; the gradient is 0 there
            found[address] = np.where(slope == 0, 0, (source[address] - target[address]) * slope)
    return found
