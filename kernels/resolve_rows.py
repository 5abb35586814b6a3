"""Which selected tokens are missing, and which slots make room for them, in loops on a CPU: one look at each.

Shapes: resident [Hk, S] and selected [Hk, k] int64, tokens below n; EMPTY in `resident` is an empty slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, prange, run, serves
from kvcli.kernels.resolve_pages import Misses
from kvcli.kernels.slot_layout import EMPTY

ASKED, HERE = 1, 2  # what is known of a token


@compiled
def _resolve(resident: Any, selected: Any, n: int, empty: int, tokens: Any, slots: Any, out: Any) -> None:
    heads, size = resident.shape
    for h in prange(heads):
        known = np.zeros(n, np.uint8)
        for i in range(selected.shape[1]):
            known[selected[h, i]] = ASKED
        free = 0
        for slot in range(size):
            token = resident[h, slot]
            if token != empty and known[token] == ASKED:
                known[token] = HERE
            else:
                resident[h, slot] = empty
                if free < selected.shape[1]:
                    slots[h, free] = slot
                    free += 1
        missing = 0
        for i in range(selected.shape[1]):
            token = selected[h, i]
            if known[token] == ASKED:
                tokens[h, missing] = resident[h, slots[h, missing]] = token
                missing += 1
        out[h] = missing


def suits(resident: Tensor, selected: Tensor, length: int) -> bool:
    """Tell whether loops serve for these, in a context of so many tokens."""
    return serves(resident, selected, dtype=torch.int64, numbers=len(resident) * length)


def resolve(resident: Tensor, selected: Tensor, length: int) -> Misses:
    """Pair missing tokens with slots that are free, the first ones first, and put them into `resident`."""
    counts = torch.empty(len(resident), dtype=torch.int64)
    tokens, slots = torch.empty(2, *selected.shape, dtype=torch.int64)
    run(_resolve, 8 * resident.numel(), resident, selected, length, EMPTY, tokens, slots, counts)
    return Misses.first_of(counts, slots, tokens)
