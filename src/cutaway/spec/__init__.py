"""What a model is, with no arrays."""

from cutaway.spec.count import Count
from cutaway.spec.model import (
    ACTIVATIONS,
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    PositionsSpec,
    RotarySpec,
    describe,
)
from cutaway.spec.parameters import parameter_shapes

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "AttentionSpec",
    "Count",
    "FeedForwardSpec",
    "LayerSpec",
    "ModelSpec",
    "NormSpec",
    "PositionsSpec",
    "RotarySpec",
    "describe",
    "parameter_shapes",
]
