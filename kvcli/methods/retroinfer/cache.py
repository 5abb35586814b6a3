"""The cache of RetroInfer: clusters of tokens recalled from host memory to a block cache (arXiv 2505.02922).

For each cluster the device holds its number of tokens, their mean key (the centroid) and their mean value. With these
the attention of a whole cluster of n tokens is estimated as that of n tokens at the centroid, which is never more than
the true one (section 3: Jensen's inequality).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import Tokens, TokenSet, attend_sets
from kvcli.kernels.narrow_attention import ChainTokens
from kvcli.kernels.page_table import EMPTY, Misses
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores
from kvcli.kv.cache import Tiers, both
from kvcli.kv.pages import numbered
from kvcli.kv.tokens import TokenBudget, TokensOnHost
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Traffic, nbytes
from kvcli.methods.retroinfer import kernels as retroinfer_kernels
from kvcli.methods.retroinfer.kernels import cluster_sums, spherical_kmeans


class Clustering(NamedTuple):
    """Settings of clustering: `size` tokens per cluster on average, within segments of about `segment` tokens.

    `rounds` of k-means make the clusters; `update` tokens wait until they are clustered together. The part `estimated`
    of all clusters is estimated, in rank after those that are read.
    """

    size: int
    segment: int
    rounds: int
    update: int
    estimated: float

    def following(self, clusters: int) -> int:
        """Return how many of `clusters` clusters are estimated."""
        return round(self.estimated * clusters)


class Zones(NamedTuple):
    """Tokens read exactly, [Hk, m] with EMPTY after the `counts` of a head, and the clusters `estimated` [Hk, f].

    `log_counts` [Hk, f] are the logarithms of the estimated clusters' sizes, -inf where there are fewer clusters;
    `scores` [Hk, G, f] are the scores of their centroids.
    """

    retrieved: Tensor
    counts: list[int]
    estimated: Tensor
    log_counts: Tensor
    scores: Tensor


class WaveIndex:
    """The cluster index on the device: `centroids` and mean `values` [Hk, C, d], `sizes` [Hk, C], `members` [Hk, n].

    `members` lists the tokens of one cluster after the other, ascending within a cluster.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, clustering: Clustering, tiers: Tiers):
        self.clustering = clustering
        most = capacity // clustering.size + 1
        self.centroids, self.values = (tiers.on_device(num_kv_heads, most, head_dim) for _ in range(2))
        self.sizes = tiers.on_device(num_kv_heads, most, dtype=torch.int32)
        self.members = tiers.on_device(num_kv_heads, capacity, dtype=torch.int32)
        self.clusters = self.tokens = 0  # in use

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
        """Rank clusters with q [Hk, G, d] by their centroids' softmaxed scores, summed over the group.

        Ties go to the lower cluster. The best clusters are retrieved, as many as fit into `room` tokens, in the order
        of their members; the next ones are estimated. Tokens are numbered from `first` on.
        """
        sizes, centroids = self.sizes[:, : self.clusters], self.centroids[:, : self.clusters]
        scores = softmax.scores(token_scores(q.flatten(0, 1), centroids, 1.0))  # [Hk, G, C]
        follow, members = self.clustering.following(self.clusters), self.members[:, : self.tokens]
        if retroinfer_kernels.cluster_loops_suit(members):
            weights = retroinfer_kernels.weighed_cpu(scores, sizes)
            read, following, log_counts, counts = retroinfer_kernels.divide_cpu(weights, sizes, room, follow)
            tokens, each = retroinfer_kernels.listed_cpu(members, sizes, read, counts, first), counts.tolist()
        else:
            weights = scores.masked_fill(sizes[:, None] == 0, float("-inf")).softmax(-1).sum(1)
            order = weights.argsort(dim=-1, descending=True, stable=True)  # [Hk, C]
            fits = sizes.gather(1, order).cumsum(1) <= room  # by rank: a prefix
            places = fits.sum(1, keepdim=True) + torch.arange(follow, device=q.device)  # of the estimated ones
            following = order.gather(1, places.clamp_max(self.clusters - 1))
            log_counts = sizes.gather(1, following).float().log().masked_fill(places >= self.clusters, float("-inf"))
            tokens, each = _listed(members, sizes, torch.zeros_like(fits).scatter(1, order, fits), first)
        return Zones(tokens, each, following, log_counts, scores.take_along_dim(following[:, None], 2))

    def settled(self) -> list[Settled]:
        """Return the clusters, which do not change."""
        by_cluster = [Settled(each, 1, self.clusters) for each in (self.centroids, self.values, self.sizes)]
        return [*by_cluster, Settled(self.members, 1, self.tokens)]

    def nbytes(self) -> int:
        """Count the bytes on the device."""
        return nbytes(self.centroids, self.values, self.sizes, self.members)

    def read(self, clusters: int, tokens: int) -> int:
        """Count the bytes that a step reads of `clusters` clusters to retrieve `tokens` tokens of each KV head."""
        values = self.values[:, : self.clustering.following(clusters)]
        return nbytes(self.centroids[:, :clusters], self.sizes[:, :clusters], values, self.members[:, :tokens])


