"""Keys and values through a narrow latent (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434, section 2.1).

A token leaves one latent and one small rotated key, shared by all heads, in the cache; each head's keys and
values are unfolded from them.
"""

from collections.abc import Mapping

from cutaway.engines.layout import Layout
from cutaway.engines.low_rank import unheard
from cutaway.engines.protocol import Array, Engine, Linear
from cutaway.errors import CutawayError
from cutaway.forward.heads import Projected, split_heads
from cutaway.forward.norm import norm
from cutaway.forward.run import Run
from cutaway.points import Tap
from cutaway.spec import AttentionSpec, LatentSpec


def latent_heads(run: Run, spec: AttentionSpec, weights: Mapping, x: Array, tap: Tap) -> Projected:
    """`[T, d]` → q and k `[H, T, d_nope + d_rope]`, v `[H, T, d_value]`; stored: latent and shared key, `[1, T, …]`."""
    engine, layout, latent = run.engine, run.layout, _latent(spec)
    read = x
    if latent.q_rank is not None:
        narrow = engine.linear(x, weights["attn.q_down"], layout)
        read = tap("attn.q_latent", norm(engine, latent.norm, weights["attn.q_latent_norm"], narrow))
    q = tap("attn.q", split_heads(engine.linear(read, weights["attn.q"], layout), spec.n_heads))
    narrow = engine.linear(x, weights["attn.kv_down"], layout)
    kv = tap("attn.kv_latent", norm(engine, latent.norm, weights["attn.kv_latent_norm"], narrow))  # [T, kv_rank]
    shared = tap("attn.k_shared", engine.linear(x, weights["attn.k_shared"], layout))[None]  # [1, T, d_rope]
    own, v = _unfold(engine, spec, weights, kv, layout)
    k, v = tap("attn.k", _beside(engine, own, shared)), tap("attn.v", v)
    if spec.rotary is not None:
        turn, pairing = run.rotations[spec.rotary], spec.rotary.pairing
        shared = engine.rotate(shared, *turn, pairing)
        q, k = (
            _beside(engine, x[:, :, : latent.d_nope], engine.rotate(x[:, :, latent.d_nope :], *turn, pairing))
            for x in (q, k)
        )
        q, k = tap("attn.q_rot", q), tap("attn.k_rot", k)
    return q, k, v, (kv[None], shared)


def with_earlier(
    run: Run, spec: AttentionSpec, weights: Mapping, latents: Array, shared: Array, keys: Array, values: Array
) -> tuple[Array, Array]:
    """Keys and values of all tokens: the earlier ones unfolded from the cache, the new ones as they are.

    `latents` `[1, S, kv_rank]` and `shared` `[1, S, d_rope]` hold all S tokens, `keys` and `values` the last ones.
    """
    engine = run.engine
    earlier = latents.shape[1] - keys.shape[1]
    counted = {  # what an adapter adds to these rows was told when they were new
        name: Linear(weights[name].weight, weights[name].bias, unheard(weights[name])) for name in ("attn.k", "attn.v")
    }
    own, v = _unfold(engine, spec, counted, latents[0, :earlier], Layout.of([earlier]))
    all_keys = engine.empty((spec.n_heads, latents.shape[1], spec.d_head))
    all_values = engine.empty((spec.n_heads, latents.shape[1], spec.value_width))
    all_keys[:, :earlier], all_keys[:, earlier:] = _beside(engine, own, shared[:, :earlier]), keys
    all_values[:, :earlier], all_values[:, earlier:] = v, values
    return all_keys, all_values


def _unfold(engine: Engine, spec: AttentionSpec, weights: Mapping, kv: Array, layout: Layout) -> tuple[Array, Array]:
    """Each head's own part of the keys `[H, T, d_nope]`, and its values `[H, T, d_value]`, from the latents."""
    own = split_heads(engine.linear(kv, weights["attn.k"], layout), spec.n_heads)
    return own, split_heads(engine.linear(kv, weights["attn.v"], layout), spec.n_heads)


def _beside(engine: Engine, own: Array, other: Array) -> Array:
    """`[H, T, a]` beside `[H or 1, T, b]` → `[H, T, a + b]`."""
    width = own.shape[-1]
    both = engine.empty((*own.shape[:-1], width + other.shape[-1]))
    both[:, :, :width] = own
    both[:, :, width:] = other
    return both


def _latent(spec: AttentionSpec) -> LatentSpec:
    if spec.latent is None:
        raise CutawayError("This layer's attention has no latent; its spec has none.")
    return spec.latent
