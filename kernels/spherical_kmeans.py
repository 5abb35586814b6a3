"""Spherical k-means: keys that point the same way from their mean form a cluster (RetroInfer, arXiv 2505.02922).

    x_i = (k_i - mean k) / |k_i - mean k|      cluster of i = argmax_c x_i . u_c      u_c = sum of its x_i, of length 1

Every KV head has clusters of its own. They begin about keys at even distances, so that nothing is left to chance.

Shapes: keys [Hk, n, d] -> the cluster of each, [Hk, n] int64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def spherical_kmeans(keys: Tensor, clusters: int, rounds: int) -> Tensor:
    """Divide keys into `clusters`, some of which may stay empty, and improve them `rounds` times."""
    x = keys.float()
    x = F.normalize(x - x.mean(1, keepdim=True), dim=-1)
    n = x.shape[1]
    begin = (2 * torch.arange(clusters, device=x.device) + 1) * n // (2 * clusters)
    centres = x[:, begin]  # [Hk, C, d]
    for _ in range(rounds):
        sums = cluster_sums(x, _nearest(x, centres), clusters)
        centres = torch.where(sums.any(-1, keepdim=True), F.normalize(sums, dim=-1), centres)
    return _nearest(x, centres)


def cluster_sums(x: Tensor, cluster: Tensor, clusters: int) -> Tensor:
    """Add up vectors x [Hk, n, d] by their cluster [Hk, n], in the same order every time: [Hk, clusters, d] in fp32."""
    members = cluster[:, None] == torch.arange(clusters, device=x.device)[:, None]  # [Hk, C, n]
    return members.float() @ x.float()


def _nearest(x: Tensor, centres: Tensor) -> Tensor:
    return (x @ centres.mT).argmax(-1)
