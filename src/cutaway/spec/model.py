"""What a model *is*, without its numbers: frozen descriptions that the forward pass, the loader and the counts read.

An architecture is data. Nothing outside `checkpoints/families` knows a model's name; a difference between two
models is a different value in one of these records, and a difference between two layers is a different row
of `ModelSpec.layers`.
"""

from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import TYPE_CHECKING, Literal, get_args

from cutaway.errors import CutawayError

if TYPE_CHECKING:
    from cutaway.spec.count import Count

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
Placement = Literal["pre", "post"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


@dataclass(frozen=True)
class NormSpec:
    """How a row is brought back to a standard size (chapter 12.2)."""

    kind: Literal["layer", "rms"]
    eps: float
    bias: bool = False

    def __post_init__(self) -> None:
        require(self.kind in ("layer", "rms"), "kind of norm", self.kind, "'layer' or 'rms'")
        require(isfinite(self.eps) and self.eps >= 0, "eps of a norm", self.eps, "a small number, 0 or more")


@dataclass(frozen=True)
class RotarySpec:
    """Rotary positions: pairs of coordinates of q and k turned by position · base^(−2i/dims) (chapter 10.4).

    `dims` of the d_head coordinates turn. `pairing` "halves" pairs coordinate i with i + dims/2 (the layout of
    Hugging Face checkpoints), "adjacent" pairs 2i with 2i + 1 (the paper's).
    """

    base: float
    dims: int
    pairing: Literal["halves", "adjacent"] = "halves"

    def __post_init__(self) -> None:
        require(isfinite(self.base) and self.base > 0, "rotary base", self.base, "a positive number")
        require(self.dims > 0 and self.dims % 2 == 0, "rotary dims", self.dims, "a positive even number")
        require(self.pairing in ("halves", "adjacent"), "rotary pairing", self.pairing, "'halves' or 'adjacent'")


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head attention (chapters 7 to 9); fewer key/value heads than query heads make it grouped or multi-query.

    `causal` hides the future (chapter 8). `scale` multiplies q·k; where it is not given it is 1/√d_head.
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    causal: bool = True
    rotary: RotarySpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("n_heads", "n_kv_heads", "d_head"):
            require(getattr(self, name) > 0, name, getattr(self, name), "a positive number")
        require(
            self.n_heads % self.n_kv_heads == 0,
            "n_kv_heads",
            self.n_kv_heads,
            f"a divisor of n_heads = {self.n_heads}, so that every key head serves as many query heads",
        )
        if self.rotary is not None:
            require(
                self.rotary.dims <= self.d_head,
                "rotary dims",
                self.rotary.dims,
                f"at most d_head = {self.d_head}",
            )
        if self.scale is not None:
            require(isfinite(self.scale) and self.scale > 0, "attention scale", self.scale, "a positive number")

    @property
    def score_scale(self) -> float:
        return self.d_head**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class FeedForwardSpec:
    """The feed-forward network (chapter 11): down(φ(up x)), or down(φ(gate x) · up x) where `gated` (SwiGLU, GeGLU)."""

    d_ff: int
    activation: Activation
    gated: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        require(self.d_ff > 0, "d_ff", self.d_ff, "a positive number")
        require(self.activation in ACTIVATIONS, "activation", self.activation, f"one of {', '.join(ACTIVATIONS)}")


@dataclass(frozen=True)
class LayerSpec:
    """One block: attention, then feed-forward, each with a residual path and, mostly, a norm (chapter 12).

    `placement` "pre" norms what a sub-layer reads, x + f(norm x); "post" norms the sum, norm(x + f(x)).
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec | None
    placement: Placement = "pre"

    def __post_init__(self) -> None:
        require(self.placement in ("pre", "post"), "norm placement", self.placement, "'pre' or 'post'")


@dataclass(frozen=True)
class PositionsSpec:
    """Positions added to the embedding (chapter 10.4): a learned table of `n_max` rows, or sines and cosines."""

    kind: Literal["learned", "sinusoidal"]
    n_max: int | None = None

    def __post_init__(self) -> None:
        require(
            self.kind in ("learned", "sinusoidal"),
            "kind of positions",
            self.kind,
            "'learned' or 'sinusoidal'",
        )
        if self.kind == "learned":
            require((self.n_max or 0) > 0, "n_max of learned positions", self.n_max, "a positive number")


@dataclass(frozen=True)
class ModelSpec:
    """A whole model: embedding, positions, layers, final norm, head.

    `context_length` is the length that the model was made for, where its checkpoint states one; rotary and
    sinusoidal models run past it, learned positions cannot (`PositionsSpec.n_max`). `embed_scale`
    multiplies the token embeddings. A tied head multiplies by the embedding matrix itself (chapter 13.2).
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

    def __post_init__(self) -> None:
        require(self.vocab_size > 0, "vocab_size", self.vocab_size, "a positive number")
        require(self.d_model > 0, "d_model", self.d_model, "a positive number")
        require(len(self.layers) > 0, "number of layers", len(self.layers), "at least 1")
        if self.positions is not None and self.positions.kind == "sinusoidal":
            require(self.d_model % 2 == 0, "d_model", self.d_model, "even for sinusoidal positions")

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

    def same_in_all_layers(self, path: str) -> object:
        """A value such as "attention.n_heads" where all layers agree on it, else None."""
        values = set()
        for layer in self.layers:
            value: object = layer
            for name in path.split("."):
                value = getattr(value, name)
            values.add(value)
        return values.pop() if len(values) == 1 else None

    def count(self) -> "Count":
        """Parameters, bytes and work, derived from this spec alone."""
        from cutaway.spec.count import Count

        return Count(self)


def require(holds: bool, what: str, value: object, right: str) -> None:
    """Refuse a value of a spec with a sentence."""
    if not holds:
        raise CutawayError(f"The {what} is {value!r}; it must be {right}.")


def describe(spec: ModelSpec) -> dict[str, object]:
    """The spec as plain data for JSON: one entry per field, equal layers told once with their range."""
    runs: list[dict[str, object]] = []
    for index, layer in enumerate(spec.layers):
        if runs and spec.layers[index - 1] == layer:
            runs[-1]["layers"] = f"{str(runs[-1]['layers']).split(':')[0]}:{index + 1}"
        else:
            runs.append({"layers": f"{index}:{index + 1}", **asdict(layer)})
    plain = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name != "layers"}
    plain |= {k: asdict(plain[k]) for k in ("positions", "embed_norm", "final_norm") if plain[k] is not None}
    return {**plain, "n_layers": spec.n_layers, "layers": runs}
