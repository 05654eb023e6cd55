"""What a model *is*, without its numbers: frozen records that the forward pass, the loader and the counts read.

An architecture is data. Nothing outside `checkpoints/families` knows a model's name; a difference between two
models is a different value in one of these records, and a difference between two layers is a different row
of `ModelSpec.layers`.
"""

from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Literal

from cutaway.spec.attention import AttentionSpec
from cutaway.spec.check import require, require_positive
from cutaway.spec.count import Count
from cutaway.spec.feedforward import Activation, ExpertsSpec, FeedForwardSpec
from cutaway.spec.norm import NormSpec
from cutaway.spec.positions import PositionsSpec, RotarySpec

Placement = Literal["pre", "post"]


@dataclass(frozen=True)
class LayerSpec:
    """One block: attention, then feed-forward, each with a residual path and, mostly, a norm (chapter 12).

    `placement` "pre" norms what a sub-layer reads, x + f(norm x); "post" norms the sum, norm(x + f(x)).
    `out_norm` norms what a sub-layer gives before it is added, as well. `parallel` blocks add attention and
    feed-forward of the same x, x + a(x) + f(x); with `shared_norm` both read one norm of it.
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec | ExpertsSpec
    norm: NormSpec | None
    placement: Placement = "pre"
    out_norm: NormSpec | None = None
    parallel: bool = False
    shared_norm: bool = False

    def __post_init__(self) -> None:
        require(self.placement in ("pre", "post"), "norm placement", self.placement, "'pre' or 'post'")
        require(
            not self.parallel or self.placement == "pre", "norm placement", self.placement, "'pre' in a parallel block"
        )
        require(
            self.parallel or not self.shared_norm, "shared_norm", self.shared_norm, "false unless the block is parallel"
        )


@dataclass(frozen=True)
class HeadTransformSpec:
    """What stands between the stream and the vocabulary in a masked-language-model head: norm(φ(W x + b))."""

    activation: Activation
    norm: NormSpec


@dataclass(frozen=True)
class ModelSpec:
    """A whole model: embedding, positions, layers, final norm, head.

    `context_length` is the length that the model was made for, where its checkpoint states one; rotary and
    sinusoidal models run past it, learned positions cannot (`PositionsSpec.n_max`). `embed_scale`
    multiplies the token embeddings; `token_types` is the number of sentence kinds with a vector of their own. A
    tied head multiplies by the embedding matrix itself (chapter 13.2); a `headless` encoder has no logits. `pooler`
    is a tanh layer on the first token. `logit_cap` bends logits as `AttentionSpec.cap` bends scores.
    """

    name: str
    vocab_size: int
    d_model: int
    layers: tuple[LayerSpec, ...]
    positions: PositionsSpec | None = None
    embed_scale: float = 1.0
    embed_norm: NormSpec | None = None
    final_norm: NormSpec | None = None
    tied_head: bool = True
    head_bias: bool = False
    context_length: int | None = None
    token_types: int | None = None
    headless: bool = False
    head_transform: HeadTransformSpec | None = None
    pooler: bool = False
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        require_positive(self, "vocab_size", "d_model")
        require(len(self.layers) > 0, "number of layers", len(self.layers), "at least 1")
        if self.positions is not None and self.positions.kind == "sinusoidal":
            require(self.d_model % 2 == 0, "d_model", self.d_model, "even for sinusoidal positions")
        require(
            isfinite(self.embed_scale) and self.embed_scale != 0,
            "embed_scale",
            self.embed_scale,
            "a finite number other than 0",
        )
        require(
            self.context_length is None or self.context_length > 0,
            "context_length",
            self.context_length,
            "a positive number, or None where there is none",
        )
        require(self.logit_cap is None or self.logit_cap > 0, "logit_cap", self.logit_cap, "a positive number")

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def causal(self) -> bool:
        """Whether every layer hides the future: what a KV cache and generation need."""
        return all(layer.attention.causal for layer in self.layers)

    @property
    def n_max(self) -> int | None:
        """The longest input that can be computed at all; None where there is no such limit."""
        return self.positions.n_max if self.positions is not None and self.positions.kind == "learned" else None

    @property
    def rotaries(self) -> frozenset[RotarySpec]:
        """The rotations that occur, each once.

        Told apart by identity first: to hash the same one for every layer takes as long as a small kernel.
        """
        kinds = {id(kind): kind for layer in self.layers if (kind := layer.attention.rotary) is not None}
        return frozenset(kinds.values())

    def same_in_all_layers(self, path: str) -> object:
        """A value such as "attention.n_heads" where all layers agree on it, else None."""
        values = set()
        for layer in self.layers:
            value: object = layer
            for name in path.split("."):
                value = getattr(value, name, None)
            values.add(value)
        return values.pop() if len(values) == 1 else None

    def count(self) -> Count:
        """Parameters, bytes and work, derived from this spec alone."""
        return Count(self)


def describe(spec: ModelSpec) -> dict[str, object]:
    """The spec as plain data for JSON: one entry per field, equal layers told once with their range."""
    runs: list[dict[str, object]] = []
    for index, layer in enumerate(spec.layers):
        if runs and spec.layers[index - 1] == layer:
            runs[-1]["layers"] = f"{str(runs[-1]['layers']).split(':')[0]}:{index + 1}"
        else:
            runs.append({"layers": f"{index}:{index + 1}", **asdict(layer)})
    whole = asdict(spec)
    plain = {f.name: whole[f.name] for f in fields(spec) if f.name != "layers"}
    return {**plain, "n_layers": spec.n_layers, "layers": runs}