def _listed(members: Tensor, sizes: Tensor, read: Tensor, first: int) -> tuple[Tensor, list[int]]:
    """List the members of the clusters to read [Hk, C]: [Hk, m], padded with EMPTY, and how many each head has."""
    marks = read.flatten().repeat_interleave(sizes.flatten(), output_size=members.numel()).view_as(members)
    heads, entries, places = numbered(marks)
    each = heads.bincount(minlength=len(marks)).tolist()
    listed = entries.new_full((len(marks), max(each)), EMPTY)
    listed[heads, places] = members[heads, entries].long() + first
    return listed, each


class ClusteredTokenCache(TokensOnHost):
    """The cache of a layer: all KV in host memory; index, steady zone `near` and block cache on the device.

    The steady zone holds sinks, window, and tokens that have left it and wait to be clustered, `update` at a time. The
    block cache is kv [t, Hk, slots, d]: `resident` [Hk, slots] is the token in each slot, EMPTY for none, and `used`
    the step that last read it. The least recently read tokens make room.
    """

    def __init__(
        self,
        heads: tuple[int, int],  # Hk, d
        capacity: int,
        budget: TokenBudget,
        clustering: Clustering,
        cached: float,
        tiers: Tiers,
    ):
        """Allocate; the block cache holds the part `cached` of all tokens, but at least one selection."""
        num_kv_heads, head_dim = heads
        super().__init__(num_kv_heads, head_dim, capacity, budget.sink, budget.window + clustering.update, tiers)
        self.budget, self.step = budget, 0
        self.index = WaveIndex(num_kv_heads, head_dim, capacity, clustering, tiers)
        slots = min(capacity, max(budget.max_selected, round(cached * capacity)))
        self.kv = tiers.on_device(tiers.parts, num_kv_heads, slots, head_dim)
        self.k, self.v = both(self.kv)
        self.resident, self.used = (tiers.on_device(num_kv_heads, slots, dtype=torch.int64) for _ in range(2))
        self.resident.fill_(EMPTY)
        self.used.zero_()
        self.slots: Tensor | None = None  # [Hk, m], slots of the tokens last retrieved

    @property
    def steady(self) -> Tensor:
        """The tokens of the steady zone."""
        first, device = self.budget.sink + self.index.tokens, self.k.device
        sinks = torch.arange(min(self.budget.sink, self.length), device=device)
        return torch.cat((sinks, torch.arange(min(first, self.length), self.length, device=device)))

    @override
    def waiting(self) -> Sequence[Tensor]:
        index = self.index
        return self.kv, self.near.kv, index.centroids, index.values, index.sizes, index.members

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        """Store a prompt; cluster what has left the window, unless it is less than `update` tokens."""
        self.length = k.shape[1]
        self.kv.zero_()  # unused rows must be finite
        self.near.load(k, v)
        written, self.taken = self.take(k, v), 0
        far = slice(self.budget.sink, self.length - self.budget.window)
        if far.stop - far.start >= self.index.clustering.update:
            self.index.add(k[:, far], v[:, far])
        return written

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        """Store the current token; cluster once `update` tokens wait."""
        written = self.pool.write(self.length, k[:, None, None], v[:, None, None])
        self.near.append(k, v)
        self.length += 1
        if self.waiting_tokens == (update := self.index.clustering.update):
            first = self.budget.sink + self.index.tokens
            rows = self.near.rows_of(torch.arange(first, first + update, device=k.device))
            self.index.add(self.near.k[:, rows], self.near.v[:, rows])
        return written

    @property
    def waiting_tokens(self) -> int:
        """How many tokens have left the window and wait to be clustered."""
        return self.length - self.budget.sink - self.index.tokens - self.budget.window

    @override
    def tokens_in_chain(self) -> ChainTokens | None:
        """Return the steady zone, until the next token lets the first ones be clustered."""
        clustered = self.index.tokens > 0 or self.waiting_tokens + 1 == self.index.clustering.update
        return None if clustered else Tokens(self.near.kv, self.length + 1)

    @override
    def take_row(self) -> int:
        row = self.near.kv[:, :, self.length, None, None]  # [t, Hk, 1, 1, d]
        written = self.pool.write(self.length, *both(row))
        self.length = self.near.length = self.length + 1
        return written

    def zones(self, q: Tensor, softmax: Softmax) -> Zones:
        """Divide the clusters for q [H, d]; see `WaveIndex.zones`."""
        heads = q.view(len(self.k), -1, q.shape[-1])
        return self.index.zones(heads, softmax, self.budget.max_selected, self.budget.sink)

    def recall(self, zones: Zones) -> tuple[list[int], list[int], int]:
        """Bring the retrieved tokens to the block cache.

        Returns how many tokens each KV head asked for, how many of them were missing, and the bytes moved.
        """
        self.step += 1
        self.chosen = zones.retrieved
        if retroinfer_kernels.cluster_loops_suit(self.index.members):
            held = self.resident, self.used
            self.slots, misses = retroinfer_kernels.resolve_clusters_cpu(self.chosen, self.length, self.step, *held)
        else:
            misses = self._resolve(self.chosen)
        self.pool.bring(misses.pages, misses.heads, self.kv[:, :, :, None], misses.slots)
        return zones.counts, misses.by_head(len(zones.counts)), len(misses.pages) * self.pool.block_bytes

    def _resolve(self, chosen: Tensor) -> Misses:
        """Assign a slot to every token, and return the missing ones."""
        held = self.resident.new_full((len(chosen), self.length + 1), EMPTY)  # the slot of token t in column t + 1
        held.scatter_(
            1, self.resident + 1, torch.arange(self.resident.shape[1], device=held.device).expand_as(self.used)
        )
        held[:, 0] = EMPTY
        self.slots = held.gather(1, chosen + 1)
        here = self.slots != EMPTY
        self.used[here.nonzero()[:, 0], self.slots[here]] = self.step
        missing = (chosen != EMPTY) & ~here
        heads, _, place = numbered(missing)
        slots, tokens = self.used.argsort(dim=1, stable=True)[heads, place], chosen[missing]
        self.resident[heads, slots], self.used[heads, slots], self.slots[missing] = tokens, self.step, slots
        return Misses(heads, slots, tokens)

    def attend_zones(self, q: Tensor, zones: Zones, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to steady zone and recalled tokens, with `zones`' estimates; return [H, d]."""
        assert self.chosen is not None
        assert self.slots is not None
        heads, values = q.view(len(self.k), -1, q.shape[-1]), self.index.values[:, : self.index.clusters]
        rows = _near_rows(self.budget.sink, self.near.window, self.index.tokens, self.length, q.device)
        steady = TokenSet(heads, self.near.k, self.near.v, rows)
        sets = [steady]
        if self.slots.shape[1]:  # not where no cluster fits
            sets.append(TokenSet(heads, self.k, self.v, self.slots.clamp_min(0), valid=self.chosen != EMPTY))
        if zones.estimated.shape[1]:
            counts = zones.log_counts[:, None]
            sets.append(TokenSet(zones.scores, None, values, zones.estimated, log_counts=counts))
        return attend_sets(q, sets, softmax)

    @override
    def attended(self) -> Tensor:
        mask = torch.zeros(len(self.k), self.length, dtype=torch.bool, device=self.k.device)
        mask[:, self.steady] = True
        return self.with_chosen(mask)

    @override
    def footprint(self) -> Footprint:
        device = nbytes(self.kv, self.resident, self.used) + self.index.nbytes()
        return Footprint(device) + self.near.footprint() + self.pool.footprint()

    @override
    def traffic(self, length: int) -> Traffic:
        """Estimate a step whose clusters fill all the room, with as many tokens waiting as possible."""
        token, clustering = nbytes(self.kv[:, :, :1]), self.index.clustering
        far = max(0, length - self.budget.sink - self.budget.window)
        if far < clustering.update:
            return Traffic(attended=length * token)
        clusters, read = far // clustering.size + 1, min(far, self.budget.max_selected)
        return Traffic(
            attended=min(length, self.budget.total + clustering.update - 1) * token,
            scored=self.index.read(clusters, read),
            scores=4 * len(self.k) * clusters,
            recalled=read * self.pool.page_bytes,
        )


@lru_cache(maxsize=64)  # the same for all layers of a sequence
def _near_rows(sink: int, window: int, clustered: int, length: int, device: torch.device) -> Tensor:
    """Return the rows of the sinks and of the unclustered tokens, which lie in a ring of `window` rows: [1, n]."""
    ring = sink + torch.arange(clustered, length - sink, device=device) % window
    return torch.cat((torch.arange(sink, device=device), ring))[None]
