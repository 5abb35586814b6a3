"""Which selected pages are missing, and which resident ones make room for them.

Shapes: resident [Hk, k] and selected [Hk, k] hold page numbers; -1 in `resident` is an empty slot. A selection has no
duplicates and no -1, so every head has as many slots to free as pages to fetch.
"""

from typing import NamedTuple

from torch import Tensor


class Misses(NamedTuple):
    """Page `pages[i]` of head `heads[i]` belongs into slot `slots[i]`; all three are [m] int64."""

    heads: Tensor
    slots: Tensor
    pages: Tensor


def resolve_pages(resident: Tensor, selected: Tensor) -> Misses:
    """Pair the j-th missing page of a head with its j-th slot whose page left the selection."""
    same = resident[:, :, None] == selected[:, None, :]  # [Hk, slots, pages]
    heads, slots = (~same.any(2)).nonzero(as_tuple=True)
    missing = ~same.any(1)
    return Misses(heads, slots, selected[missing])
