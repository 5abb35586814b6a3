"""Causal attention of the newest m tokens of a prompt over all n so far, without an m*n matrix.

Shapes: q [H, m, d], k [Hk, n, d], v [Hk, n, d], m <= n -> out [H, m, d]. Query i stands at position n - m + i and sees
keys 0 .. n - m + i, or the last `window` of them; where these are `chunked`, those of the query's own chunk, which
begins at a multiple of `window`.

The keys before the chunk are seen by every query and need no mask; only the square on the diagonal is causal. The two
parts are merged by their log-sum-exp.
"""

from itertools import pairwise

import torch
from torch import Tensor

from kvcli.kernels.block_attention import (
    add_sinks,
    block_attention,
    block_attention_ref,
    causal_attention,
    merge_blocks,
)
from kvcli.kernels.softmax import Softmax

# Queries of a sliding-window layer handled together: bounds its mask to ROWS * (ROWS + window).
SLIDING_ROWS = 256


def prefill_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | None = None, chunked: bool = False
) -> Tensor:
    """Plain torch with the whole m*n mask, in the precision of its input."""
    groups = q.shape[0] // k.shape[0]
    mask = _causal_mask(q.shape[1], k.shape[1], None if chunked else window, q.device)
    if chunked and window is not None:
        chunk = torch.arange(k.shape[1], device=q.device) // window
        mask &= chunk[-q.shape[1] :, None] == chunk
    mask = mask.repeat(groups, 1)
    out, lse = block_attention_ref(_fold(q, k), k, v, softmax, mask)
    return _finish(q, out, lse, softmax)


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | None = None, chunked: bool = False
) -> Tensor:
    """Attend in blocks; memory grows with m and with n, never with m*n."""
    m, n = q.shape[1], k.shape[1]
    if chunked and window is not None and n > window:
        borders = [n - m, *range((n - m) // window * window + window, n, window), n]
        pieces = [
            (slice(start - n + m, stop - n + m), slice(start // window * window, stop))
            for start, stop in pairwise(borders)
        ]
        return torch.cat([prefill_attention(q[:, new], k[:, seen], v[:, seen], softmax) for new, seen in pieces], 1)
    if window is not None and n > window:
        first = max(0, n - m - window + 1)
        fused = causal_attention(q, k[:, first:], v[:, first:], softmax, window)
        if fused is not None:
            return _finish(q, *fused, softmax)
        parts = []
        for start in range(0, m, SLIDING_ROWS):
            stop = min(start + SLIDING_ROWS, m)
            last = n - m + stop
            first = max(0, last - (stop - start) - window + 1)
            parts.append(_sliding_block(q[:, start:stop], k[:, first:last], v[:, first:last], softmax, window))
        return torch.cat(parts, 1)
    out, lse = _diagonal(q, k[:, n - m :], v[:, n - m :], softmax)
    if n > m:
        out, lse = merge_blocks((out, lse), block_attention(_fold(q, k), k[:, : n - m], v[:, : n - m], softmax))
    return _finish(q, out, lse, softmax)


def _diagonal(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attend causally with q [H, m, d] to as many keys: out [Hk, G*m, d], lse [Hk, G*m]."""
    fused = causal_attention(q, k, v, softmax)
    if fused is not None:
        out, lse = fused
        return _fold(out, k), lse.reshape(k.shape[0], -1)
    # Each query head of a group for itself: other causal kernels want as many rows as keys.
    heads = q.view(k.shape[0], -1, *q.shape[1:])  # [Hk, G, m, d]
    squares = [block_attention(heads[:, g], k, v, softmax, causal=True) for g in range(heads.shape[1])]
    out, lse = (torch.stack(parts, 1).flatten(1, 2) for parts in zip(*squares, strict=True))
    return out, lse


def _sliding_block(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int) -> Tensor:
    groups = q.shape[0] // k.shape[0]
    mask = _causal_mask(q.shape[1], k.shape[1], window, q.device).repeat(groups, 1)
    return _finish(q, *block_attention(_fold(q, k), k, v, softmax, mask), softmax)


def _causal_mask(m: int, n: int, window: int | None, device: torch.device) -> Tensor:
    mask = torch.ones(m, n, dtype=torch.bool, device=device).tril(n - m)
    return mask if window is None else mask.triu(n - m - window + 1)


def _fold(q: Tensor, k: Tensor) -> Tensor:
    return q.reshape(k.shape[0], -1, q.shape[-1])  # [H, m, d] -> [Hk, G*m, d]


def _finish(q: Tensor, out: Tensor, lse: Tensor, softmax: Softmax) -> Tensor:
    out, lse = out.reshape(*q.shape[:2], -1), lse.reshape(q.shape[:2])  # [H, m, d], [H, m]
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks[:, None])
    return out
