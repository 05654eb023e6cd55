"""A model's weights as the stages use them: projections and gains, by the names of `spec.parameters`."""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import numpy as np

from cutaway.engines.protocol import Array, Engine, Gain, Linear, LowRank
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.forward.adapted import AdaptedParts, Added, by_layer
from cutaway.spec import ModelSpec, parameter_shapes


class Parts(dict[str, Any]):
    """Weights by name: a `Linear`, a `Gain`, or what stands on its own (an embedding, a router's correction).

    `prepared` is for the engine: what it has worked out for these weights, by keys of its own.
    """

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self.prepared: dict[Any, Any] = {}

    def through(self, stage: Callable[..., Array], *rest: Any) -> Array:
        """stage(these weights, …)"""
        return stage(self, *rest)


class Parameters:
    """The weights of one model, checked against its spec, ready for one engine.

    `layers[i]` maps the names inside a block ("attn.q", "mlp.norm") to a `Linear`, a `Gain` or, for a router's
    correction, a vector. Matrices stay as they are stored, and the short vectors (biases, gains) become the engine's
    own arrays; an engine that holds weights in a form of its own (`hold`) has them in `held`. `adapted_layers` are
    those to which something is added in this run. Raises CutawayError
    for a weight that is missing, unknown, of another shape, or (a vector) not finite.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight], engine: Engine) -> None:
        check_shapes(spec, weights)
        self.stored = dict(weights)
        hold = getattr(engine, "hold", None)
        self.held: Any = _assemble(self.stored, engine) if hold is None else hold(self.stored)
        if hold is not None:
            _check_vectors(self.stored, self.held, engine)
        self._added_to_head: tuple[LowRank, ...] = ()
        self.adapted_layers: frozenset[int] = frozenset()
        self.layers: list[Any] = [
            _inside(self.held, f"layers.{i}.") if hold is None else self.held[f"layers.{i}"]
            for i in range(spec.n_layers)
        ]

    def adapted(self, added: Added) -> "Parameters":
        """The same weights, with what is added to some projections in one run; these here stay as they are."""
        inside, outside = by_layer(added)
        made = copy(self)
        made.layers = [AdaptedParts(part, inside[i]) if i in inside else part for i, part in enumerate(self.layers)]
        made.held = AdaptedParts(self.held, outside) if outside else self.held
        made._added_to_head = tuple(outside.get("head", ()))
        made.adapted_layers = self.adapted_layers | inside.keys()
        return made

    # What stands outside the layers is looked up when it is used: an engine may have replaced it.

    @property
    def embed_tokens(self) -> Weight:
        return self.held["embed.tokens"]

    @property
    def embed_positions(self) -> Weight | None:
        return self.held.get("embed.positions")

    @property
    def embed_types(self) -> Weight | None:
        return self.held.get("embed.types")

    @property
    def embed_norm(self) -> Gain | None:
        return self.held.get("embed.norm")

    @property
    def final_norm(self) -> Gain | None:
        return self.held.get("final.norm")

    @property
    def pooler(self) -> Linear | None:
        return self.held.get("pooler")

    @property
    def head_transform(self) -> Linear | None:
        return self.held.get("head.transform")

    @property
    def head_norm(self) -> Gain | None:
        return self.held.get("head.norm")

    @property
    def head(self) -> Linear:
        """The projection to the vocabulary; tied, it is the embedding's own matrix."""
        own = self.held.get("head.weight")
        return Linear(self.embed_tokens if own is None else own, self.held.get("head.bias"), self._added_to_head)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in their stored form."""
        return sum(weight.nbytes for weight in self.stored.values())


def check_shapes(spec: ModelSpec, weights: Mapping[str, Weight]) -> None:
    """Refuse weights that are not exactly the ones that the spec implies."""
    expected = parameter_shapes(spec)
    missing = [name for name in expected if name not in weights]
    if missing:
        raise CutawayError(
            f"{_some(missing)} missing from the checkpoint of {spec.name}, which needs {len(expected)} tensors; "
            "the file is incomplete or made for another architecture."
        )
    extra = [name for name in weights if name not in expected]
    if extra:
        raise CutawayError(f"{_some(extra)} in the checkpoint, but {spec.name} has no use for it; nothing is ignored.")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise CutawayError(
                f"{name} has shape {list(weights[name].shape)} in the checkpoint; the configuration of "
                f"{spec.name} needs {list(shape)}."
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _assemble(stored: dict[str, Weight], engine: Engine) -> Parts:
    parts = Parts()
    for name, weight in stored.items():
        owner, _, role = name.rpartition(".")
        if name == "head.weight":
            parts[name] = weight
        elif role == "weight":
            parts[owner] = Linear(weight, _vector(f"{owner}.bias", stored, engine))
        elif role == "gain":
            parts[owner] = Gain(_finite_vector(name, weight, engine), _vector(f"{owner}.bias", stored, engine))
        elif role == "correction" or name == "head.bias":  # vectors on their own
            parts[name] = _finite_vector(name, weight, engine)
        elif role != "bias":  # a table whose rows are looked up
            parts[name] = weight
    return parts


def _inside(parts: Parts, prefix: str) -> Parts:
    return Parts((name.removeprefix(prefix), part) for name, part in parts.items() if name.startswith(prefix))


def _vector(name: str, stored: dict[str, Weight], engine: Engine) -> Array | None:
    return _finite_vector(name, stored[name], engine) if name in stored else None


def _finite_vector(name: str, weight: Weight, engine: Engine) -> Array:
    values = weight.dequantise(np.dtype(engine.dtype.name))
    _check_finite(name, values)
    return engine.array(values)


def _check_vectors(stored: Mapping[str, Weight], held: Any, engine: Engine) -> None:
    for name, weight in stored.items():
        if len(weight.shape) == 1:
            _check_finite(name, engine.numpy(held[name]))


def _check_finite(name: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise CutawayError(f"{name} holds {values[bad]} at index {bad}; weights must be finite numbers.")
