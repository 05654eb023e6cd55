"""Small models of every kind of cache: keys and values, a sliding window, latents, angles that hang on the length."""

from dataclasses import replace

from cutaway.engines import make_engine
from cutaway.generate.passes import Passes
from cutaway.model import Model
from cutaway.spec import (
    AttentionSpec,
    DynamicScaling,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RotarySpec,
)
from random_models import GPT2, LLAMA, random_model, with_attention

ROTARY = RotarySpec(10_000.0, 4, "halves")
WINDOWED = with_attention(LLAMA, window=5)
DYNAMIC = with_attention(LLAMA, rotary=replace(ROTARY, scaling=DynamicScaling(2.0, 16)))
LATENT = ModelSpec(
    "small-latent",
    23,
    12,
    (
        LayerSpec(
            AttentionSpec(
                2,
                2,
                7,
                rotary=RotarySpec(1e4, 4, "adjacent"),
                latent=LatentSpec(6, None, 3, 4, NormSpec("rms", 1e-6)),
                d_value=3,
            ),
            FeedForwardSpec(20, "silu", gated=True),
            NormSpec("rms", 1e-6),
        ),
    )
    * 2,
)
SPECS = [GPT2, LLAMA, WINDOWED, LATENT, DYNAMIC]
ENGINES = [("numpy", "float64"), ("numpy", "float32"), ("cpu", "float32")]


def model_of(spec: ModelSpec, engine: str, dtype: str) -> Model:
    """A model with random weights on an engine of this name."""
    return random_model(spec, engine=make_engine(engine, dtype), dtype="float32")


def passes_of(model: Model) -> Passes:
    """Its passes, for caches of its own."""
    return Passes(model.engine, model.spec, model.parameters)
