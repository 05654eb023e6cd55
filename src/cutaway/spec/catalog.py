"""Published configurations by name, so that a model can be read about and counted without its weights."""

from collections.abc import Callable
from difflib import get_close_matches

from cutaway.errors import CutawayError
from cutaway.spec.attention import AttentionSpec
from cutaway.spec.feedforward import Activation, FeedForwardSpec
from cutaway.spec.model import LayerSpec, ModelSpec
from cutaway.spec.norm import NormSpec
from cutaway.spec.positions import PositionsSpec, RotarySpec


def toy() -> ModelSpec:
    """The lecture's ten-token model of chapter 2: 2,286 parameters, no attention bias, no final norm."""
    layer = LayerSpec(
        AttentionSpec(n_heads=2, n_kv_heads=2, d_head=3),
        FeedForwardSpec(d_ff=24, activation="gelu", bias=True),
        NormSpec("layer", eps=1e-5, bias=True),
    )
    return ModelSpec("toy", 10, 6, (layer,) * 3, PositionsSpec("learned", 128), context_length=128)


def gpt2_like(
    name: str,
    *,
    vocab_size: int = 50257,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_max: int = 1024,
    d_ff: int | None = None,
    activation: Activation = "gelu_tanh",
    eps: float = 1e-5,
    tied_head: bool = True,
    scale: float | None = None,
) -> ModelSpec:
    """The GPT-2 shape: pre-LayerNorm, learned positions, biases everywhere (Radford et al. 2019)."""
    norm = NormSpec("layer", eps, bias=True)
    layer = LayerSpec(
        AttentionSpec(n_heads, n_heads, d_model // n_heads, qkv_bias=True, out_bias=True, scale=scale),
        FeedForwardSpec(d_ff or 4 * d_model, activation, bias=True),
        norm,
    )
    return ModelSpec(
        name,
        vocab_size,
        d_model,
        (layer,) * n_layers,
        PositionsSpec("learned", n_max),
        final_norm=norm,
        tied_head=tied_head,
        context_length=n_max,
    )


def llama_like(
    name: str,
    *,
    vocab_size: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    d_ff: int,
    d_head: int | None = None,
    eps: float = 1e-5,
    rope_base: float = 10_000.0,
    rope_dims: int | None = None,
    activation: Activation = "silu",
    tied_head: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    context_length: int | None = None,
) -> ModelSpec:
    """The Llama shape: pre-RMSNorm, rotary positions, grouped queries, a gated feed-forward (Touvron et al. 2023)."""
    d_head = d_head or d_model // n_heads
    norm = NormSpec("rms", eps)
    layer = LayerSpec(
        AttentionSpec(
            n_heads,
            n_kv_heads,
            d_head,
            rotary=RotarySpec(rope_base, rope_dims or d_head),
            qkv_bias=qkv_bias,
            out_bias=out_bias,
        ),
        FeedForwardSpec(d_ff, activation, gated=True, bias=mlp_bias),
        norm,
    )
    return ModelSpec(
        name,
        vocab_size,
        d_model,
        (layer,) * n_layers,
        final_norm=norm,
        tied_head=tied_head,
        context_length=context_length,
    )


def _gpt2(name: str, d_model: int, n_layers: int, n_heads: int) -> Callable[[], ModelSpec]:
    return lambda: gpt2_like(name, d_model=d_model, n_layers=n_layers, n_heads=n_heads)


CATALOG: dict[str, Callable[[], ModelSpec]] = {
    "toy": toy,
    "gpt2": _gpt2("gpt2", 768, 12, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 1024, 24, 16),
    "gpt2-large": _gpt2("gpt2-large", 1280, 36, 20),
    "gpt2-xl": _gpt2("gpt2-xl", 1600, 48, 25),
    "llama-2-7b": lambda: llama_like(
        "llama-2-7b",
        vocab_size=32000,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        d_ff=11008,
        context_length=4096,
    ),
    "llama-2-70b": lambda: llama_like(
        "llama-2-70b",
        vocab_size=32000,
        d_model=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        d_ff=28672,
        context_length=4096,
    ),
    "smollm2-135m": lambda: llama_like(
        "smollm2-135m",
        vocab_size=49152,
        d_model=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        d_ff=1536,
        rope_base=100_000.0,
        tied_head=True,
        context_length=8192,
    ),
}


def catalog_spec(name: str) -> ModelSpec:
    """The spec of a published model. Raises CutawayError, naming the closest known names, for any other."""
    if name not in CATALOG:
        close = get_close_matches(name, CATALOG, n=3) or list(CATALOG)
        raise CutawayError(f"No configuration named {name!r} is in the catalog; the closest are {', '.join(close)}.")
    return CATALOG[name]()
