"""Published configurations by name, so that a model can be read about and counted without its weights."""

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from cutaway.errors import CutawayError
from cutaway.spec.attention import AttentionSpec, LatentSpec, QueryGrowth
from cutaway.spec.builders import alternately_banded, gpt2_like, llama_like
from cutaway.spec.feedforward import ExpertsSpec, FeedForwardSpec, RouterSpec
from cutaway.spec.model import LayerSpec, ModelSpec
from cutaway.spec.norm import NormSpec
from cutaway.spec.positions import Llama3Scaling, PositionsSpec, RotarySpec, YarnScaling

Recipe = Callable[[], ModelSpec]


def toy() -> ModelSpec:
    """The lecture's ten-token model of chapter 2: 2,286 parameters, no attention bias, no final norm."""
    layer = LayerSpec(
        AttentionSpec(n_heads=2, n_kv_heads=2, d_head=3),
        FeedForwardSpec(d_ff=24, activation="gelu", bias=True),
        NormSpec("layer", eps=1e-5, bias=True),
    )
    return ModelSpec("toy", 10, 6, (layer,) * 3, PositionsSpec("learned", 128), context_length=128)


def gpt3(name: str = "gpt3-175b", band: int | None = None) -> ModelSpec:
    """GPT-3 (Brown et al. 2020, table 2.1). With `band`, odd layers see only that many tokens back.

    The paper says that dense and locally banded layers alternate, but not how wide the band is; without a
    number all layers are dense. It changes no parameter.
    """
    spec = gpt2_like(name, d_model=12288, n_layers=96, n_heads=96, n_max=2048)
    return spec if band is None else alternately_banded(spec, band)


def mixtral() -> ModelSpec:
    """Mixtral 8x7B (Jiang et al. 2024)."""
    spec = llama_like(
        "mixtral-8x7b",
        vocab_size=32000,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        d_ff=14336,
        rope_base=1e6,
        context_length=32768,
    )
    mixture = ExpertsSpec(8, FeedForwardSpec(14336, "silu", gated=True), RouterSpec(n_active=2))
    return replace(spec, layers=tuple(replace(layer, feed_forward=mixture) for layer in spec.layers))


def qwen3(name: str, experts: ExpertsSpec | None = None, **sizes: Any) -> ModelSpec:
    """Qwen3: the Llama shape with each head's queries and keys normed before they turn (Yang et al. 2025)."""
    shared: dict[str, Any] = {
        "vocab_size": 151936,
        "d_head": 128,
        "eps": 1e-6,
        "rope_base": 1e6,
        "context_length": 40960,
    }
    spec = llama_like(name, qk_norm=NormSpec("rms", 1e-6), **shared, **sizes)
    if experts is None:
        return spec
    return replace(spec, layers=tuple(replace(layer, feed_forward=experts) for layer in spec.layers))


def deepseek_v3() -> ModelSpec:
    """DeepSeek-V3 (arXiv:2412.19437): latent attention, 256 experts of which 8 and a shared one work per token."""
    norm = NormSpec("rms", 1e-6)
    attention = AttentionSpec(
        n_heads=128,
        n_kv_heads=128,
        d_head=192,
        d_value=128,
        scale=192**-0.5 * YarnScaling.growth(40.0) ** 2,
        rotary=RotarySpec(10_000.0, 64, "adjacent", YarnScaling(40.0, 4096)),
        latent=LatentSpec(kv_rank=512, q_rank=1536, d_nope=128, d_rope=64, norm=norm),
    )
    dense = LayerSpec(attention, FeedForwardSpec(18432, "silu", gated=True), norm)
    expert = FeedForwardSpec(2048, "silu", gated=True)
    router = RouterSpec(8, "sigmoid", scale=2.5, n_groups=8, top_groups=4, correction=True)
    sparse = replace(dense, feed_forward=ExpertsSpec(256, expert, router, shared=expert))
    layers = (dense,) * 3 + (sparse,) * 58
    return ModelSpec("deepseek-v3", 129280, 7168, layers, final_norm=norm, tied_head=False, context_length=163840)


def llama4(name: str, *, n_experts: int, every: int, qk_norm: bool, context_length: int) -> ModelSpec:
    """Llama 4, text part: chunked rotary layers, every fourth layer without positions, one expert and a shared one.

    Experts stand in every `every`-th layer, the others are dense and twice as wide.
    """
    norm = NormSpec("rms", 1e-5)
    scaling = Llama3Scaling(16.0, 1.0, 1.0, 8192) if qk_norm else None
    near = AttentionSpec(
        n_heads=40,
        n_kv_heads=8,
        d_head=128,
        rotary=RotarySpec(500_000.0, 128, "adjacent", scaling),
        chunk=8192,
        qk_norm=NormSpec("rms", 1e-5, gain=False) if qk_norm else None,
        norm_after_rotary=qk_norm,
    )
    far = AttentionSpec(n_heads=40, n_kv_heads=8, d_head=128, growth=QueryGrowth(8192, 0.1))
    expert = FeedForwardSpec(8192, "silu", gated=True)
    mixture = ExpertsSpec(
        n_experts, expert, RouterSpec(1, "sigmoid", renormalise=False, gate_input=True), shared=expert
    )
    layers = tuple(
        LayerSpec(
            far if (i + 1) % 4 == 0 else near,
            mixture if (i + 1) % every == 0 else FeedForwardSpec(16384, "silu", gated=True),
            norm,
        )
        for i in range(48)
    )
    return ModelSpec(name, 202048, 5120, layers, final_norm=norm, tied_head=False, context_length=context_length)


