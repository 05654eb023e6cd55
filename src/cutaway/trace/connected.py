"""What a trace offers of gradients: the way back from a number that was made from its values."""

from typing import TYPE_CHECKING, Any, Self

from cutaway.engines.protocol import Engine
from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from cutaway.trace.gradients.graph import Gradients, Graph, Metric, Tensors


def require_gradients(engine: Engine) -> None:
    """Raise CutawayError for an engine that keeps no gradients."""
    if not getattr(engine, "differentiable", False):
        raise CutawayError(
            f'The {engine.name} engine keeps no gradients. Load the model with engine="torch" '
            '(`pip install "cutaway[torch]"`) and trace with gradients=True.'
        )


class Connected:
    """What a trace offers of gradients; it has them where its pass was run with gradients=True."""

    _engine: Engine
    _graph: "Graph | None" = None

    def connect(self, graph: "Graph") -> Self:
        """This trace, with the graph of its pass."""
        self._graph = graph
        return self

    def backward(self, metric: "Metric | Any") -> None:
        """Work out `grad`: how fast `metric` grows with every number of the points that this trace kept.

        `metric` is one number: a function of `tensors`, as in `lambda run: run.logits[-1, 7]`, or a tensor made
        from them. Another call replaces `grad`. Raises CutawayError for what is no such number, and where the pass
        was not run with gradients=True on the torch engine.
        """
        self._connection().backward(metric)

    @property
    def grad(self) -> "Gradients":
        """The gradients of the metric of the last `backward`, by address, shaped like the values."""
        found = self._connection().grad
        if found is None:
            raise CutawayError("There are no gradients yet; say of what: run.backward(lambda run: run.logits[-1, 7]).")
        return found

    @property
    def tensors(self) -> "Tensors":
        """The values as torch tensors that remember how they were made, to compute a metric from."""
        return self._connection().tensors

    def _connection(self) -> "Graph":
        if self._graph is None:
            require_gradients(self._engine)
            raise CutawayError("This pass kept no gradients; run model.trace(prompt, points, gradients=True).")
        return self._graph
