"""The k largest scores of a row, inside a kernel: one program finds them, ties to the lower entry.

Scores are read as integers of the same order; the largest threshold that k of them reach is found by digits of eight
bits, each from a histogram of those that agree with it so far, and then everything above it is taken, and of what
equals it the lowest entries.
"""

from __future__ import annotations

from kvcli.kernels._triton import jit, tl

BLOCK = 2048  # scores that a program looks at together


@jit
def _ordered(scores: tl.tensor) -> tl.tensor:
    """Turn fp32 into int32 of the same order; both zeros are one."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _entries(row: tl.tensor, names: tl.tensor, entry: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Read scores as ordered integers, and say which of these entries are any."""
    there = entry < high
    if names is not None:
        there = there & (tl.load(names + entry, mask=there, other=-1) >= 0)
    return _ordered(tl.load(row + entry, mask=there, other=0.0)), there


@jit
def _threshold(
    row: tl.tensor,
    names: tl.tensor,
    marks: tl.tensor,
    which: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    k: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Find the k-th largest of entries low .. high, of those alone whose mark is `which`; and how many equals it has
    among the k largest.
    """
    found = tl.zeros([1], tl.int32)
    room = tl.maximum(k, 0)
    digits = tl.arange(0, 256)
    for digit in range(4):
        shift = 24 - 8 * digit
        flip = tl.where(digit == 0, 128, 0)  # the sign's bit counts the other way round
        counts = tl.zeros([256], tl.int32)
        for start in range(low, high, BLOCK_N):
            entry = start + tl.arange(0, BLOCK_N)
            key, there = _entries(row, names, entry, high)
            if marks is not None:
                there = there & (tl.load(marks + entry, mask=there, other=-1) == which)
            there = there & ((digit == 0) | (((key ^ found) >> shift) >> 8 == 0))  # so far the threshold's digits
            counts += tl.histogram(((key >> shift) & 255) ^ flip, 256, mask=there)
        reach = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts  # entries of this digit or a larger one
        room = tl.minimum(room, tl.sum(counts, axis=0))  # there may be less than k
        best = tl.sum((reach >= room).to(tl.int32), axis=0) - 1
        room -= tl.sum(tl.where(digits == best, reach - counts, 0), axis=0)
        found |= (best ^ flip) << shift
    return tl.sum(found, axis=0), room


@jit
def _mark(
    row: tl.tensor,
    marks: tl.tensor,
    resident: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Mark the best entries, FIRST of them, and what is resident, with 1 and all others with 0; gives their number."""
    threshold, room = _threshold(row, None, None, 0, low, high, FIRST, BLOCK_N)
    equal = 0
    for start in range(low, high, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        key, there = _entries(row, None, entry, high)
        tie = ((key == threshold) & there).to(tl.int32)
        best = ((key > threshold) & there) | ((tie == 1) & (equal + tl.cumsum(tie, axis=0) <= room))
        tl.store(marks + entry, best.to(tl.int8), mask=there)
        equal += tl.sum(tie, axis=0)
    tl.debug_barrier()
    page = tl.load(resident + tl.arange(0, BLOCK_K), mask=tl.arange(0, BLOCK_K) < K, other=-1)
    tl.store(marks + page, tl.full([BLOCK_K], 1, tl.int8), mask=(page >= low) & (page < high))
    tl.debug_barrier()
    count = 0
    for start in range(low, high, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        count += tl.sum(tl.load(marks + entry, mask=entry < high, other=0).to(tl.int32), axis=0)
    return count


@jit
def pick(
    row: tl.tensor,
    names: tl.tensor,
    marks: tl.tensor,
    resident: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    k: tl.tensor,
    selected: tl.tensor,
    best: tl.tensor,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Choose k of the entries low .. high of a row of scores: pages, or what `names` calls them, where it does.

    Writes what was chosen to `selected` [K], in ascending order, and its scores to `best` where there is one.
    """
    which, room = 0, k  # those of which mark compete for how many places
    if FIRST:
        count = _mark(row, marks, resident, low, high, K, FIRST, BLOCK_K, BLOCK_N)
        which = (count >= k).to(tl.int32)
        room = tl.where(which == 1, k, k - count)
        threshold, room = _threshold(row, names, marks, which, low, high, room, BLOCK_N)
    else:
        threshold, room = _threshold(row, names, None, 0, low, high, room, BLOCK_N)
    taken, equal = 0, 0
    for start in range(low, high, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        key, there = _entries(row, names, entry, high)
        competes = there
        if FIRST:
            mark = tl.load(marks + entry, mask=there, other=-1)
            competes = there & (mark == which)
        tie = ((key == threshold) & competes).to(tl.int32)
        chosen = ((key > threshold) & competes) | ((tie == 1) & (equal + tl.cumsum(tie, axis=0) <= room))
        if FIRST:
            chosen = chosen | (there & (mark > which))  # those marked, where they need not compete
        place = taken + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        page = entry
        if names is not None:
            page = tl.load(names + entry, mask=chosen, other=-1)
        tl.store(selected + place, page.to(selected.dtype.element_ty), mask=chosen)
        if best is not None:
            tl.store(best + place, tl.load(row + entry, mask=chosen, other=0.0), mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), axis=0)
        equal += tl.sum(tie, axis=0)
    rest = tl.arange(0, BLOCK_K)
    tl.store(selected + rest, -1, mask=(rest >= taken) & (rest < K))
