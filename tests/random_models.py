"""Models of any shape with random weights, and the watchers that tests put around them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
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
from cutaway.points import POINTS, Point, points_of
from cutaway.spec import (
    ACTIVATIONS,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    HeadTransformSpec,
    LatentSpec,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    NormSpec,
    PositionsSpec,
    QueryGrowth,
    RotarySpec,
    RouterSpec,
    YarnScaling,
    parameter_shapes,
)
from cutaway.spec.catalog import gpt2_like, llama_like
from cutaway.text.tokenizer import Tokenizer
from cutaway.trace.capture.recorder import Recorder

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
Writes = Mapping[Point, Callable[[Any, int], Any]]  # what stands at a point, from a block and its first row
LIKE = {"gpt2": GPT2, "llama": LLAMA, "post-norm": POST}


def with_layers(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec with these fields of every layer changed."""
    return replace(spec, layers=tuple(replace(layer, **changes) for layer in spec.layers))


def with_attention(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec with these fields of every layer's attention changed."""
    return replace(spec, layers=tuple(replace(one, attention=replace(one.attention, **changes)) for one in spec.layers))


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


def spoilt_model(spec: ModelSpec, name: str, at: tuple[int, int], value: float = np.nan) -> Model:
    """A random model of whose weight `name` one number is `value`."""
    weights = random_weights(spec)
    numbers = np.array(weights[name].dequantise(np.float64))
    numbers[at] = value
    weights[name] = Weight.of(numbers)
    where = Location(Path("nowhere"), "folder", spec.name, "made up")
    return Model(Checkpoint(spec, weights, None, where), NumpyEngine("float64"))


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


class WritingTap:
    """A tap that puts `write[point](value, first row)` in the place of every value of these points."""

    def __init__(self, write: Writes, layer: int | None = None, seen: dict[Point, Any] | None = None) -> None:
        self.write, self.layer = write, layer
        self.seen: dict[Point, Any] = {} if seen is None else seen
        self.shown = frozenset(POINTS)
        self.altered = frozenset(point.name for point in write if point.layer == layer)

    def __call__(self, name: str, value: Any) -> Any:
        point = Point(name, self.layer)
        if point in self.write:
            value = self.write[point](value.copy(), 0)
        self.seen[point] = value
        return value

    def rows(self, name: str, value: Any, segment: int, start: int) -> Any:
        point = Point(name, self.layer)
        return self.write[point](value, start) if point in self.write else value

    def at(self, layer: int) -> "WritingTap":
        return WritingTap(self.write, layer, self.seen)


def by_hand(model: Model, ids: Iterable[int], write: Writes) -> tuple[np.ndarray, dict[Point, Any]]:
    """All logits (without a head: the last stream) of a pass that these functions write into, and what it showed."""
    tap, sequence = WritingTap(write), np.asarray(ids)
    ran = transformer(model.engine, model.spec, model.parameters, [sequence], tap=tap, rows=range(len(sequence)))
    return (ran.final if ran.logits is None else ran.logits), tap.seen


class NotingTap:
    """A tap that notes the order in which points are shown, each once."""

    shown = frozenset(POINTS)
    altered: frozenset[str] = frozenset()

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
        lambda kind, eps, learned: NormSpec(kind, eps, *learned),
        st.sampled_from(("layer", "rms")),
        st.sampled_from((1e-5, 1e-6)),
        st.sampled_from(((False, True), (True, True), (False, False))),
    )


@st.composite
def rotaries(draw: st.DrawFn, widest: int) -> RotarySpec:
    return RotarySpec(
        draw(st.sampled_from((100.0, 10_000.0))),
        2 * draw(st.integers(1, widest // 2)),
        draw(st.sampled_from(("halves", "adjacent"))),
        draw(st.sampled_from((None, None, LinearScaling(2.0), Llama3Scaling(4.0, 1.0, 4.0, 8), YarnScaling(4.0, 8)))),
    )


@st.composite
def attentions(draw: st.DrawFn, causal: bool) -> AttentionSpec:
    """Any attention: heads of any number and width, grouped, turned, normed, windowed, capped; one in five latent."""
    shared = {
        "causal": causal,
        "qkv_bias": draw(st.booleans()),
        "out_bias": draw(st.booleans()),
        "scale": draw(st.sampled_from((None, 0.3))),
        "window": draw(st.sampled_from((None, None, 1, 3))) if causal else None,
        "chunk": draw(st.sampled_from((None, None, 2))),
        "cap": draw(st.sampled_from((None, None, 2.0))),
        "growth": draw(st.sampled_from((None, None, QueryGrowth(2, 0.5)))),
    }
    n_kv_heads, d_head = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    if draw(st.integers(0, 4)) == 0:
        d_rope = 2 * draw(st.integers(1, 2))
        latent = LatentSpec(
            draw(st.integers(1, 6)), draw(st.sampled_from((None, 3))), d_head, d_rope, NormSpec("rms", 1e-6)
        )
        return AttentionSpec(
            n_kv_heads,
            n_kv_heads,
            d_head + d_rope,
            rotary=RotarySpec(10_000.0, d_rope, "adjacent"),
            latent=latent,
            d_value=draw(st.integers(1, 6)),
            **shared,
        )
    return AttentionSpec(
        n_kv_heads * draw(st.integers(1, 3)),
        n_kv_heads,
        d_head,
        rotary=draw(st.none() | rotaries(d_head)) if d_head > 1 else None,
        qk_norm=draw(st.none() | norms()),
        norm_after_rotary=draw(st.booleans()),
        **shared,
    )


@st.composite
def feed_forwards(draw: st.DrawFn, bias: bool | None = None) -> FeedForwardSpec:
    return FeedForwardSpec(
        draw(st.integers(1, 12)),
        draw(st.sampled_from(ACTIVATIONS)),  # type: ignore[arg-type]
        gated=draw(st.booleans()),
        bias=draw(st.booleans()) if bias is None else bias,
    )


@st.composite
def mixtures(draw: st.DrawFn) -> ExpertsSpec:
    groups = draw(st.integers(1, 2))
    n_experts = groups * draw(st.integers(2, 3))
    router = RouterSpec(
        draw(st.integers(1, n_experts // groups)),
        draw(st.sampled_from(("softmax", "sigmoid"))),
        renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from((1.0, 2.5))),
        n_groups=groups,
        correction=draw(st.booleans()),
        gate_input=draw(st.booleans()),
    )
    return ExpertsSpec(n_experts, draw(feed_forwards(bias=False)), router, draw(st.none() | feed_forwards(bias=False)))


@st.composite
def layers(draw: st.DrawFn, causal: bool) -> LayerSpec:
    """Any block that a spec can say."""
    parallel = draw(st.integers(0, 4)) == 0
    return LayerSpec(
        draw(attentions(causal)),
        draw(mixtures()) if draw(st.integers(0, 3)) == 0 else draw(feed_forwards()),
        draw(st.none() | norms()),
        "pre" if parallel else draw(st.sampled_from(("pre", "post"))),
        out_norm=draw(st.none() | st.none() | norms()),
        parallel=parallel,
        shared_norm=parallel and draw(st.booleans()),
    )


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
        token_types=draw(st.sampled_from((None, None, 2))),
        head_transform=draw(st.none() | st.builds(HeadTransformSpec, st.just("gelu"), norms())),
        pooler=draw(st.booleans()),
        logit_cap=draw(st.sampled_from((None, None, 3.0))),
    )
