"""What must hold between the points of one layer's attention (chapters 7 to 10)."""

import numpy as np

from cutaway.forward.heads import join_heads, split_heads
from cutaway.forward.positions import frequencies
from cutaway.points import dot_inputs
from cutaway.spec import AttentionSpec, LatentSpec, RotarySpec
from cutaway.trace.verification.check import Inside, deviation, largest, normed, product, softmax


def projections(here: Inside) -> float:
    """q, k and v from what attention reads; with a latent, by way of it."""
    x, latent, weights = here.read_by("attn"), here.spec.attention.latent, here.weights
    if latent is not None:
        return _latent_projections(here, latent, x)
    return largest(
        *(deviation(join_heads(here[name]), product(x, weights[name])) for name in ("attn.q", "attn.k", "attn.v"))
    )


def _latent_projections(here: Inside, latent: LatentSpec, x: np.ndarray) -> float:
    weights, heads, off = here.weights, here.spec.attention.n_heads, []
    queries = x
    if latent.q_rank is not None:
        narrow = normed(latent.norm, weights["attn.q_latent_norm"], product(x, weights["attn.q_down"]))
        off.append(deviation(here["attn.q_latent"], narrow))
        queries = here["attn.q_latent"]
    narrow = normed(latent.norm, weights["attn.kv_latent_norm"], product(x, weights["attn.kv_down"]))
    kv, shared = here["attn.kv_latent"], here["attn.k_shared"]
    off.append(deviation(kv, narrow))
    off.append(deviation(shared, product(x, weights["attn.k_shared"])))
    own = split_heads(product(kv, weights["attn.k"]), heads)
    keys = np.concatenate([own, np.broadcast_to(shared, (heads, *shared.shape))], axis=-1)
    off.append(deviation(here["attn.k"], keys))
    off.append(deviation(join_heads(here["attn.q"]), product(queries, weights["attn.q"])))
    off.append(deviation(join_heads(here["attn.v"]), product(kv, weights["attn.v"])))
    return largest(*off)


def normed_heads(here: Inside) -> float | None:
    """q_normed and k_normed, before the rotation or after it."""
    spec = here.spec.attention
    if spec.qk_norm is None:
        return None
    turned = "_rot" if spec.norm_after_rotary and spec.rotary is not None else ""
    return largest(
        *(
            deviation(
                here[f"attn.{side}_normed"],
                normed(spec.qk_norm, here.weights.get(f"attn.{side}_norm"), here[f"attn.{side}{turned}"]),
            )
            for side in "qk"
        )
    )


def lengths(here: Inside) -> float | None:
    """Turning keeps lengths, but for the magnitude by which a scaled rotation lets what it turns grow."""
    spec = here.spec.attention
    if spec.rotary is None:
        return None
    magnitude = getattr(spec.rotary.scaling, "magnitude", 1.0)
    off = []
    for side in "qk":
        expected = _before_rotation(here, side)
        expected[..., _turned(spec, spec.rotary)] *= magnitude
        found = np.linalg.norm(here[f"attn.{side}_rot"], axis=-1)
        off.append(deviation(found, np.linalg.norm(expected, axis=-1)))
    return largest(*off)


