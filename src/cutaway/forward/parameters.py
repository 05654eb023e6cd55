"""A model's weights as the stages use them: projections and gains, by the names of `spec.parameters`."""

from collections.abc import Mapping

import numpy as np

from cutaway.engines.protocol import Engine, Gain, Linear
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.spec import ModelSpec, parameter_shapes


class Parameters:
    """The weights of one model, checked against its spec, ready for one engine.

    `layers[i]` maps the names inside a block ("attn.q", "mlp.norm") to a `Linear`, a `Gain` or, for a router's
    correction, a vector. Matrices stay as they are stored; the short vectors (biases, gains) become the engine's
    own arrays. Raises CutawayError for a weight that is missing, unknown, of another shape, or (a vector) not
    finite.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Weight], engine: Engine) -> None:
        check_shapes(spec, weights)
        self.stored = dict(weights)
        parts = _assemble(self.stored, engine)
        gains = {name: part for name, part in parts.items() if isinstance(part, Gain)}
        linears = {name: part for name, part in parts.items() if isinstance(part, Linear)}
        self.embed_tokens: Weight = self.stored["embed.tokens"]
        self.embed_positions: Weight | None = self.stored.get("embed.positions")
        self.embed_types: Weight | None = self.stored.get("embed.types")
        self.embed_norm: Gain | None = gains.get("embed.norm")
        self.final_norm: Gain | None = gains.get("final.norm")
        self.pooler: Linear | None = linears.get("pooler")
        self.head_transform: Linear | None = linears.get("head.transform")
        self.head_norm: Gain | None = gains.get("head.norm")
        head_bias = _vector("head.bias", self.stored, engine)
        self.head = Linear(self.stored.get("head.weight", self.embed_tokens), head_bias)
        self.layers = [
            {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}
            for prefix in (f"layers.{i}." for i in range(spec.n_layers))
        ]

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


def _assemble(stored: dict[str, Weight], engine: Engine) -> dict[str, Linear | Gain | np.ndarray]:
    parts: dict[str, Linear | Gain | np.ndarray] = {}
    for name, weight in stored.items():
        owner, _, role = name.rpartition(".")
        if role == "weight":
            parts[owner] = Linear(weight, _vector(f"{owner}.bias", stored, engine))
        elif role == "gain":
            parts[owner] = Gain(_finite_vector(name, weight, engine), _vector(f"{owner}.bias", stored, engine))
        elif role == "correction":  # a router's bias, a vector on its own
            parts[name] = _finite_vector(name, stored[name], engine)
    return parts


def _vector(name: str, stored: dict[str, Weight], engine: Engine) -> np.ndarray | None:
    return _finite_vector(name, stored[name], engine) if name in stored else None


def _finite_vector(name: str, weight: Weight, engine: Engine) -> np.ndarray:
    values = weight.dequantise(engine.dtype)
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise CutawayError(f"{name} holds {values[bad]} at index {bad}; weights must be finite numbers.")
    return engine.array(values)
