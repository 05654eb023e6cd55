"""What a model is, with no arrays."""

from cutaway.spec.attention import AttentionSpec, LatentSpec, QueryGrowth
from cutaway.spec.count import Count
from cutaway.spec.feedforward import ACTIVATIONS, Activation, ExpertsSpec, FeedForwardSpec, RouterSpec
from cutaway.spec.model import HeadTransformSpec, LayerSpec, ModelSpec, describe
from cutaway.spec.norm import NormSpec
from cutaway.spec.parameters import parameter_shapes
from cutaway.spec.positions import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    PositionsSpec,
    RotaryScaling,
    RotarySpec,
    YarnScaling,
)

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "AttentionSpec",
    "Count",
    "DynamicScaling",
    "ExpertsSpec",
    "FactorScaling",
    "FeedForwardSpec",
    "HeadTransformSpec",
    "LatentSpec",
    "LayerSpec",
    "LinearScaling",
    "Llama3Scaling",
    "ModelSpec",
    "NormSpec",
    "PositionsSpec",
    "QueryGrowth",
    "RotaryScaling",
    "RotarySpec",
    "RouterSpec",
    "YarnScaling",
    "describe",
    "parameter_shapes",
]