def bert_base() -> ModelSpec:
    """BERT base, uncased: an encoder with token types and a pooler, without its masked-LM head (Devlin et al. 2018)."""
    norm = NormSpec("layer", 1e-12, bias=True)
    layer = LayerSpec(
        AttentionSpec(12, 12, 64, causal=False, qkv_bias=True, out_bias=True),
        FeedForwardSpec(3072, "gelu", bias=True),
        norm,
        placement="post",
    )
    return ModelSpec(
        "bert-base",
        30522,
        768,
        (layer,) * 12,
        PositionsSpec("learned", 512),
        embed_norm=norm,
        token_types=2,
        headless=True,
        pooler=True,
        context_length=512,
    )


def gemma3_270m() -> ModelSpec:
    """Gemma 3 270M: four norms a block, normed heads, five layers with a window to one without (2025)."""
    norm = NormSpec("rms", 1e-6)
    near = AttentionSpec(4, 1, 256, rotary=RotarySpec(10_000.0, 256), window=512, scale=256**-0.5, qk_norm=norm)
    far = replace(near, rotary=RotarySpec(1_000_000.0, 256), window=None)
    layers = tuple(
        LayerSpec(
            far if (i + 1) % 6 == 0 else near,
            FeedForwardSpec(2048, "gelu_tanh", gated=True),
            norm,
            out_norm=norm,
        )
        for i in range(18)
    )
    return ModelSpec("gemma-3-270m", 262144, 640, layers, embed_scale=640**0.5, final_norm=norm, context_length=32768)


def _gpt2(name: str, d_model: int, n_layers: int, n_heads: int) -> Recipe:
    return lambda: gpt2_like(name, d_model=d_model, n_layers=n_layers, n_heads=n_heads)


def _llama(name: str, vocab: int, d: int, n_layers: int, heads: tuple[int, int], d_ff: int, **rest: Any) -> Recipe:
    n_heads, n_kv_heads = heads
    sizes: dict[str, Any] = {"vocab_size": vocab, "d_model": d, "n_layers": n_layers, "n_heads": n_heads, "d_ff": d_ff}
    return lambda: llama_like(name, n_kv_heads=n_kv_heads, **sizes, **rest)


_LLAMA3: dict[str, Any] = {
    "rope_base": 500_000.0,
    "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 8192),
    "context_length": 131072,
}
_QWEN2: dict[str, Any] = {"eps": 1e-6, "rope_base": 1e6, "qkv_bias": True}

CATALOG: dict[str, Recipe] = {
    "toy": toy,
    "gpt2": _gpt2("gpt2", 768, 12, 12),
    "gpt2-medium": _gpt2("gpt2-medium", 1024, 24, 16),
    "gpt2-large": _gpt2("gpt2-large", 1280, 36, 20),
    "gpt2-xl": _gpt2("gpt2-xl", 1600, 48, 25),
    "gpt3-175b": gpt3,
    "llama-2-7b": _llama("llama-2-7b", 32000, 4096, 32, (32, 32), 11008, context_length=4096),
    "llama-2-70b": _llama("llama-2-70b", 32000, 8192, 80, (64, 8), 28672, context_length=4096),
    "llama-3.1-8b": _llama("llama-3.1-8b", 128256, 4096, 32, (32, 8), 14336, **_LLAMA3),
    "llama-3.1-70b": _llama("llama-3.1-70b", 128256, 8192, 80, (64, 8), 28672, **_LLAMA3),
    "llama-3.1-405b": _llama("llama-3.1-405b", 128256, 16384, 126, (128, 8), 53248, **_LLAMA3),
    "llama-4-scout": lambda: llama4("llama-4-scout", n_experts=16, every=1, qk_norm=True, context_length=10_485_760),
    "llama-4-maverick": lambda: llama4(
        "llama-4-maverick", n_experts=128, every=2, qk_norm=False, context_length=1_048_576
    ),
    "mistral-7b": _llama("mistral-7b", 32000, 4096, 32, (32, 8), 14336, window=4096, context_length=32768),
    "mixtral-8x7b": mixtral,
    "qwen2.5-0.5b": _llama(
        "qwen2.5-0.5b", 151936, 896, 24, (14, 2), 4864, tied_head=True, context_length=32768, **_QWEN2
    ),
    "qwen2.5-7b": _llama("qwen2.5-7b", 152064, 3584, 28, (28, 4), 18944, context_length=131072, **_QWEN2),
    "qwen2.5-72b": _llama("qwen2.5-72b", 152064, 8192, 80, (64, 8), 29568, context_length=131072, **_QWEN2),
    "qwen3-0.6b": lambda: qwen3(
        "qwen3-0.6b", d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8, d_ff=3072, tied_head=True
    ),
    "qwen3-8b": lambda: qwen3("qwen3-8b", d_model=4096, n_layers=36, n_heads=32, n_kv_heads=8, d_ff=12288),
    "qwen3-235b-a22b": lambda: qwen3(
        "qwen3-235b-a22b",
        d_model=4096,
        n_layers=94,
        n_heads=64,
        n_kv_heads=4,
        d_ff=1536,
        experts=ExpertsSpec(128, FeedForwardSpec(1536, "silu", gated=True), RouterSpec(n_active=8)),
    ),
    "deepseek-v3": deepseek_v3,
    "smollm2-135m": _llama(
        "smollm2-135m", 49152, 576, 30, (9, 3), 1536, rope_base=1e5, tied_head=True, context_length=8192
    ),
    "bert-base": bert_base,
    "gemma-3-270m": gemma3_270m,
}


def catalog_spec(name: str) -> ModelSpec:
    """The spec of a published model. Raises CutawayError, naming the closest known names, for any other."""
    if name not in CATALOG:
        close = get_close_matches(name, CATALOG, n=3) or list(CATALOG)
        raise CutawayError(f"No configuration named {name!r} is in the catalog; the closest are {', '.join(close)}.")
    return CATALOG[name]()
