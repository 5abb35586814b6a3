"""The caches of a batch, side by side: one layer of all sequences in tensors whose shapes never change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.page_table import PagedKV, SlotLayout
from kvcli.kv.cache import NEVER, LayerCache, LayerSlots

if TYPE_CHECKING:
    from kvcli.models.rope import Rotary


@dataclass(frozen=True)
class BatchSlots:
    """A layer of b sequences: its rows, its other `tensors` [b, ...] by the names that the caches give them, and more.

    `seen` [b] int32 are the tokens of each sequence, of which the rows may hold less. `host` are the pages of layers
    that have any in host memory, `into` is the layout of the slots that they come into. Each sequence chooses once it
    has `active_from` tokens; `rotary` is the layer's rotation in it.
    """

    rows: PagedKV
    tensors: Mapping[str, Tensor]
    seen: Tensor
    host: HostPages | None
    into: SlotLayout
    active_from: Sequence[int]
    rotary: Sequence[Rotary | None] = ()

    @property
    def holds_all(self) -> bool:
        """Whether no sequence will ever have to choose."""
        return all(least == NEVER for least in self.active_from)

    @property
    def slots(self) -> PagedKV:
        """The rows that pages come into from the host."""
        if self.into == self.rows.layout:
            return self.rows
        rows, end = self.rows, self.into.total * self.into.size
        return PagedKV(rows.k[:, :, :end], rows.v[:, :, :end], rows.lengths, self.into, self.tensors["resident"])

    @property
    def by_position(self) -> PagedKV:
        """The rows, where they lie in place as slots of which every page has its own."""
        rows, size = self.rows, self.rows.layout.size
        if not rows.in_place:
            return rows
        return PagedKV(rows.k, rows.v, rows.lengths, SlotLayout.everything(rows.k.shape[2] // size, size))

    @classmethod
    def of(
        cls,
        caches: Sequence[LayerCache],
        parts: Sequence[LayerSlots],
        seen: Tensor,
        held: Tensor | None = None,
        rotary: Sequence[Rotary | None] = (),
    ) -> BatchSlots:
        """Take over the layer's cache of every sequence, which from then on is a view of this; `parts` are its slots.

        `seen` and, where it is less, `held` [b] int32 are what kernels will read; their values do not matter yet. A
        single sequence is not copied; of several, each cache is copied to its place and then freed.
        """
        kv = _side_by_side([part.kv for part in parts])  # [b, t, Hk, rows, d]
        tensors = {name: _side_by_side([part.tensors[name] for part in parts]) for name in parts[0].tensors}
        for row, (cache, part) in enumerate(zip(caches, parts, strict=True)):
            own = {name: tensors[name][row][_corner(x)] for name, x in part.tensors.items()}
            cache.adopt_slots(part._replace(kv=kv[row][_corner(part.kv)], tensors=own))
        longest = max((part.layout for part in parts), key=lambda layout: layout.total * layout.size)
        resident = tensors.get("resident") if longest.selected else None
        k, v = kv[:, 0], kv[:, -1]
        arrived = torch.zeros(k.shape[:2], dtype=torch.int32, device=k.device)
        rows = PagedKV(k, v, seen if held is None else held, longest, resident, parts[0].in_place, arrived)
        outgrown = longest.budget * longest.size + 1
        active_from = [outgrown if part.active_from is None else part.active_from for part in parts]
        return cls(rows, tensors, seen, _host_pages(parts, kv), parts[0].into or longest, active_from, rotary)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors whose sizes may differ; what is beyond the end of one is not initialised."""
    if len(parts) == 1:
        return parts[0][None]
    shapes = [part.shape for part in parts]
    batch = parts[0].new_empty(len(parts), *(max(sizes) for sizes in zip(*shapes, strict=True)))
    for target, part in zip(batch, parts, strict=True):
        target[_corner(part)] = part
    return batch


def _corner(part: Tensor) -> tuple[slice, ...]:
    """Where a tensor lies in a larger one."""
    return tuple(slice(size) for size in part.shape)


def _host_pages(parts: Sequence[LayerSlots], kv: Tensor) -> HostPages | None:
    pieces = [part.pieces for part in parts if part.pieces is not None]
    if not pieces:
        return None
    form, sizes = parts[0].format, [part.sizes for part in parts if part.sizes is not None]
    quantised = None if form is None else (form, kv.dtype)
    return HostPages.of(pieces, parts[0].host_layout, kv.device, quantised, torch.stack(sizes) if sizes else None)
