"""Landmarks of chunks: what stands for a chunk's keys, how well it does, and its score (ShadowKV, arXiv 2410.21465,
section 3.2 and algorithms 1 and 2).

    L_j = mean_t k_jt      fit_j = min_t cos(L_j, k_jt)      s_j = max_g softmax_j(scale * q_g . L_j)

The softmax of each query head runs over the chunks that can be selected, the maximum over the G heads of a KV head.
Shapes: keys [Hk, n, c, d] -> landmarks [Hk, n, d], fit [Hk, n]; q [H, d], excluded [Hk, n] bool -> scores [Hk, n].
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels.group_pooling import pool_scores
from kvcli.kernels.topk import topk_pages


def chunk_landmarks(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Landmarks and fit of full chunks, in fp32."""
    keys = keys.float()
    landmarks = keys.mean(2)
    return landmarks, functional.cosine_similarity(keys, landmarks[:, :, None], dim=-1).amin(-1)


def outlier_chunks(fit: Tensor, count: int) -> Tensor:
    """The `count` chunks of each head that fit their landmark worst, of equals the lower: fit [Hk, n] -> [Hk, o]."""
    if count == 0:
        return torch.empty(fit.shape[0], 0, dtype=torch.int64, device=fit.device)
    return topk_pages(-fit, count)


def landmark_scores(q: Tensor, landmarks: Tensor, excluded: Tensor, scale: float) -> Tensor:
    """Score every chunk in fp32 for every KV head; an excluded chunk gets -1, less than any other."""
    heads = scale * q.float().view(landmarks.shape[0], -1, q.shape[-1])  # [Hk, G, d]
    # The long factor first: the product then reads the landmarks, which are the bulk, row by row.
    scores = (landmarks.to(heads.dtype) @ heads.transpose(1, 2)).transpose(1, 2)  # [Hk, G, n]
    weights = pool_scores(scores.masked_fill(excluded[:, None], float("-inf")), "max_s")
    return weights.masked_fill(excluded, -1.0)
