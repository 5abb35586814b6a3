"""Scores of single tokens for every query head: s_gj = scale * q_g . k_j, over all channels or the first few of them.

Shapes: q [H, d], keys [Hk, n, c], c <= d channels that q has too (its first c) -> scores [Hk, G, n] in at least fp32.
"""

import torch
from torch import Tensor


def token_scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Score every token; G query heads share a KV head."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads = scale * q[:, : keys.shape[2]].to(dtype).view(keys.shape[0], -1, keys.shape[2])  # [Hk, G, c]
    # The long factor first: the product then reads the keys, which are the bulk, row by row.
    return (keys.to(dtype) @ heads.transpose(1, 2)).transpose(1, 2)
