"""Recall back ends: how missing pages come from host memory into their slots.

`gather`: a kernel reads pinned memory; the host does not know what is missing, so a step can be a CUDA graph. Where
attention waits for the pages, its own kernel reads them if it can (`kvcli.kernels.paged_attention.can_bring`).
`copy`: FreeKV's streamed recall (arXiv 2505.13109, section 4.3): the host reads what is missing and issues one
asynchronous copy per page into a staging buffer, from which it goes to its slot. With two buffers a page lands while
the previous one is put in place; with one, each waits for the other. In NHD, where a page of a KV head lies in 2*p
pieces, it takes as many copies.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.page_table import MissList, PagedKV
from kvcli.kernels.recall import PROGRAMS, HostPages, gather_pages
from kvcli.methods.step import FromHost


class Recall(Protocol):
    """A back end that fetches pages."""

    waits_for_device: bool
    """Whether the host needs to know what is missing, so that a step cannot be captured."""

    def __call__(self, host: HostPages, misses: MissList, rows: PagedKV) -> None:
        """Fetch the pages that `misses` lists; later work on the current stream finds them in their slots."""


class Gather(Recall):
    """One kernel for all misses of a layer."""

    waits_for_device = False

    @override
    def __call__(self, host: HostPages, misses: MissList, rows: PagedKV) -> None:
        gather_pages(host, misses, rows, PROGRAMS)


class Copy(Recall):
    """One copy per page, or per piece of it."""

    waits_for_device = True

    def __init__(self, double_buffer: bool):
        self.turns = 2 if double_buffer else 1
        self.staging: list[Tensor] = []  # blocks [2, p, d], used in turns
        self.landed: list[torch.cuda.Event] = []
        self.free: list[torch.cuda.Event] = []
        self.stream: torch.cuda.Stream | None = None

    @override
    def __call__(self, host: HostPages, misses: MissList, rows: PagedKV) -> None:
        # Waits until the device knows what is missing.
        counts, pages, slots = (x.tolist() for x in (misses.counts, misses.pages, misses.slots))
        self._prepare(rows)
        size, sink, turn = rows.layout.size, rows.layout.sink, 0
        for b, heads in enumerate(counts):
            for h, count in enumerate(heads):
                for page, slot in zip(pages[b][h][:count], slots[b][h][:count], strict=True):
                    block = self._fetch(host.block(b, page, h), turn % self.turns)
                    at = (sink + slot) * size
                    rows.k[b, h, at : at + size] = block[0]
                    rows.v[b, h, at : at + size] = block[1]
                    self._release(turn % self.turns)
                    turn += 1

    def _prepare(self, rows: PagedKV) -> None:
        if self.staging:
            return
        self.staging = [rows.k.new_empty(2, rows.layout.size, rows.k.shape[3]) for _ in range(self.turns)]
        if rows.k.is_cuda:
            self.stream = torch.cuda.Stream(rows.k.device)  # type: ignore[no-untyped-call]
            self.landed = [torch.cuda.Event() for _ in range(self.turns)]  # type: ignore[no-untyped-call]
            self.free = [torch.cuda.Event() for _ in range(self.turns)]  # type: ignore[no-untyped-call]

    def _fetch(self, block: Tensor, turn: int) -> Tensor:
        """Copy a block [2, p, d] from the host; later work on the current stream finds it in place."""
        staged = self.staging[turn]
        if self.stream is None:
            return staged.copy_(block)
        self.stream.wait_event(self.free[turn])  # a wait for an event that was never recorded returns at once
        with torch.cuda.stream(self.stream):
            if block.is_contiguous():
                staged.copy_(block, non_blocking=True)
            else:  # one copy per piece: torch would gather a block with gaps on the host first, and wait
                for target, source in zip(staged.flatten(0, 1), block.flatten(0, 1), strict=True):
                    target.copy_(source, non_blocking=True)
            self.landed[turn].record()
        torch.cuda.current_stream(staged.device).wait_event(self.landed[turn])
        return staged

    def _release(self, turn: int) -> None:
        if self.stream is not None:
            self.free[turn].record()


def recall_of(fetch: FromHost) -> Recall:
    """Choose the back end that a plan names."""
    return Gather() if fetch.recall == "gather" else Copy(fetch.double_buffer)
