"""Models of any shape with random weights, and the watchers that tests put around them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cutaway.checkpoints.load import Checkpoint
from cutaway.checkpoints.sources import Location
from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Linear
from cutaway.engines.weights import Weight
from cutaway.forward.parameters import Parameters
from cutaway.forward.transformer import transformer
from cutaway.model import Model
from cutaway.points import Point, points_of
from cutaway.spec import (
    ACTIVATIONS,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    PositionsSpec,
    RotarySpec,
    parameter_shapes,
)
from cutaway.spec.catalog import gpt2_like, llama_like
from cutaway.text.tokenizer import Tokenizer
from cutaway.trace.recorder import Recorder

GPT2 = gpt2_like("small-gpt2", vocab_size=23, d_model=12, n_layers=2, n_heads=3, n_max=200)
LLAMA = llama_like(
    "small-llama", vocab_size=23, d_model=12, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=20, d_head=6, tied_head=False
)
POST = ModelSpec(
    "small-post",
    23,
    12,
    (
        LayerSpec(
            AttentionSpec(3, 3, 4, causal=False, qkv_bias=True, out_bias=True),
            FeedForwardSpec(24, "gelu", bias=True),
            NormSpec("layer", 1e-12, bias=True),
            "post",
        ),
    )
    * 2,
    PositionsSpec("learned", 200),
    embed_norm=NormSpec("layer", 1e-12, bias=True),
    head_bias=True,
)
LIKE = {"gpt2": GPT2, "llama": LLAMA, "post-norm": POST}


def random_weights(spec: ModelSpec, seed: int = 0, dtype: str = "float64") -> dict[str, Weight]:
    """Weights of a size at which nothing saturates and every bias and gain is felt."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in parameter_shapes(spec).items():
        values = random.standard_normal(shape)
        if name.endswith("gain"):
            values = 1 + 0.2 * values
        elif len(shape) == 1:
            values = 0.3 * values
        elif not name.startswith("embed"):
            values = values / np.sqrt(shape[1])
        weights[name] = Weight.of(values.astype(dtype))
    return weights


def random_model(
    spec: ModelSpec, seed: int = 0, engine: Any = None, tokenizer: Tokenizer | None = None, dtype: str = "float64"
) -> Model:
    """A loaded model of this spec, as `cutaway.load` would return it."""
    location = Location(Path("nowhere"), "folder", spec.name, "made for a test")
    checkpoint = Checkpoint(spec, random_weights(spec, seed, dtype), tokenizer, location)
    return Model(checkpoint, engine or NumpyEngine("float64"))


def random_parameters(spec: ModelSpec, engine: Any, seed: int = 0) -> Parameters:
    return Parameters(spec, random_weights(spec, seed), engine)


def random_ids(spec: ModelSpec, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, spec.vocab_size, length)


def everything(engine: Any, spec: ModelSpec, parameters: Parameters, ids: Iterable[int]) -> dict[Point, np.ndarray]:
    """Every point of one pass, as the pass itself made it."""
    ids = np.asarray(ids)
    layout = Layout.of([len(ids)])
    recorder = Recorder(engine, layout, points_of(spec))
    transformer(engine, spec, parameters, [ids], tap=recorder, rows=range(len(ids)))
    return {point: value[0] if isinstance(value, dict) else value for point, value in recorder.kept.items()}


class CountingEngine(NumpyEngine):
    """The reference engine, which also notes every product with a weight: the weight and how many rows it met."""

    def __init__(self) -> None:
        super().__init__("float64")
        self.embedded: list[tuple[Weight, int]] = []
        self.multiplied: list[tuple[Weight, int]] = []

    def embed(self, weight: Weight, ids: np.ndarray) -> np.ndarray:
        self.embedded.append((weight, len(ids)))
        return super().embed(weight, ids)

    def linear(self, x: np.ndarray, linear: Linear, layout: Layout) -> np.ndarray:
        self.multiplied.append((linear.weight, len(x)))
        return super().linear(x, linear, layout)

    def rows_through(self, weight: Weight) -> list[int]:
        """How many rows each product with (or look-up in) this weight had, in order."""
        return [rows for seen, rows in (*self.multiplied, *self.embedded) if seen is weight]


class NotingTap:
    """A tap that notes the order in which points are shown, each once."""

    def __init__(self, layer: int | None = None, seen: list[Point] | None = None) -> None:
        self.layer = layer
        self.seen: list[Point] = [] if seen is None else seen

    def __call__(self, name: str, value: Any) -> Any:
        self._note(Point(name, self.layer))
        return value

    def rows(self, name: str, value: Any, segment: int, start: int) -> Any:
        self._note(Point(name, self.layer))
        return value

    def at(self, layer: int) -> "NotingTap":
        return NotingTap(layer, self.seen)

    def _note(self, point: Point) -> None:
        if point not in self.seen:
            self.seen.append(point)


def norms() -> st.SearchStrategy[NormSpec]:
    return st.builds(
        NormSpec, st.sampled_from(("layer", "rms")), st.sampled_from((1e-5, 1e-6, 1e-12)), bias=st.booleans()
    )


@st.composite
def layers(draw: st.DrawFn, causal: bool, rotary: bool | None = None) -> LayerSpec:
    """Any block that a spec can say."""
    d_head = draw(st.integers(1, 6))
    n_kv_heads = draw(st.integers(1, 3))
    turn = None
    if d_head >= 2 and (draw(st.booleans()) if rotary is None else rotary):
        turn = RotarySpec(
            draw(st.sampled_from((100.0, 10_000.0))),
            2 * draw(st.integers(1, d_head // 2)),
            draw(st.sampled_from(("halves", "adjacent"))),
        )
    attention = AttentionSpec(
        n_kv_heads * draw(st.integers(1, 3)),
        n_kv_heads,
        d_head,
        causal=causal,
        rotary=turn,
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        scale=draw(st.sampled_from((None, 0.3))),
    )
    feed_forward = FeedForwardSpec(
        draw(st.integers(1, 12)),
        draw(st.sampled_from(ACTIVATIONS)),  # type: ignore[arg-type]
        gated=draw(st.booleans()),
        bias=draw(st.booleans()),
    )
    return LayerSpec(attention, feed_forward, draw(st.none() | norms()), draw(st.sampled_from(("pre", "post"))))


@st.composite
def specs(draw: st.DrawFn, causal: bool | None = None) -> ModelSpec:
    """Any small model: its layers all alike or each its own."""
    causal = draw(st.booleans()) if causal is None else causal
    if draw(st.booleans()):
        blocks = tuple(draw(st.lists(layers(causal), min_size=1, max_size=3)))
    else:
        blocks = (draw(layers(causal)),) * draw(st.integers(1, 3))
    return ModelSpec(
        "drawn",
        draw(st.integers(2, 20)),
        2 * draw(st.integers(1, 5)),
        blocks,
        draw(st.sampled_from((None, PositionsSpec("learned", 100), PositionsSpec("sinusoidal")))),
        embed_scale=draw(st.sampled_from((1.0, 2.5))),
        embed_norm=draw(st.none() | norms()),
        final_norm=draw(st.none() | norms()),
        tied_head=draw(st.booleans()),
        head_bias=draw(st.booleans()),
    )
