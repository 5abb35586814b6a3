"""A layer whose keys are low-rank factors on the device and whose values lie in host memory (ShadowKV, section 4.1).

The rows on the device, k and v [Hk, rows, d], are in this order, and those that hold tokens are always a prefix:

    [ outlier chunks | selected chunks, one set a KV head | local chunks, the partly filled one last | generated ]

The keys of the selected chunks are rebuilt, all others are exact. A short context is not divided so: row j holds token
j until there are more full chunks than places for them. Over slots the local chunks of a rolling window lie in a ring,
with one place more for the chunk that is being filled: no row moves (`ShadowLayout.ring`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.page_table import EMPTY, Misses, SlotLayout, resolve_pages, slot_of_page
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import NEVER, LayerCache, LayerSlots, ResidentCache, Tiers, token_mask
from kvcli.kv.pages import paged, take
from kvcli.memory.disk_blocks import DiskBlocks
from kvcli.memory.host_pool import page_pool
from kvcli.memory.tiers import Footprint, Traffic, nbytes
from kvcli.models.geometry import LayerGeometry
from kvcli.store.landmarks import Landmarks
from kvcli.store.low_rank import LowRankKeys
from kvcli.store.shadow_layout import ShadowLayout

if TYPE_CHECKING:
    from kvcli.models.rope import Rotary


class ShadowCache(ResidentCache):
    """The chunks before the local window: values in host memory, low-rank keys and landmarks on the device.

    Also on the device are the rows, and `resident` [Hk, selected], the chunk in each selected slot, or EMPTY. `prompt`
    is the length of the prompt where it is known; else there is room for any split of `capacity`.
    """

    def __init__(
        self,
        layer: LayerGeometry,
        capacity: int,
        prompt: int | None,
        layout: ShadowLayout,
        rotary: Rotary | None,
        tiers: Tiers,
    ):
        heads, d = layer.num_kv_heads, layer.head_dim
        num_chunks = layout.stored(capacity, capacity if prompt is None else prompt)
        self.divides = layout.divides_between(0 if prompt is None else prompt, capacity)  # unless the prompt was longer
        super().__init__(heads, d, layout.rows(capacity, 0 if prompt is None else prompt), tiers)
        self.layout, self.selected = layout, layout.selected  # chunks that a step selects
        self.num_chunks = 0  # those before the local window; none until the context is divided
        self.divided_at = 0  # tokens seen when it was divided
        self.resident = tiers.on_device(heads, layout.selected, dtype=torch.int64)  # chunk in each selected slot
        self.keys = LowRankKeys((heads, d), layout.size, num_chunks, layout.rank, rotary, tiers, bool(layout.refresh))
        self.landmarks = Landmarks(heads, d, num_chunks, tiers)
        self.values = page_pool(heads, d, layout.size, num_chunks, tiers, tensors=1, kept=1)

    @property
    def active(self) -> bool:
        """Tell whether the context is divided, so that chunks have to be selected."""
        return self.num_chunks > 0

    @override
    def share(self, other: LayerCache, tokens: int) -> None:
        assert isinstance(other, ShadowCache)
        self.values.share(other.values, max(0, tokens // self.layout.size - self.layout.local))

    @property
    @override
    def disk(self) -> DiskBlocks | None:
        return self.values.on_disk

    @override
    def waiting(self) -> Sequence[Tensor]:
        return self.kv, self.keys.a, self.landmarks.means

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        k, v = self.layout.rounded(k), self.layout.rounded(v)
        self.length = k.shape[1]
        if self.layout.active(self.length):
            return self._divide(k, v)
        self._fill(0, k, v)
        return 0

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        """Store the current token; with a rolling window, the chunk that leaves it goes to the host."""
        self._fill(self._held, self.layout.rounded(k)[:, None], self.layout.rounded(v)[:, None])
        self.length += 1
        if not self.layout.rolling:
            return 0
        if not self.active:
            if not self.layout.active(self.length):
                return 0
            return self._divide(self.k[:, : self.length].clone(), self.v[:, : self.length].clone())
        written = 0
        if self.length // self.layout.size - self.num_chunks > self.layout.local:
            written = self._offload_oldest()
        if self.layout.refresh and (self.length - self.divided_at) % self.layout.refresh == 0:
            self._refresh()
        return written

    @property
    def candidates(self) -> range:
        """Chunks that are scored: those before the local window, outliers among them, which score lowest."""
        return range(self.num_chunks)

    def recall(self, selected: Tensor) -> tuple[list[int], int]:
        """Bring the missing chunks of `selected` [Hk, k] to the device: values from the host, keys rebuilt.

        The device rebuilds the keys while the host gathers the values. Returns the misses of each KV head and the bytes
        moved.
        """
        misses = resolve_pages(self.resident, selected)
        on_host = misses.pages.to("cpu"), misses.heads.to("cpu")  # waits for the device, before it is given more work
        self.keys.rebuild_missing(misses, self._slots(self.k))
        values = self.values.fetch(*on_host)[:, 0]  # [m, c, d]
        self._slots(self.v)[misses.heads, misses.slots] = values
        self.resident[misses.heads, misses.slots] = misses.pages
        return misses.by_head(len(selected)), len(values) * self.values.block_bytes

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        return decode_attention(q, self.k[:, : self._held], self.v[:, : self._held], softmax)

    @override
    def attended(self) -> Tensor:
        if not self.active:
            return token_mask(self.k, self.length, range(self.length))
        mask = token_mask(self.k, self.length, range(self.num_chunks * self.layout.size, self.length))
        outliers = self.landmarks.excluded[:, : self.num_chunks]
        chunks = outliers.scatter(1, self.resident, True)  # [Hk, num_chunks]
        mask[:, : self.num_chunks * self.layout.size] = chunks.repeat_interleave(self.layout.size, 1)
        return mask

    @property
    @override
    def keeps_form(self) -> bool:
        return self.active or not self.divides

    @override
    def as_slots(self) -> LayerSlots:
        """Lay the cache out in slots; the context has to be divided already, or never be.

        A rolling window becomes a ring, and the chunk that leaves it with the next token is stored: over slots that is
        done one token before.
        """
        layout, low_rank, marks = self.layout, self.keys, self.landmarks
        rolls, room = layout.rolling and self.active, marks.means.shape[1]
        selectable = self.num_chunks
        if rolls and (self.length + 1) % layout.size == 0 and selectable < room:
            self._store_oldest()
            selectable += 1
        if rolls:
            self._turn_window()
        tensors = {"resident": self.resident.int(), "a": low_rank.a, "b": low_rank.b}
        tensors |= {"means": marks.means, "excluded": marks.excluded}
        numbers = torch.tensor([selectable, room], dtype=torch.int32, device=self.k.device)
        tensors["chunks"], tensors["room"] = numbers
        return LayerSlots(
            self.kv,
            layout.ring if rolls else SlotLayout.everything(self.k.shape[1]),
            tensors,
            dropped=0 if rolls else self.length - self._held,
            active_from=1 if self.active else NEVER,
            into=SlotLayout(layout.size, layout.outliers, layout.selected, 0),
            pieces=self.values.pieces,
            format=self.values.format,
        )

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        super().adopt_slots(slots)
        tensors, low_rank, marks = slots.tensors, self.keys, self.landmarks
        self.resident, low_rank.a, low_rank.b = tensors["resident"], tensors["a"], tensors["b"]
        marks.means, marks.excluded = tensors["means"], tensors["excluded"]

    @override
    def footprint(self) -> Footprint:
        device = nbytes(self.resident) + self.keys.nbytes() + self.landmarks.nbytes()
        return super().footprint() + Footprint(device) + self.values.footprint()

    @override
    def traffic(self, length: int) -> Traffic:
        """Count, of the chunks recalled, the values, and what the keys are rebuilt of."""
        token, layout = nbytes(self.k[:, :1], self.v[:, :1]), self.layout
        stored = min(self.landmarks.means.shape[1], length // layout.size - layout.local)
        if stored <= 0 or not layout.active(length):
            return Traffic(attended=length * token)
        means = self.landmarks.means[:, :stored]
        return Traffic(
            attended=(layout.local_row + length - stored * layout.size) * token,
            scored=nbytes(means),
            scores=4 * means.shape[0] * stored,
            recalled=self.resident.numel() * self.values.block_bytes,
            rebuilt_from=self.keys.rebuilt_from(self.resident.numel()),
            rebuilding=self.keys.rebuilding(self.resident.numel()),
        )

    @property
    def covered(self) -> int:
        """Tokens that this layout covers: all but generated ones that stay on the device."""
        return self.length if self.layout.rolling else self.divided_at

    @property
    def _held(self) -> int:
        """Rows in use."""
        if not self.active:
            return self.length
        return self.layout.local_row + self.length - self.num_chunks * self.layout.size

    def _slots(self, rows: Tensor) -> Tensor:
        """View the selected chunks of k or v: [Hk, selected, c, d]."""
        layout = self.layout
        return paged(rows[:, layout.outliers * layout.size : layout.local_row], layout.size)

    def _fill(self, row: int, k: Tensor, v: Tensor) -> None:
        """Put k, v [Hk, n, d] into the rows from `row` on."""
        self.k[:, row : row + k.shape[1]] = k
        self.v[:, row : row + k.shape[1]] = v

    def _divide(self, k: Tensor, v: Tensor) -> int:
        """Divide the context so far, k and v [Hk, s, d], among its places; returns the bytes written to the host."""
        layout, size = self.layout, self.layout.size
        self.num_chunks, self.divided_at = k.shape[1] // size - layout.local, k.shape[1]
        away = self.num_chunks * size
        chunks_k, chunks_v = paged(k[:, :away], size), paged(v[:, :away], size)  # [Hk, num_chunks, c, d]
        self.keys.fit(k, self.num_chunks)
        outliers = self.landmarks.exclude_worst(self.landmarks.fill(0, chunks_k), layout.outliers)  # [Hk, o]
        self._fill(0, take(chunks_k, outliers).flatten(1, 2), take(chunks_v, outliers).flatten(1, 2))
        self._fill(layout.local_row, k[:, away:], v[:, away:])
        self.resident.fill_(EMPTY)
        return self.values.write(0, chunks_v)

    def _store_oldest(self) -> int:
        """Represent the oldest local chunk and write its values to the host; returns the bytes written."""
        start, size = self.layout.local_row, self.layout.size
        k, v = (rows[:, start : start + size] for rows in (self.k, self.v))
        self.landmarks.fill(self.num_chunks, k[:, None])
        self.keys.put(self.num_chunks, k)
        return self.values.write(self.num_chunks, v[:, None])

    def _turn_window(self) -> None:
        """Put the local rows where the ring has them."""
        start, size, held = self.layout.local_row, self.layout.size, self._held
        positions = torch.arange(self.num_chunks * size, self.length, device=self.k.device)
        rows = slot_of_page(positions // size, self.layout.ring) * size + positions % size
        self.kv[:, :, rows] = self.kv[:, :, start:held].clone()

    def _offload_oldest(self) -> int:
        """Store the oldest local chunk, and move the others up; returns the bytes written."""
        start, size, held = self.layout.local_row, self.layout.size, self._held
        written = self._store_oldest()
        for rows in (self.k, self.v):
            rows[:, start : held - size] = rows[:, start + size : held].clone()
        self.num_chunks += 1
        return written

    def _refresh(self) -> None:
        """Factorise again, and rebuild the selected keys, so that all of them come from one factor."""
        self.keys.refresh(self.num_chunks)
        heads, slots = (self.resident != EMPTY).nonzero(as_tuple=True)
        self.keys.rebuild_missing(Misses(heads, slots, self.resident[heads, slots]), self._slots(self.k))
