"""The landmarks by which chunks of a layer are selected (ShadowKV, arXiv 2410.21465, section 3.2)."""

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels.group_pooling import pool_scores
from kvcli.kernels.token_scores import token_scores
from kvcli.kernels.topk import topk_pages
from kvcli.kv.cache import Tiers
from kvcli.memory.state import Settled
from kvcli.memory.tiers import nbytes
from kvcli.sizes import slices

# Chunks summarised at once: fp32 copies of the keys stay this long.
PIECE = 512


class Landmarks:
    """On the device: `means` [Hk, chunks, d], the mean key of each chunk; `excluded` [Hk, chunks] marks outliers.

    Outliers are chunks that their mean represents badly; they are always attended to and never selected.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, num_chunks: int, tiers: Tiers):
        self.means = tiers.on_device(num_kv_heads, num_chunks, head_dim)
        self.filled = 0  # chunks
        self.excluded = tiers.on_device(num_kv_heads, num_chunks, dtype=torch.bool).fill_(False)

    def fill(self, first: int, keys: Tensor) -> Tensor:
        """Represent consecutive full chunks from `first` on: keys [Hk, n, c, d]; returns their fits [Hk, n]."""
        self.filled = first + keys.shape[1]
        fits = []
        for part in slices(keys.shape[1], PIECE):
            self.means[:, first:][:, part], fit = chunk_landmarks(keys[:, part])
            fits.append(fit)
        return torch.cat(fits, 1)

    def exclude_worst(self, fit: Tensor, count: int) -> Tensor:
        """Mark the `count` chunks of worst fit [Hk, n] as outliers, and return them: [Hk, count]."""
        chunks = outlier_chunks(fit, count)
        self.excluded.scatter_(1, chunks, True)
        return chunks

    def scores(self, q: Tensor, num_chunks: int, scale: float) -> Tensor:
        """Score the first `num_chunks` with queries [H, d], outliers lowest: [Hk, num_chunks] in fp32."""
        return landmark_scores(q, self.means[:, :num_chunks], self.excluded[:, :num_chunks], scale)

    def settled(self) -> list[Settled]:
        """Means do not change."""
        return [Settled(self.means, 1, self.filled)]

    def nbytes(self) -> int:
        """Bytes on the device."""
        return nbytes(self.means, self.excluded)


def chunk_landmarks(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Landmarks [Hk, n, d] of full chunks, keys [Hk, n, c, d], and their fits to these keys [Hk, n]; both in fp32.

    L_j = mean_t k_jt      fit_j = min_t cos(L_j, k_jt)
    """
    keys = keys.float()
    landmarks = keys.mean(2)
    return landmarks, functional.cosine_similarity(keys, landmarks[:, :, None], dim=-1).amin(-1)


def outlier_chunks(fit: Tensor, count: int) -> Tensor:
    """The `count` chunks of each head that fit their landmark worst, of equals the lower: fit [Hk, n] -> [Hk, o]."""
    if count == 0:
        return torch.empty(fit.shape[0], 0, dtype=torch.int64, device=fit.device)
    return topk_pages(-fit, count)


def landmark_scores(q: Tensor, landmarks: Tensor, excluded: Tensor, scale: float) -> Tensor:
    """Score chunks in fp32 for every KV head: q [H, d], landmarks [Hk, n, d], excluded [Hk, n] bool -> [Hk, n].

        s_j = max_g softmax_j(scale * q_g . L_j)

    The softmax of each query head runs over the chunks that can be selected, the maximum over the G heads of a KV head;
    an excluded chunk gets -1, less than any other.
    """
    scores = token_scores(q.float(), landmarks.float(), scale)  # [Hk, G, n]
    weights = pool_scores(scores.masked_fill(excluded[:, None], float("-inf")), "max_s")
    return weights.masked_fill(excluded, -1.0)
