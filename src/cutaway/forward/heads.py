"""Taking rows apart into heads and putting heads side by side again (chapter 9.1)."""

from cutaway.engines.protocol import Array

# Queries, keys and values as they enter the dot products and the mix, and the two arrays a cache stores of them.
Projected = tuple[Array, Array, Array, tuple[Array, Array]]


def split_heads(x: Array, n_heads: int) -> Array:
    """`[T, n_heads · d_head]` → `[n_heads, T, d_head]`."""
    return x.reshape(len(x), n_heads, -1).swapaxes(0, 1)


def join_heads(z: Array) -> Array:
    """`[H, T, d_head]` → `[T, H · d_head]`: the heads side by side."""
    return z.swapaxes(0, 1).reshape(z.shape[1], -1)
