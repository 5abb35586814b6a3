"""Clusters of keys: which tokens a query has to read, and what the others add up to (RetroInfer, arXiv 2505.02922).

Of each cluster the device knows how many tokens it has, their mean key (the centroid) and their mean value. With them
the attention of a whole cluster of n tokens is estimated as that of n tokens at the centroid, which is never more than
it is (section 3: Jensen's inequality).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels import cluster_rows
from kvcli.kernels.page_table import EMPTY
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.spherical_kmeans import cluster_sums, spherical_kmeans
from kvcli.kernels.token_scores import token_scores
from kvcli.kv.cache import Tiers
from kvcli.kv.pages import numbered
from kvcli.memory.state import Settled
from kvcli.memory.tiers import nbytes


class Clustering(NamedTuple):
    """How tokens are clustered: `size` of them in a cluster on average, within segments of about `segment`.

    `rounds` of k-means make the clusters; `update` tokens wait until they are clustered together. Of all clusters the
    part `estimated` is, behind those that are read.
    """

    size: int
    segment: int
    rounds: int
    update: int
    estimated: float

    def following(self, clusters: int) -> int:
        """How many of so many clusters are estimated."""
        return round(self.estimated * clusters)


class Zones(NamedTuple):
    """The tokens read exactly, [Hk, m] with EMPTY behind the `counts` of a head, and the clusters `estimated` [Hk, f].

    `log_counts` [Hk, f] are the logarithms of how many tokens these have, -inf where there are fewer clusters;
    `scores` [Hk, G, f] are those of their centroids.
    """

    retrieved: Tensor
    counts: list[int]
    estimated: Tensor
    log_counts: Tensor
    scores: Tensor


class WaveIndex:
    """On the device: `centroids` and mean `values` [Hk, C, d], `sizes` [Hk, C], and `members` [Hk, n].

    These are the tokens of one cluster after the other, each cluster's in their order.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, clustering: Clustering, tiers: Tiers):
        self.clustering = clustering
        most = capacity // clustering.size + 1
        self.centroids, self.values = (tiers.on_device(num_kv_heads, most, head_dim) for _ in range(2))
        self.sizes = tiers.on_device(num_kv_heads, most, dtype=torch.int32)
        self.members = tiers.on_device(num_kv_heads, capacity, dtype=torch.int32)
        self.clusters = self.tokens = 0  # that there are

    def add(self, k: Tensor, v: Tensor) -> None:
        """Cluster the next tokens k, v [Hk, n, d], segment by segment."""
        segments = max(1, round(k.shape[1] / self.clustering.segment))
        for keys, values in zip(k.tensor_split(segments, 1), v.tensor_split(segments, 1), strict=True):
            count = max(1, keys.shape[1] // self.clustering.size)
            found = spherical_kmeans(keys, count, self.clustering.rounds)  # [Hk, n]
            ones = torch.ones_like(keys[..., :1])
            sizes, sum_k, sum_v = (cluster_sums(x, found, count) for x in (ones, keys, values))
            new = slice(self.clusters, self.clusters + count)
            self.sizes[:, new] = sizes[..., 0].int()
            self.centroids[:, new], self.values[:, new] = (x / sizes.clamp_min(1) for x in (sum_k, sum_v))
            members = found.argsort(dim=1, stable=True) + self.tokens
            self.members[:, self.tokens : self.tokens + keys.shape[1]] = members
            self.clusters += count
            self.tokens += keys.shape[1]

    def zones(self, q: Tensor, softmax: Softmax, room: int, first: int) -> Zones:
        """Rank clusters with q [Hk, G, d] by their centroids' softmaxed scores, added up over the group.

        Ties go to the lower cluster. Of the best, as many are retrieved as have `room` tokens together, in the order in
        which their members lie; those that follow are estimated. Tokens are numbered from the `first` on.
        """
        sizes, centroids = self.sizes[:, : self.clusters], self.centroids[:, : self.clusters]
        scores = softmax.scores(token_scores(q.flatten(0, 1), centroids, 1.0))  # [Hk, G, C]
        follow, members = self.clustering.following(self.clusters), self.members[:, : self.tokens]
        if cluster_rows.suits(members):
            weights = cluster_rows.weighed(scores, sizes)
            read, following, log_counts, counts = cluster_rows.divide(weights, sizes, room, follow)
            tokens, each = cluster_rows.listed(members, sizes, read, counts, first), counts.tolist()
        else:
            weights = scores.masked_fill(sizes[:, None] == 0, float("-inf")).softmax(-1).sum(1)
            order = weights.argsort(dim=-1, descending=True, stable=True)  # [Hk, C]
            fits = sizes.gather(1, order).cumsum(1) <= room  # of clusters by rank: the first ones
            places = fits.sum(1, keepdim=True) + torch.arange(follow, device=q.device)  # of those that follow
            following = order.gather(1, places.clamp_max(self.clusters - 1))
            log_counts = sizes.gather(1, following).float().log().masked_fill(places >= self.clusters, float("-inf"))
            tokens, each = _listed(members, sizes, torch.zeros_like(fits).scatter(1, order, fits), first)
        return Zones(tokens, each, following, log_counts, scores.take_along_dim(following[:, None], 2))

    def settled(self) -> list[Settled]:
        """Clusters do not change."""
        by_cluster = [Settled(each, 1, self.clusters) for each in (self.centroids, self.values, self.sizes)]
        return [*by_cluster, Settled(self.members, 1, self.tokens)]

    def nbytes(self) -> int:
        """Bytes on the device."""
        return nbytes(self.centroids, self.values, self.sizes, self.members)

    def read(self, clusters: int, tokens: int) -> int:
        """Bytes that a step reads of so many clusters, to retrieve so many tokens of each KV head."""
        values = self.values[:, : self.clustering.following(clusters)]
        return nbytes(self.centroids[:, :clusters], self.sizes[:, :clusters], values, self.members[:, :tokens])


def _listed(members: Tensor, sizes: Tensor, read: Tensor, first: int) -> tuple[Tensor, list[int]]:
    """List the members of the clusters to read [Hk, C], EMPTY behind: [Hk, m], and how many each head has."""
    marks = read.flatten().repeat_interleave(sizes.flatten(), output_size=members.numel()).view_as(members)
    heads, entries, places = numbered(marks)
    each = heads.bincount(minlength=len(marks)).tolist()
    listed = entries.new_full((len(marks), max(each)), EMPTY)
    listed[heads, places] = members[heads, entries].long() + first
    return listed, each
