"""The k best of each row on a CPU, ties to the lower index: what `kvcli.kernels.topk` selects, by digits.

A float's bits, turned so that they rise with it, are looked at eleven at a time, the highest first: how often each
digit occurs says which one the k-th best has, and only those that share it are looked at again.

Shapes: scores [Hk, n] fp32, 1 <= k <= n -> [Hk, k] int64, ascending.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, prange, run, serves

DIGITS = ((21, 11), (10, 11), (0, 10))  # of 32 bits: where each begins, and how many bits it has
SHORT_DIGITS = ((24, 8), (16, 8), (8, 8), (0, 8))
SHORT = 1 << 13  # numbers in a row, for fewer of which more digits are looked at, and less is counted for each

KEY = 64  # numbers that a score is made of, about

_DIGITS, _SHORT_DIGITS = ([np.array(x) for x in zip(*each, strict=True)] for each in (DIGITS, SHORT_DIGITS))

_NO_NAMES = np.empty((0, 0), np.int64)


@compiled
def _select(bits: Any, k: int, shifts: Any, widths: Any, names: Any, first: int, out: Any) -> None:
    heads, n = bits.shape
    for h in prange(heads):
        keys = np.empty(n, np.uint32)  # rise with the scores
        for i in range(n):
            b = np.uint32(bits[h, i])
            b = np.uint32(0) if b == np.uint32(0x80000000) else b  # minus zero equals zero
            keys[i] = ~b if b >> np.uint32(31) else b | np.uint32(0x80000000)
        wanted, prefix, known = k, np.uint32(0), np.uint32(0)  # `known`: the bits that `prefix` has
        for digit in range(len(shifts)):
            shift, mask = np.uint32(shifts[digit]), np.uint32((1 << widths[digit]) - 1)
            counts = np.zeros(1 << widths[digit], np.int64)
            for i in range(n):
                if keys[i] & known == prefix:
                    counts[(keys[i] >> shift) & mask] += 1
            value = len(counts) - 1
            while counts[value] < wanted:
                wanted -= counts[value]
                value -= 1
            prefix |= np.uint32(value) << shift
            known |= mask << shift
        # `prefix` is the k-th best now, and `wanted` are still to be taken of those that equal it.
        at = 0
        for i in range(n):
            if keys[i] > prefix or (keys[i] == prefix and wanted > 0):
                wanted -= keys[i] == prefix
                out[h, at] = first + (names[h, i] if len(names) else i)
                at += 1


def suits(scores: Tensor) -> bool:
    """Tell whether this can select by these scores; keys that were scored have kept a loop busy before."""
    return serves(scores, numbers=KEY * scores.numel())


def select_best(scores: Tensor, k: int, names: Tensor | None = None, first: int = 0) -> Tensor:
    """Select the k best of each row: by their places in it or by their `names` [Hk, n], counted from the `first`."""
    out = torch.empty(scores.shape[0], k, dtype=torch.int64)
    digits = _SHORT_DIGITS if scores.shape[1] < SHORT else _DIGITS
    bits, known = scores.contiguous().view(torch.int32), _NO_NAMES if names is None else names.contiguous()
    run(_select, scores.numel(), bits, k, *digits, known, first, out)
    return out
