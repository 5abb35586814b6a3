"""The k best of each row on a CPU, ties to the lower index: what `kvcli.kernels.topk` selects, by digits.

A float's bits, turned so that they rise with it, are looked at digit by digit, the highest first: how often each
occurs says which one the k-th best has, and only the few that share it are looked at again.

Shapes: scores [Hk, n] fp32, 1 <= k <= n -> [Hk, k] int64, ascending.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, inlined, prange, run, serves

TOP = 11  # bits of a number that are looked at first
DIGIT = 8  # and of those that share them

KEY = 64  # numbers that a score is made of, about

_NO_NAMES = np.empty((0, 0), np.int64)


@inlined
def digit_of(counts: Any, wanted: int) -> tuple[int, int]:
    """Find the digit of the `wanted`-th best, and how many are wanted of those that have it."""
    digit = len(counts) - 1
    while counts[digit] < wanted:
        wanted -= counts[digit]
        digit -= 1
    return digit, wanted


@inlined
def places_of(keys: Any, first: int, n: int, least: Any, wanted: int, count: int) -> Any:
    """List where those of n keys are that exceed the `least`, and the `wanted` first that equal it: `count` in all.

    What is to be taken stays where the next one overwrites all else: no branch could be foretold.
    """
    begin, at, j = np.uint64(first), np.uint64(0), np.uint64(0)
    taken = np.empty(count + 1, np.int64)
    while wanted > 0:
        key = keys[begin + j]
        taken[at] = j
        at += np.uint64(key >= least)
        wanted -= key == least
        j += np.uint64(1)
    for i in range(j, n):
        taken[at] = i
        at += np.uint64(keys[begin + np.uint64(i)] > least)
    return taken[:count]


@inlined
def _kth_best(keys: Any, counts: Any, wanted: int) -> tuple[Any, int]:
    """Find the k-th best key by the `counts` of top digits, and how many equal ones belong to the k best."""
    digit, wanted = digit_of(counts, wanted)
    shift, best = np.uint32(32 - TOP), np.uint32(digit)
    near: Any = np.empty(counts[digit] + 1, np.uint32)
    n = np.uint64(0)
    for i in range(len(keys)):  # here and below without branches, as in `places_of`
        near[n] = keys[np.uint64(i)]
        n += np.uint64(near[n] >> shift == best)
    counts = np.empty(1 << DIGIT, np.int64)
    while shift > 0:
        width = min(np.uint32(DIGIT), shift)
        shift -= width
        mask = (np.uint32(1) << width) - np.uint32(1)
        counts[:] = 0
        for i in range(n):
            counts[np.uint64((near[np.uint64(i)] >> shift) & mask)] += 1
        digit, wanted = digit_of(counts[: np.int64(mask) + 1], wanted)
        best, left = best << width | np.uint32(digit), np.uint64(0)
        for i in range(n):
            near[left] = near[np.uint64(i)]
            left += np.uint64((near[left] >> shift) & mask == np.uint32(digit))
        n = left
    return best, wanted


@compiled
def _select(bits: Any, k: int, names: Any, first: int, out: Any) -> None:
    heads, n = bits.shape
    for h in prange(heads):
        keys, counts = np.empty(n, np.uint32), np.zeros(1 << TOP, np.int64)  # keys rise with the scores
        for i in range(n):
            b = np.uint32(bits[h, i])
            b = np.uint32(0) if b == np.uint32(0x80000000) else b  # minus zero equals zero
            keys[i] = b ^ (np.uint32(0x80000000) | np.uint32(np.int32(b) >> np.int32(31)))
            counts[np.uint64(keys[i] >> np.uint32(32 - TOP))] += 1
        best, wanted = _kth_best(keys, counts, k)
        taken = places_of(keys, 0, n, best, wanted, k)
        for i in range(k):
            out[h, i] = first + (names[h, taken[i]] if len(names) else taken[i])


def suits(scores: Tensor) -> bool:
    """Tell whether this can select by these scores; keys that were scored have kept a loop busy before."""
    return serves(scores, numbers=KEY * scores.numel())


def select_best(scores: Tensor, k: int, names: Tensor | None = None, first: int = 0) -> Tensor:
    """Select the k best of each row: by their places in it or by their `names` [Hk, n], counted from the `first`."""
    out = torch.empty(scores.shape[0], k, dtype=torch.int64)
    bits, known = scores.contiguous().view(torch.int32), _NO_NAMES if names is None else names.contiguous()
    run(_select, scores.numel(), bits, k, known, first, out)
    return out
