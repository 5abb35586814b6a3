"""Which selected tokens are missing, and which slots make room for them, in loops on a CPU: one look at each.

Shapes: resident [Hk, S] and selected [Hk, k] int64, tokens or pages below n; EMPTY is none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, prange, run, run_alone, serial, serves
from kvcli.kernels.resolve_pages import Misses
from kvcli.kernels.slot_layout import EMPTY

ASKED, HERE = 1, 2  # what is known of a token


@compiled
def _resolve(resident: Any, selected: Any, n: int, empty: int, tokens: Any, slots: Any, out: Any) -> None:
    heads, size = resident.shape
    for h in prange(heads):
        known = np.zeros(n, np.uint8)
        for i in range(selected.shape[1]):
            if selected[h, i] != empty:
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
            if token != empty and known[token] == ASKED:
                tokens[h, missing] = resident[h, slots[h, missing]] = token
                missing += 1
        out[h] = missing


@serial
def _list(counts: Any, slots: Any, pages: Any, out: Any) -> int:
    at = 0
    for h in range(len(counts)):
        for i in range(counts[h]):
            out[0, at], out[1, at], out[2, at] = h, slots[h, i], pages[h, i]
            at += 1
    return at


@serial
def _place(resident: Any, wanted: Any, n: int, empty: int, chosen: Any, missing: Any) -> int:
    place, taken = np.empty(n, np.int32), np.zeros(len(resident), np.uint8)
    for i in range(len(wanted)):
        place[wanted[i]] = i
        chosen[i] = empty
    for slot in range(len(resident)):
        page = resident[slot]
        if page != empty:
            i = place[page]  # of a page that is not wanted, any number
            if 0 <= i < len(wanted) and wanted[i] == page:
                chosen[i] = slot
                taken[slot] = 1
    count, slot = 0, 0
    for i in range(len(wanted)):
        if chosen[i] == empty:
            while taken[slot]:
                slot += 1
            chosen[i] = slot
            missing[count] = i
            count += 1
            slot += 1
    return count


def suits(resident: Tensor, selected: Tensor, length: int) -> bool:
    """Tell whether loops serve for these, in a context of so many tokens."""
    return serves(resident, selected, dtype=torch.int64, numbers=len(resident) * length)


def resolve(resident: Tensor, selected: Tensor, length: int) -> Misses:
    """Pair missing tokens with slots that are free, the first ones first, and put them into `resident`."""
    counts = torch.empty(len(resident), dtype=torch.int64)
    tokens, slots = torch.empty(2, *selected.shape, dtype=torch.int64)
    run(_resolve, 8 * resident.numel(), resident, selected, length, EMPTY, tokens, slots, counts)
    return listed(counts, slots, tokens)


def listed(counts: Tensor, slots: Tensor, pages: Tensor) -> Misses:
    """List the first `counts` [Hk] of slots and pages [Hk, k] of each head."""
    out = torch.empty(3, slots.numel(), dtype=torch.int64)
    found = out[:, : run_alone(_list, counts, slots, pages, out)]
    return Misses(found[0], found[1], found[2])


def place(resident: Tensor, wanted: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Do as `kvcli.kernels.resolve_pages.place_pages`, with pages below n."""
    chosen, missing = torch.empty(2, wanted.shape[0], dtype=torch.int64)
    count = run_alone(_place, resident, wanted, n, EMPTY, chosen, missing)
    return chosen, missing[:count]