def rotation(here: Inside) -> float | None:
    """Each pair, as a complex number, times e^(i · position · θ); the other coordinates as they were."""
    spec = here.spec.attention
    if spec.rotary is None:
        return None
    positions = here.trace.past + np.arange(len(here["resid_pre"]))
    angles, magnitude = _angles(spec.rotary, positions)
    first = _turned(spec, spec.rotary).start
    pairs = np.arange(spec.rotary.dims // 2)
    step, across = (2, 1) if spec.rotary.pairing == "adjacent" else (1, spec.rotary.dims // 2)
    real, imaginary = first + step * pairs, first + step * pairs + across
    off = []
    for side in "qk":
        expected = _before_rotation(here, side)
        turned = (expected[..., real] + 1j * expected[..., imaginary]) * magnitude * np.exp(1j * angles)
        expected[..., real], expected[..., imaginary] = turned.real, turned.imag
        off.append(deviation(here[f"attn.{side}_rot"], expected))
    return largest(*off)


def _before_rotation(here: Inside, side: str) -> np.ndarray:
    """The queries or keys that are turned, in an array of their own."""
    spec = here.spec.attention
    before = "_normed" if spec.qk_norm is not None and not spec.norm_after_rotary else ""
    return here[f"attn.{side}{before}"]


def _turned(spec: AttentionSpec, rotary: RotarySpec) -> slice:
    """Which coordinates of a head turn."""
    first = spec.latent.d_nope if spec.latent is not None else 0
    return slice(first, first + rotary.dims)


def _angles(spec: RotarySpec, positions: np.ndarray) -> tuple[np.ndarray, float]:
    """The angle of every pair at every position `[T, dims / 2]`, and by how much what turns grows.

    Where nothing is scaled from the definition, θ_i = base^(−2i/dims), else from the pass's own table of θ.
    """
    if spec.scaling is not None:
        thetas, magnitude = frequencies(spec, int(positions[-1]) + 1)
        return positions[:, None] * thetas, magnitude
    powers = 2 * np.arange(spec.dims // 2) / spec.dims
    return positions[:, None] * np.exp(-powers * np.log(spec.base)), 1.0


def scores(here: Inside) -> float:
    """q · k, and what scale, growth and cap make of it, for every pair that was compared or should have been."""
    spec = here.spec.attention
    q, k = (here[name] for name in dot_inputs(spec))
    expected = q @ np.repeat(k, spec.n_heads // spec.n_kv_heads, axis=0).swapaxes(1, 2)
    known = _seen(here) | ~np.isnan(here["attn.dots"]).any(axis=0)
    off = deviation(here["attn.dots"][:, known], expected[:, known])
    expected = expected * spec.score_scale
    if spec.growth is not None:
        stretches = (np.arange(q.shape[1]) + 1) // spec.growth.every
        expected = expected * (1 + spec.growth.strength * np.log(1 + stretches))[:, None]
    if spec.cap is not None:
        expected = spec.cap * np.tanh(expected / spec.cap)
    return largest(off, deviation(here["attn.scores"][:, known], expected[:, known]))


def pattern(here: Inside) -> float:
    """−∞ on what may not be seen, the scores elsewhere; and the softmax of that."""
    expected = np.where(_seen(here), here["attn.scores"], -np.inf)
    if not np.array_equal(here["attn.masked"], expected):
        return np.inf
    return deviation(here["attn.pattern"], softmax(expected))


def rows_sum(here: Inside) -> float:
    sums = here["attn.pattern"].sum(-1)
    return deviation(sums, np.ones_like(sums))


def unseen(here: Inside) -> float | None:
    hidden = ~_seen(here)
    return float(np.abs(here["attn.pattern"][:, hidden]).max()) if hidden.any() else None


def mix(here: Inside) -> float:
    spec = here.spec.attention
    v = np.repeat(here["attn.v"], spec.n_heads // spec.n_kv_heads, axis=0)
    return deviation(here["attn.z"], here["attn.pattern"] @ v)


def heads(here: Inside) -> float:
    """Each head through its slice of W_O, and all of them together."""
    total, output = here["attn.head_out"].sum(0), here.weights["attn.o"]
    off = deviation(here["attn.raw"], product(join_heads(here["attn.z"]), output))
    return largest(off, deviation(here["attn.raw"], total if output.bias is None else total + output.bias))


def _seen(here: Inside) -> np.ndarray:
    """Which key each query may see, `bool [T, T]`: said of each pair by itself, not as the ranges of the pass."""
    spec, positions = here.spec.attention, np.arange(len(here["resid_pre"]))
    query, key = positions[:, None], positions[None, :]
    seen = key <= query if spec.causal else np.ones((len(positions), len(positions)), bool)
    if spec.window is not None:
        seen = seen & (query - key < spec.window)
    if spec.chunk is not None:
        seen = seen & (query // spec.chunk == key // spec.chunk)
    return seen
