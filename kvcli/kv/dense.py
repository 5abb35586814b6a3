"""Tokens of a layer in order, on the device or in host memory; and the newest ones unrounded next to quantised KV.

A token is read most while it is new: recent text is copied and continued, and an error there is repeated with every
token. So the literature keeps a residual of recent tokens (KIVI, arXiv 2402.02750, section 3.2). The set of recent
tokens moves with the text, so they lie in a ring.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import attend_blocks, attend_blocks_suits, decode_attention
from kvcli.kernels.page_table import SlotLayout
from kvcli.kernels.quant import TOKENS, BlockFormat, channel_sizes
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import LayerCache, LayerSlots, both, token_mask
from kvcli.memory.disk_blocks import DiskBlocks
from kvcli.memory.host_pool import OFFLOAD_BYTES
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Tiers, Traffic, nbytes
from kvcli.sizes import slices

RECENT = 128
"""Tokens that are kept unrounded: KIVI's residual length."""


class RecentTokens:
    """The tokens from `first` to `end`, at most RECENT of them, in rows kv [t, n, Hk, d] on the device."""

    def __init__(self, capacity: int, num_kv_heads: int, head_dim: int, tiers: Tiers):
        self.first = self.end = 0
        self.kv = tiers.on_device(tiers.parts, min(RECENT, capacity), num_kv_heads, head_dim)

    def put(self, start: int, parts: Sequence[Tensor]) -> None:
        """Store tokens from `start` on, keys and values [n, Hk, d], which follow those stored."""
        size, count = self.kv.shape[1], len(parts[0])
        self.count(start, count)
        if count == 1:  # without a tensor of rows, for every token and layer
            for mine, x in zip(self.kv, parts, strict=True):
                mine[start % size].copy_(x[0])
            return
        rows = self._rows(range(max(start, self.first), self.end))
        for mine, x in zip(self.kv, parts, strict=True):
            mine[rows] = x[count - len(rows) :]

    def count(self, start: int, tokens: int) -> None:
        """Count tokens from `start` on, which follow those stored, as stored."""
        self.first = max(self.first if start == self.end else start, start + tokens - self.kv.shape[1])
        self.end = start + tokens

    def with_next(self) -> tuple[Tensor, int] | None:
        """Return rows kv [t, Hk, n, d] with room for the next token, in any order, and its row; None if not in place.

        They are in place unless some were taken back.
        """
        size = self.kv.shape[1]
        count = min(self.end + 1 - self.first, size)
        if self.first and count < size:
            return None
        return self.kv[:, :count].transpose(1, 2), self.end % size

    def rewind(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self.end = min(self.end, length)
        self.first = min(self.first, self.end)

    def tokens(self) -> Tensor:
        """Return copies of their keys and values, in order: [2, Hk, n, d]."""
        return self.kv[:, self._rows(range(self.first, self.end))].transpose(1, 2)

    def views(self) -> Tensor:
        """Return keys and values [2, Hk, n, d] in any order, in place unless some were taken back."""
        count = self.end - self.first
        return self.tokens() if self.first and count < self.kv.shape[1] else self.kv[:, :count].transpose(1, 2)

    def restore(self, kv: Tensor, held: int) -> None:
        """Write them over the same rows of kv [t, rows, Hk, d], of which `held` are tokens."""
        tokens = range(self.first, min(self.end, held))
        rows = self._rows(tokens)
        for target, mine in zip(kv, self.kv, strict=True):
            target[tokens.start : tokens.stop] = mine[rows]

    def footprint(self) -> Footprint:
        """Count the bytes allocated."""
        return Footprint(device=nbytes(self.kv))

    def _rows(self, tokens: range) -> Tensor:
        return torch.arange(tokens.start, max(tokens.start, tokens.stop), device=self.kv.device) % self.kv.shape[1]


class TokenMajorCache(LayerCache):
    """Every token, kv [t, capacity, Hk, d], on the device or, with `offload`, in host memory.

    Any range of tokens is contiguous and crosses the bus in one piece. In one memory, without a bus, the tokens of a
    head are contiguous instead, which attention reads faster. Quantised in host memory (`Tiers.kv_dtype`), a token of a
    KV head is a block of bytes, kv [1, capacity, Hk, bytes], and the `recent` tokens are also on the device, unrounded.
    With a disk, if host memory has no room for everything, kv holds nothing: tokens are blocks `on_disk`, the first
    ones in host memory as well.
    """

    on_disk: DiskBlocks | None = None
    recent: RecentTokens | None = None
    sizes: Tensor | None = None  # [Hk, d] of the channels of quantised keys
    kv: Tensor

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, tiers: Tiers, offload: bool):
        self.length = self.held = 0  # tokens seen; tokens held
        self.taken = 0  # tokens stored of an unfinished prompt
        self.tiers, self.offload = tiers, offload
        self.format = BlockFormat.of(tiers.kv_dtype, 2, 1, head_dim) if offload else None
        self.token_shape = (num_kv_heads, head_dim)
        self._hold_in(self._rows(capacity))

    @property
    @override
    def disk(self) -> DiskBlocks | None:
        return self.on_disk

    @property
    @override
    def first_part(self) -> int:
        return 0 if self.format is None else TOKENS

    @override
    def take(self, k: Tensor, v: Tensor) -> int:
        first, self.taken = self.taken, k.shape[1]
        self._fill(k, v, first)
        return self._moved(self.taken - first)

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        written = self.take(k, v)
        self.length = self.held = k.shape[1]
        self.taken = 0
        return written

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        return self.append_window(k[:, None], v[:, None])

    def append_window(self, k: Tensor, v: Tensor) -> int:
        """Append n tokens k, v [Hk, n, d]; return the bytes written to the host."""
        start, n = self.held, k.shape[1]
        self._put(slice(start, start + n), [x.transpose(0, 1) for x in (k, v)])
        self.length += n
        self.held += n
        return self._moved(n)

    @override
    def rewind(self, length: int) -> None:
        self.length = self.held = length
        if self.recent is not None:
            self.recent.rewind(length)

    @property
    def in_place(self) -> bool:
        """Whether attention can read the tokens in place."""
        return (self.tiers.one_memory or not self.offload) and self.format is None and self.on_disk is None

    def views(self) -> tuple[Tensor, Tensor]:
        """View keys and values [Hk, held, d] in place."""
        return both(self.kv[:, : self.held].transpose(1, 2))

    def fetch(self) -> tuple[Tensor, Tensor, int]:
        """Return keys and values [Hk, held, d] on the device, and the bytes moved there from the host."""
        if self.format is None and self.on_disk is None:
            kv = [rows[: self.held].to(self.tiers.device, non_blocking=True) for rows in self.kv]
        else:
            kv = list(brought := self.tiers.scratch(self.tiers.parts, self.held, *self.token_shape))
            self.read(slice(0, self.held), brought)
            self.restore_recent(brought)
        return kv[0].transpose(0, 1), kv[-1].transpose(0, 1), self._moved(self.held)

    def read(self, tokens: slice, kv: Tensor) -> None:
        """Copy `tokens`, dequantised, to the same rows of kv [t, rows, Hk, d] on the device.

        From pinned memory the copy is queued.
        """
        queued, like = self.on_disk is None, kv[0]  # a disk's buffer is overwritten by the next part
        for first, held in self._parts(tokens):  # [t, n, Hk, d] or [1, n, Hk, bytes]
            if self.format is None:
                for target, rows in zip(kv, held, strict=True):
                    target[first : first + held.shape[1]].copy_(rows, non_blocking=queued)
                continue
            at_once = self._at_once() if like.is_cuda else max(1, held.shape[1])
            for part in slices(held.shape[1], at_once):
                blocks = held[0, part].to(like.device, non_blocking=queued).flatten(0, 1)  # [n * Hk, bytes]
                rows = slice(first + part.start, first + part.stop)
                if len(kv) == self.format.parts:
                    numbers = kv[:, rows].movedim(0, 2).view(len(blocks), -1, 1, like.shape[2])
                    self.format.dequantise(blocks, numbers, self.sizes)
                    continue
                numbers = like.new_empty(len(blocks), 2, 1, like.shape[2])  # latents: the keys are the values
                self.format.dequantise(blocks, numbers, self.sizes)
                kv[0, rows] = numbers[:, 0].view(-1, *self.token_shape)

    def reads_in_place(self, q: Tensor) -> bool:
        """Return whether `attend_in_place` serves q [H, d]: on a CPU, with quantised KV in host memory."""
        if self.recent is None or self.on_disk is not None or self.tiers.parts != 2 or self.recent.end != self.held:
            return False
        return attend_blocks_suits(q, self.kv[0, : self.recent.first])

    def attend_in_place(self, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to quantised tokens in place, and to recent tokens unrounded; return [H, d]."""
        assert self.recent is not None
        assert self.format is not None
        assert self.sizes is not None
        k, v = self.recent.tokens()
        return attend_blocks(q, self.kv[0, : self.recent.first], self.format, self.sizes, k, v, softmax)

    def restore_recent(self, kv: Tensor) -> None:
        """Replace the recent tokens in kv [t, rows, Hk, d], to which all were read, by their unrounded values."""
        if self.recent is not None:
            self.recent.restore(kv, self.held)

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        k, v, _ = self.fetch()
        return decode_attention(q, k, v, softmax)

    def settled(self) -> list[Settled]:
        """Return the tokens, which do not change."""
        return [] if self.on_disk is not None else [Settled(self.kv, 1, self.held)]

    @override
    def attended(self) -> Tensor:
        heads = torch.empty(self.token_shape[0], device=self.tiers.device)
        return token_mask(heads, self.length, range(self.length))

    @override
    def as_slots(self) -> LayerSlots | None:
        if not self.offload or self.format is not None or self.on_disk is not None:
            return None
        self.kv = self.kv.contiguous()  # in one memory it is head-major
        return LayerSlots(self.kv.transpose(1, 2), SlotLayout.everything(self.kv.shape[1]), on_host=True)

    @override
    def footprint(self) -> Footprint:
        near = Footprint() if self.recent is None else self.recent.footprint() + Footprint(device=nbytes(self.sizes))
        if self.on_disk is not None:
            return self.on_disk.footprint() + near
        held = nbytes(self.kv)
        return Footprint(host=held) + near if self.offload else Footprint(device=held)

    @override
    def traffic(self, length: int) -> Traffic:
        heads, d = self.token_shape
        if self.format is not None and self.tiers.one_memory and self.on_disk is None:  # see `reads_in_place`
            return Traffic(length * nbytes(self.kv[:, :1]))
        attended = length * self.tiers.parts * heads * d * self.tiers.dtype.itemsize
        return Traffic(attended, recalled=0 if self.in_place else length * nbytes(self.kv[:, :1]))

    def _fill(self, k: Tensor, v: Tensor, first: int = 0) -> None:
        """Write tokens [Hk, n, d] from `first` on to their rows; from a GPU to pinned memory, copies are queued."""
        # The layout changes on the device, so that contiguous copies cross the bus; in parts, to save memory.
        in_parts = self.offload and (k.is_cuda or self.format is not None or self.on_disk is not None)
        for part in slices(k.shape[1] - first, self._at_once() if in_parts else max(1, k.shape[1])):
            tokens = slice(first + part.start, first + part.stop)
            self._put(tokens, [x[:, tokens].transpose(0, 1) for x in (k, v)])

    def _put(self, tokens: slice, parts: Sequence[Tensor]) -> None:
        """Write keys and values [n, Hk, d] to rows `tokens`."""
        if self.format is not None:
            assert self.recent is not None
            assert self.sizes is not None
            self.recent.put(tokens.start, parts)
            if tokens.start == 0:
                self.sizes.copy_(channel_sizes(parts[0].transpose(0, 1)))
            rows = self.kv[0, tokens]
            apart = parts[0].is_cuda or self.on_disk is not None
            blocks = torch.empty_like(rows, device=parts[0].device) if apart else rows
            self.format.quantise([x[..., None, :] for x in parts], blocks, self.sizes[:, None])
            if self.on_disk is not None:
                self.on_disk.write(tokens.start, blocks.cpu())
            elif blocks is not rows:
                rows.copy_(blocks, non_blocking=True)
            return
        if self.on_disk is not None:
            self.on_disk.write(tokens.start, torch.stack([x.cpu() for x in parts[: self.tiers.parts]], 1))
            return
        for rows, x in zip(self.kv, parts, strict=False):
            rows[tokens].copy_(x.contiguous() if self.offload and x.is_cuda else x, non_blocking=True)

    def _at_once(self) -> int:
        """Return how many tokens are in flight at once; fewer if quantised, which takes several steps in fp32."""
        token = nbytes(self.kv[:, :1])
        return max(1, OFFLOAD_BYTES // token if self.format is None else OFFLOAD_BYTES // 8 // token)

    def _hold_in(self, kv: Tensor) -> None:
        self.kv = kv

    def _rows(self, capacity: int) -> Tensor:
        """Allocate rows for `capacity` tokens."""
        heads, d = self.token_shape
        self.on_disk = None
        if self.tiers.one_memory and self.format is None and self.tiers.disk is None:
            return self.tiers.on_device(self.tiers.parts, heads, capacity, d).transpose(1, 2)
        if not self.offload:
            return self.tiers.on_device(self.tiers.parts, capacity, heads, d)
        shape, dtype = (self.tiers.parts, capacity, heads, d), self.tiers.dtype
        if self.format is not None:
            self.recent = RecentTokens(capacity, heads, d, self.tiers)
            self.sizes = self.tiers.on_device(heads, d, dtype=torch.float32)
            shape, dtype = (1, capacity, heads, self.format.bytes), torch.uint8
        kv, disk = torch.empty(shape, dtype=dtype, device="meta"), self.tiers.disk
        if disk is None or nbytes(kv) <= disk.host_bytes:
            return self.tiers.on_host(*shape, dtype=dtype)
        token = shape[2:] if self.format is not None else (self.tiers.parts, heads, d)
        self.on_disk = DiskBlocks(capacity, token, dtype, disk, in_order=True)
        return kv

    def _parts(self, tokens: slice) -> Iterator[tuple[int, Tensor]]:
        """Iterate over `tokens` in host memory or on disk: first token, and [t, n, Hk, d] or [1, n, Hk, bytes]."""
        if self.on_disk is None:
            yield tokens.start, self.kv[:, tokens]
            return
        for first, rows in self.on_disk.stream(tokens.start, tokens.stop):  # [n, t, Hk, d] or [n, Hk, bytes]
            yield first, rows[None] if self.format is not None else rows.transpose(0, 1)

    def _moved(self, tokens: int) -> int:
        """Return the bytes of `tokens` tokens that cross to or from the host: 0 if the cache is on the device."""
        return nbytes(self.kv[:, :tokens]) if self.offload else 0
