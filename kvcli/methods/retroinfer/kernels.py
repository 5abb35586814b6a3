"""Kernels of RetroInfer: weigh, divide, list and look up clusters of tokens on a CPU; and spherical k-means.

The reference in torch is in `kvcli.methods.retroinfer.cache`. It sorts all clusters and all slots; the CPU loops visit
every token once.

    weighed_cpu    scores [Hk, G, C] fp32, sizes [Hk, C] int32 -> weights [Hk, C]
    divide_cpu     weights, sizes -> clusters read, bool [Hk, C], clusters estimated [Hk, f] and the logarithms of their
               sizes, and how many tokens are read [Hk]
    listed_cpu     members [Hk, n] int32 by cluster, sizes, clusters read -> tokens [Hk, m] int64, padded with EMPTY
    resolve_clusters_cpu    tokens, resident and used [Hk, S] int64 -> slots [Hk, m] int64, and the missing tokens
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcli.kernels._llvm import AHEAD, exp, prefetch
from kvcli.kernels._numba import compiled, flat, prange, run, serves
from kvcli.kernels.page_table import EMPTY, Misses
from kvcli.kernels.page_table import listed as list_misses

DIGITS, VALUES = 3, 1 << 11  # of the radix sort of a float's bits


@compiled
def _weigh(scores: Any, sizes: Any, weights: Any, out: Any) -> None:
    heads, group, n = scores.shape
    for h in prange(heads):
        out[h] = 0
        for g in range(group):
            row, own = scores[h, g], weights[h]
            top = np.float32(-np.inf)
            for i in range(n):
                top = row[i] if row[i] > top and sizes[h, i] > 0 else top
            total = np.float32(0)
            for i in range(n):
                own[i] = exp(row[i] - top) if sizes[h, i] > 0 else np.float32(0)
                total += own[i]
            for i in range(n):
                out[h, i] += own[i] / total


@compiled
def _divide(bits: Any, sizes: Any, room: int, retrieved: Any, estimated: Any, log_counts: Any, counts: Any) -> None:
    heads, n = bits.shape
    for h in prange(heads):
        retrieved[h], estimated[h], log_counts[h] = False, 0, -np.inf
        keys, order, other = np.empty(n, np.uint32), np.empty(n, np.int64), np.empty(n, np.int64)
        for i in range(n):
            keys[i], order[i] = ~np.uint32(bits[h, i]), i  # the best first; ties: the lower one
        for digit in range(DIGITS):
            shift, begins = np.uint32(11 * digit), np.zeros(VALUES + 1, np.int64)
            for i in range(n):
                begins[1 + ((keys[i] >> shift) & np.uint32(VALUES - 1))] += 1
            for value in range(VALUES):
                begins[value + 1] += begins[value]
            for i in range(n):
                value = (keys[order[i]] >> shift) & np.uint32(VALUES - 1)
                other[begins[value]] = order[i]
                begins[value] += 1
            order, other = other, order
        place, tokens = 0, 0
        while place < n and tokens + sizes[h, order[place]] <= room:
            tokens += sizes[h, order[place]]
            retrieved[h, order[place]] = True
            place += 1
        counts[h] = tokens
        for i in range(min(estimated.shape[1], n - place)):
            estimated[h, i] = order[place + i]
            log_counts[h, i] = np.log(np.float32(sizes[h, order[place + i]]))


@compiled
def _list(members: Any, apart: int, sizes: Any, retrieved: Any, first: int, empty: int, out: Any) -> None:
    heads, n = retrieved.shape
    for h in prange(heads):
        begins, counts = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
        begin, found, at, own = h * apart, np.uint64(0), np.uint64(0), out[h]
        for c in range(n):  # branch-free: unwanted clusters are overwritten
            begins[found], counts[found] = begin, sizes[h, c]
            begin += sizes[h, c]
            found += np.uint64(retrieved[h, c])
        for c in range(found):
            if c + AHEAD < found:
                prefetch(members, begins[c + AHEAD], counts[c + AHEAD])
            start = np.uint64(begins[c])
            for i in range(counts[c]):
                own[at + np.uint64(i)] = first + members[start + np.uint64(i)]
            at += np.uint64(counts[c])
        for i in range(at, len(own)):
            own[i] = empty


@compiled
def _resolve(
    tokens: Any, most: int, step: int, empty: int, resident: Any, used: Any, slots: Any, gone: Any, counts: Any
) -> None:
    heads, size = resident.shape
    for h in prange(heads):
        held, misses = np.full(most, empty, np.int32), 0  # the slot of each token
        for slot in range(size):
            if resident[h, slot] != empty:
                held[resident[h, slot]] = slot
        for i in range(tokens.shape[1]):
            slots[h, i] = empty
            if tokens[h, i] != empty:
                slots[h, i] = held[tokens[h, i]]
                if slots[h, i] == empty:
                    gone[0, h, misses] = i  # gone[1] is the slot that it gets
                    misses += 1
                else:
                    used[h, slots[h, i]] = step
        counts[h] = misses
        if misses == 0:
            continue
        begins, order = np.zeros(step + 2, np.int64), np.empty(size, np.int64)  # least recently read first
        for slot in range(size):
            begins[used[h, slot] + 1] += 1
        for when in range(step + 1):
            begins[when + 1] += begins[when]
        for slot in range(size):
            order[begins[used[h, slot]]] = slot
            begins[used[h, slot]] += 1
        for j in range(misses):
            i, slot = gone[0, h, j], order[j]
            resident[h, slot], used[h, slot], slots[h, i] = tokens[h, i], step, slot
            gone[0, h, j], gone[1, h, j] = tokens[h, i], slot


def cluster_loops_suit(members: Tensor) -> bool:
    """Return whether the CPU loops can divide clusters of these members.

    They do the work of twenty torch functions, so that they pay for fewer numbers than other loops.
    """
    return serves(members, dtype=torch.int32, numbers=8 * members.numel())


def weighed_cpu(scores: Tensor, sizes: Tensor) -> Tensor:
    """Sum the softmaxes of a group's scores over the clusters that have tokens."""
    heads, _, n = scores.shape
    weights, out = scores.new_empty(heads, n), scores.new_empty(heads, n)
    run(_weigh, scores.numel(), scores.contiguous(), sizes.contiguous(), weights, out)  # for vector loads
    return out


