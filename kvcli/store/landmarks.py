"""The landmark of every chunk of a layer that can be selected, on the device (ShadowKV, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.landmarks import chunk_landmarks, landmark_scores, outlier_chunks
from kvcli.store.cache import Tiers, nbytes

# Chunks summarised at once: fp32 copies of the keys stay this long.
PIECE = 512


class Landmarks:
    """Mean keys [Hk, chunks, d], and which chunks are outliers, hence no candidates: [Hk, chunks] bool."""

    def __init__(self, num_kv_heads: int, head_dim: int, num_chunks: int, tiers: Tiers):
        self.means = tiers.on_device(num_kv_heads, num_chunks, head_dim)
        self.excluded = tiers.on_device(num_kv_heads, num_chunks, dtype=torch.bool).fill_(False)

    def fill(self, first: int, keys: Tensor) -> Tensor:
        """Take consecutive full chunks from `first` on, keys [Hk, n, c, d]; returns how each fits: [Hk, n]."""
        fits = []
        for start in range(0, keys.shape[1], PIECE):
            piece = keys[:, start : start + PIECE]
            means, fit = chunk_landmarks(piece)
            self.means[:, first + start : first + start + piece.shape[1]] = means
            fits.append(fit)
        return torch.cat(fits, 1)

    def exclude_worst(self, fit: Tensor, count: int) -> Tensor:
        """Take the `count` first chunks by worst fit [Hk, n] out of the candidates and return them: [Hk, count]."""
        chunks = outlier_chunks(fit, count)
        self.excluded.scatter_(1, chunks, True)
        return chunks

    def scores(self, q: Tensor, num_chunks: int, scale: float) -> Tensor:
        """Score the first chunks with q [H, d] for every KV head: [Hk, num_chunks] in fp32."""
        return landmark_scores(q, self.means[:, :num_chunks], self.excluded[:, :num_chunks], scale)

    def nbytes(self) -> int:
        """Bytes on the device."""
        return nbytes(self.means, self.excluded)
