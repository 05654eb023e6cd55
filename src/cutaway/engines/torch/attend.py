"""Attention in one fused operation, for passes in which nobody looks at or alters the scores."""

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

ROWS = 1024  # query rows that share one mask: no array of T × T stands even where a window needs masks


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, first: np.ndarray, last: np.ndarray
) -> torch.Tensor:
    """softmax(q kᵀ · scale, masked) v: `[H, R, d_head]`, `[H_kv, S, d_head]`, `[H_kv, S, d_value]` → `[H, R, d_value]`.

    Query row r sees the keys `first[r] <= key < last[r]`. (Dao et al. 2022, where torch has it for the device)
    """
    n_rows, n_keys = q.shape[1], keys.shape[1]
    if not first.any() and (last == n_keys).all():
        return _fused(q, keys, values, scale)
    if n_rows == n_keys and not first.any() and np.array_equal(last, np.arange(1, n_keys + 1)):
        return _fused(q, keys, values, scale, causal=True)
    parts = []
    for start in range(0, n_rows, ROWS):
        here = slice(start, start + ROWS)
        seen = slice(int(first[here].min()), int(last[here].max()))
        columns = np.arange(seen.start, seen.stop)
        mask = torch.tensor((columns >= first[here, None]) & (columns < last[here, None]), device=q.device)
        parts.append(_fused(q[:, here], keys[:, seen], values[:, seen], scale, mask))
    return torch.cat(parts, dim=1)


def _fused(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    grouped = len(q) != len(keys)
    mixed = scaled_dot_product_attention(
        q[None], keys[None], values[None], mask, 0.0, causal, scale=scale, enable_gqa=grouped
    )
    return mixed[0]
