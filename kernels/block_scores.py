"""How much a probe wants each block, one score a block for all heads, and how spread out the scores are.

    dot_j = p . K_j          cosine_j = p . K_j / (|p| |K_j|)          density = entropy of softmax(scores)

p [H*d] is the probe with its heads concatenated, K_j [H*d] the block's key with every KV head repeated for the G query
heads it serves. The repetition is not made: p . K_j sums p over the group, and |K_j| is sqrt(G) times the norm over
the KV heads.

Shapes: probe [H, d], keys [n, Hk, d] -> scores [n] in at least fp32; scores [n] -> density.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvcli.kernels import few_rows
from kvcli.kernels._numba import compiled, prange, run, serves

PIECE = 256  # keys that a thread takes at once
SHORTEST = 1e-12  # length that a vector is taken to have at least, as in `normalize`


def dot_scores(probe: Tensor, keys: Tensor) -> Tensor:
    """Inner products."""
    dtype = torch.promote_types(keys.dtype, torch.float32)
    by_kv_head = probe.to(dtype).view(keys.shape[1], -1, keys.shape[2]).sum(1)  # [Hk, d]
    rows, query = keys.to(dtype).flatten(1), by_kv_head.flatten()
    if few_rows.suits(query[None], rows):
        return few_rows.products(query[None, None], rows[None])[0, 0]
    scores: Tensor = rows @ query
    return scores


def cosine_scores(probe: Tensor, keys: Tensor) -> Tensor:
    """Cosines; zero for a probe or key of zero length."""
    dtype = torch.promote_types(keys.dtype, torch.float32)
    rows = keys.flatten(1)
    if serves(rows) and rows.is_contiguous():  # keys are read once, and their unit vectors never written
        by_kv_head = normalize(probe.flatten(), dim=0).view(keys.shape[1], -1, keys.shape[2]).sum(1)  # [Hk, d]
        out = rows.new_empty(len(rows))
        run(_cosines, rows.numel(), by_kv_head.flatten(), rows, out)
        return out / sqrt(probe.shape[0] // keys.shape[1])
    unit_keys = normalize(keys.to(dtype).flatten(1), dim=1).view(keys.shape)
    groups = probe.shape[0] // keys.shape[1]
    return dot_scores(normalize(probe.to(dtype).flatten(), dim=0).view_as(probe), unit_keys) / sqrt(groups)


@compiled
def _cosines(probe: Any, keys: Any, out: Any) -> None:
    n, d = keys.shape
    for piece in prange((n + PIECE - 1) // PIECE):
        for j in range(piece * PIECE, min(piece * PIECE + PIECE, n)):
            product, square = np.float32(0), np.float32(0)
            for c in range(d):
                product += probe[c] * keys[j, c]
                square += keys[j, c] * keys[j, c]
            out[j] = product / max(np.sqrt(square), np.float32(SHORTEST))


def density(scores: Tensor) -> Tensor:
    """Entropy, in nats, of the softmax over blocks (ActQKV, equation 11)."""
    log_weights = scores.log_softmax(-1)
    return -(log_weights.exp() * log_weights).sum(-1)