def divide_cpu(weights: Tensor, sizes: Tensor, room: int, follow: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mark the best clusters that fit into `room` tokens, and name the next `follow` with their log counts.

    Where fewer follow, missing ones count as -inf. Also returns how many tokens the marked clusters have.
    """
    (heads, _), retrieved = weights.shape, torch.empty(weights.shape, dtype=torch.bool)
    estimated, log_counts = torch.empty(heads, follow, dtype=torch.int64), weights.new_empty(heads, follow)
    counts = torch.empty(heads, dtype=torch.int64)
    bits = weights.view(torch.uint32)
    run(_divide, 8 * weights.numel(), bits, sizes, room, retrieved, estimated, log_counts, counts)
    return retrieved, estimated, log_counts, counts


def listed_cpu(members: Tensor, sizes: Tensor, retrieved: Tensor, counts: Tensor, first: int) -> Tensor:
    """List the tokens of the retrieved clusters, `counts` per head, numbered from `first`."""
    out = torch.empty(len(members), int(counts.max()), dtype=torch.int64)
    marks = retrieved.view(torch.uint8)
    run(_list, 8 * marks.numel(), flat(members), members.stride(0), sizes.contiguous(), marks, first, EMPTY, out)
    return out


def resolve_clusters_cpu(
    tokens: Tensor, length: int, step: int, resident: Tensor, used: Tensor
) -> tuple[Tensor, Misses]:
    """Find the slots of tokens below `length`, or EMPTY, in the cache, and assign slots to the missing ones.

    The least recently `used` tokens, at steps up to this one, make room; ties: the lower slot.
    """
    slots, gone = torch.empty_like(tokens), torch.empty(2, *tokens.shape, dtype=torch.int64)
    counts = torch.empty(len(tokens), dtype=torch.int64)
    run(_resolve, len(tokens) * length, tokens, length, step, EMPTY, resident, used, slots, gone, counts)
    return slots, list_misses(counts, gone[1], gone[0])


def spherical_kmeans(keys: Tensor, clusters: int, rounds: int) -> Tensor:
    """Divide keys [Hk, n, d] into `clusters`, some maybe empty, by `rounds` of k-means; return the clusters [Hk, n]."""
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
    """Sum vectors x [Hk, n, d] by their cluster [Hk, n], always in the same order: [Hk, clusters, d] in fp32."""
    members = cluster[:, None] == torch.arange(clusters, device=x.device)[:, None]  # [Hk, C, n]
    return members.float() @ x.float()


def _nearest(x: Tensor, centres: Tensor) -> Tensor:
    return (x @ centres.mT).argmax(-1)
