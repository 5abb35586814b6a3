"""What a step decides about clusters and a cache of tokens, in loops on a CPU: `kvcli.store.wave_index` says what.

torch sorts all clusters and all slots for it, and looks at every token several times.

    divide     weights [Hk, C] fp32, none below 0, sizes [Hk, C] int32 -> clusters read, and estimated, bool [Hk, C]
    marked     cluster [Hk, n] int32, clusters read [Hk, C] -> tokens, bool [Hk, n]
    listed     marks [Hk, n], the first of them token `first` -> tokens [Hk, m] int64, EMPTY behind, and how many [Hk]
    resolve    tokens, resident and used [Hk, S] int64 -> slots [Hk, m] int64, and those that were missing
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, prange, run, serves
from kvcli.kernels.resolve_pages import Misses
from kvcli.kernels.resolve_rows import listed as list_misses
from kvcli.kernels.slot_layout import EMPTY

DIGITS, VALUES = 3, 1 << 11  # of a float's bits
PIECE = 1 << 14  # tokens that a thread takes at once


@compiled
def _divide(bits: Any, sizes: Any, room: int, follow: int, retrieved: Any, estimated: Any) -> None:
    heads, n = bits.shape
    for h in prange(heads):
        keys, order, other = np.empty(n, np.uint32), np.empty(n, np.int64), np.empty(n, np.int64)
        for i in range(n):
            keys[i], order[i] = ~np.uint32(bits[h, i]), i  # the best first; of equals the lower one
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
        for i in range(place, min(n, place + follow)):
            estimated[h, order[i]] = True


@compiled
def _mark(cluster: Any, retrieved: Any, out: Any) -> None:
    heads, n = cluster.shape
    pieces = (n + PIECE - 1) // PIECE
    for piece in prange(heads * pieces):
        h, first = piece // pieces, piece % pieces * PIECE
        for j in range(first, min(first + PIECE, n)):
            out[h, j] = retrieved[h, cluster[h, j]]


@compiled
def _count(marks: Any, out: Any) -> None:
    for h in prange(len(marks)):
        total = 0
        for j in range(marks.shape[1]):
            total += marks[h, j]
        out[h] = total


@compiled
def _list(marks: Any, first: int, empty: int, out: Any) -> None:
    for h in prange(len(marks)):
        at = 0
        for j in range(marks.shape[1]):
            if marks[h, j]:
                out[h, at] = first + j
                at += 1
        out[h, at:] = empty


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
        begins, order = np.zeros(step + 2, np.int64), np.empty(size, np.int64)  # what was read longest ago first
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


def suits(cluster: Tensor) -> bool:
    """Tell whether loops can divide the clusters of these tokens."""
    return serves(cluster, dtype=torch.int32)


def suits_marks(marks: Tensor) -> bool:
    """Tell whether loops can look for the tokens marked."""
    return serves(marks, dtype=torch.bool)


def divide(weights: Tensor, sizes: Tensor, room: int, follow: int) -> tuple[Tensor, Tensor]:
    """Mark the best clusters that have `room` tokens together, and the next `follow`."""
    retrieved, estimated = (torch.zeros(weights.shape, dtype=torch.bool) for _ in range(2))
    run(_divide, 8 * weights.numel(), weights.view(torch.uint32), sizes, room, follow, retrieved, estimated)
    return retrieved, estimated


def marked(cluster: Tensor, retrieved: Tensor) -> Tensor:
    """Mark the tokens of the retrieved clusters."""
    out = torch.empty(cluster.shape, dtype=torch.bool)
    run(_mark, cluster.numel(), cluster, retrieved, out)
    return out


def listed(marks: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """List the marked tokens of each head, numbered from `first`, and say how many they are."""
    counts = torch.empty(len(marks), dtype=torch.int64)
    run(_count, marks.numel(), marks, counts)
    out = torch.empty(len(marks), int(counts.max()), dtype=torch.int64)
    run(_list, marks.numel(), marks, first, EMPTY, out)
    return out, counts


def resolve(tokens: Tensor, length: int, step: int, resident: Tensor, used: Tensor) -> tuple[Tensor, Misses]:
    """Find tokens below `length`, or EMPTY, in the slots of the cache, and give slots to those that are missing.

    What was `used` least recently, at steps up to this one, makes room, of equals the lower slot.
    """
    slots, gone = torch.empty_like(tokens), torch.empty(2, *tokens.shape, dtype=torch.int64)
    counts = torch.empty(len(tokens), dtype=torch.int64)
    run(_resolve, len(tokens) * length, tokens, length, step, EMPTY, resident, used, slots, gone, counts)
    return slots, list_misses(counts, gone[1], gone[0])
