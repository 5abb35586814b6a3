"""The k best of each row on a CPU, ties to the lower index: what `kvcli.kernels.topk` selects, by halving.

A float's bits, turned so that they rise with it, are found bit by bit, the highest first: how many keys are not below
a bound says whether the k-th best is. After some bits only the few that share them are looked at again.

Shapes: scores [Hk, n] fp32, 1 <= k <= n -> [Hk, k] int64, ascending.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._masks import above, at_least, first_one, ones, without_first
from kvcli.kernels._numba import compiled, inlined, prange, run, serves
from kvcli.kernels._vectors import LOT

AT_ONCE = 11  # bits that are found of one set of keys

KEY = 64  # numbers that a score is made of, about
LOOKS = 4  # and how many numbers could be read while one is looked at so often

_NO_NAMES = np.empty((0, 0), np.int64)


@inlined
def kth_best(keys: Any, bits: int, wanted: int) -> tuple[int, int]:
    """Find the `wanted`-th best of keys of so many `bits`, and how many that equal it belong to the best."""
    best = 0
    while bits > 0:
        rest, better = max(0, bits - AT_ONCE), 0
        while bits > rest:
            bits -= 1
            bound, count = best | 1 << bits, 0
            for j in range(0, len(keys), LOT):
                count += ones(at_least(keys, j, bound))
            if count >= wanted:
                best = bound
            else:
                better = count
        wanted -= better
        if rest:
            keys = _between(keys, best, best | (1 << rest) - 1)
    return best, wanted


@inlined
def _between(keys: Any, least: int, most: int) -> Any:
    """List the keys that are neither below `least` nor above `most`."""
    taken, at = np.empty(len(keys), keys.dtype), 0
    for j in range(0, len(keys), LOT):
        mask = at_least(keys, j, least) & ~above(keys, j, most)
        while mask:
            taken[np.uint64(at)] = keys[np.uint64(j + first_one(mask))]
            mask = without_first(mask)
            at += 1
    return taken[:at]


@inlined
def places_of(keys: Any, least: int, wanted: int, out: Any) -> None:
    """List where the keys are that exceed the `least`, and the `wanted` first that equal it: as many as `out` takes."""
    at, j = 0, 0
    while at < len(out):
        mask = above(keys, j, least)
        equal = at_least(keys, j, least) & ~mask if wanted else np.uint64(0)
        while equal and wanted:
            mask |= equal & ~without_first(equal)
            equal = without_first(equal)
            wanted -= 1
        while mask:
            out[np.uint64(at)] = j + first_one(mask)
            mask = without_first(mask)
            at += 1
        j += LOT


@compiled
def _select(bits: Any, k: int, names: Any, first: int, out: Any) -> None:
    heads, n = bits.shape
    for h in prange(heads):
        keys, taken = np.empty(n, np.uint32), out[h]  # keys rise with the scores
        for i in range(n):
            b = np.uint32(bits[h, i])
            b = np.uint32(0) if b == np.uint32(0x80000000) else b  # minus zero equals zero
            keys[i] = b ^ (np.uint32(0x80000000) | np.uint32(np.int32(b) >> np.int32(31)))
        best, wanted = kth_best(keys, 32, k)
        places_of(keys, best, wanted, taken)
        for i in range(k):
            taken[i] = first + (names[h, taken[i]] if len(names) else taken[i])


def suits(scores: Tensor) -> bool:
    """Tell whether this can select by these scores; keys that were scored have kept a loop busy before."""
    return serves(scores, numbers=KEY * scores.numel())


def select_best(scores: Tensor, k: int, names: Tensor | None = None, first: int = 0) -> Tensor:
    """Select the k best of each row: by their places in it or by their `names` [Hk, n], counted from the `first`."""
    out = torch.empty(scores.shape[0], k, dtype=torch.int64)
    bits, known = scores.contiguous().view(torch.int32), _NO_NAMES if names is None else names.contiguous()
    run(_select, LOOKS * scores.numel(), bits, k, known, first, out)
    return out
