"""The caches of a batch, side by side: one layer of all sequences in tensors whose shapes never change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.slot_layout import PagedKV
from kvcli.store.cache import LayerCache
from kvcli.store.layer_slots import LayerSlots


@dataclass(frozen=True)
class BatchSlots:
    """A layer of b sequences. bounds [b, Hk, n, 2, d] and the host's pages: of layers that retrieve."""

    rows: PagedKV
    bounds: Tensor | None
    host: HostPages | None

    @classmethod
    def of(cls, caches: Sequence[LayerCache], lengths: Tensor) -> BatchSlots:
        """Take over the layer's cache of every sequence, which from then on is a view of this.

        `lengths` [b] int32 is what kernels will read; its values do not matter yet. A single sequence is not copied;
        of several, each cache is copied to its place and then freed.
        """
        parts = [slots for slots in (cache.as_slots() for cache in caches) if slots is not None]
        if len(parts) < len(caches):
            raise ValueError(f"not all of {len(caches)} caches have slots")
        kv = _side_by_side([part.kv for part in parts])  # [b, 2, Hk, rows, d]
        longest = max(parts, key=lambda part: part.layout.total)
        resident = _if_all([part.resident for part in parts])
        bounds = _if_all([part.bounds for part in parts])
        for row, (cache, part) in enumerate(zip(caches, parts, strict=True)):
            moved = part._replace(
                kv=kv[row, :, :, : part.kv.shape[2]],
                resident=None if resident is None else resident[row],
                bounds=None if bounds is None or part.bounds is None else bounds[row, :, : part.bounds.shape[1]],
            )
            cache.adopt_slots(moved)
        rows = PagedKV(kv[:, 0], kv[:, 1], lengths, longest.layout, resident)
        return cls(rows, bounds, _host_pages(parts, kv.device))


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors whose second dimension from the end but one, of pages or rows, may differ."""
    if len(parts) == 1:
        return parts[0][None]
    shapes = [part.shape for part in parts]
    batch = parts[0].new_empty(len(parts), *(max(sizes) for sizes in zip(*shapes, strict=True)))
    for target, part in zip(batch, parts, strict=True):
        target[tuple(slice(size) for size in part.shape)] = part
    return batch


def _if_all(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return _side_by_side(present) if present else None


def _host_pages(parts: Sequence[LayerSlots], device: torch.device) -> HostPages | None:
    pieces = [part.pieces for part in parts if part.pieces is not None]
    return HostPages.of(pieces, parts[0].host_layout, device) if pieces else None
