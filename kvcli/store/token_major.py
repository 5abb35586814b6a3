"""A layer whose tokens lie in order, one after another, on the device or in host memory."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.quantised_blocks import BlockFormat
from kvcli.kernels.softmax import Softmax
from kvcli.store.cache import Footprint, LayerCache, Tiers, Traffic, nbytes, token_mask
from kvcli.store.host_pool import OFFLOAD_BYTES
from kvcli.store.pages import slices
from kvcli.store.state import Settled


class TokenMajorCache(LayerCache):
    """Every token, kv [t, capacity, Hk, d], on the device or, with `offload`, in host memory.

    Any range of tokens is contiguous and crosses the bus in one piece. Quantised in host memory (`Tiers.kv_dtype`), a
    token of a KV head is a block of bytes, kv [1, capacity, Hk, bytes].
    """

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, tiers: Tiers, offload: bool):
        self.length = self.held = 0  # tokens seen; tokens kept of them
        self.taken = 0  # of a prompt that is not all there yet
        self.tiers, self.offload = tiers, offload
        self.format = BlockFormat.of(tiers.kv_dtype, 2, 1, head_dim) if offload else None
        self.token_shape = (num_kv_heads, head_dim)
        self._hold_in(self._rows(capacity))

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
        """Store n tokens k, v [Hk, n, d] behind the others; returns the bytes written to the host."""
        start, n = self.held, k.shape[1]
        self._put(slice(start, start + n), [x.transpose(0, 1) for x in (k, v)])
        self.length += n
        self.held += n
        return self._moved(n)

    @override
    def rewind(self, length: int) -> None:
        self.length = self.held = length

    def fetch(self) -> tuple[Tensor, Tensor, int]:
        """Return keys and values [Hk, held, d] on the device, and the bytes moved there from the host."""
        if self.format is None:
            kv = [rows[: self.held].to(self.tiers.device, non_blocking=True) for rows in self.kv]
        else:
            kv = list(self.tiers.on_device(2, self.held, *self.token_shape))
            self.read(slice(0, self.held), kv)
        return kv[0].transpose(0, 1), kv[-1].transpose(0, 1), self._moved(self.held)

    def read(self, tokens: slice, kv: Sequence[Tensor] | Tensor) -> None:
        """Bring `tokens` to the same rows of kv [t, rows, Hk, d] on the device; from pinned memory it is queued."""
        if self.format is None:
            for target, rows in zip(kv, self.kv, strict=True):
                target[tokens].copy_(rows[tokens], non_blocking=True)
            return
        like = kv[0]
        at_once = self._at_once() if like.is_cuda else max(1, self.format.at_once // self.token_shape[0])
        for part in slices(tokens.stop - tokens.start, at_once):
            here = slice(tokens.start + part.start, tokens.start + part.stop)
            blocks = self.kv[0, here].to(like.device, non_blocking=True).flatten(0, 1)  # [n * Hk, bytes]
            numbers = like.new_empty(len(blocks), 2, 1, like.shape[2])
            self.format.dequantise(blocks, numbers)
            for target, found in zip(kv, numbers.unbind(1), strict=True):
                target[here] = found.view(-1, *self.token_shape)

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        k, v, _ = self.fetch()
        return decode_attention(q, k, v, softmax)

    def settled(self) -> list[Settled]:
        """Tokens stay as they came."""
        return [Settled(self.kv, 1, self.held)]

    @override
    def attended(self) -> Tensor:
        return token_mask(self.kv[0, 0], self.length, range(self.length))

    @override
    def footprint(self) -> Footprint:
        held = nbytes(self.kv)
        return Footprint(host=held) if self.offload else Footprint(device=held)

    @override
    def traffic(self, length: int) -> Traffic:
        heads, d = self.token_shape
        attended = length * self.tiers.parts * heads * d * self.tiers.dtype.itemsize
        return Traffic(attended, recalled=length * nbytes(self.kv[:, :1]) if self.offload else 0)

    def _fill(self, k: Tensor, v: Tensor, first: int = 0) -> None:
        """Put tokens [Hk, n, d] from the `first` on into their rows; from a GPU to pinned memory this queues copies."""
        # The layout changes on the device, so that contiguous copies cross the bus; a little at a time, for room.
        in_parts = self.offload and (k.is_cuda or self.format is not None)
        for part in slices(k.shape[1] - first, self._at_once() if in_parts else max(1, k.shape[1])):
            tokens = slice(first + part.start, first + part.stop)
            self._put(tokens, [x[:, tokens].transpose(0, 1) for x in (k, v)])

    def _put(self, tokens: slice, parts: Sequence[Tensor]) -> None:
        """Put keys and values [n, Hk, d] into rows `tokens`."""
        if self.format is not None:
            rows = self.kv[0, tokens]
            blocks = torch.empty_like(rows, device=parts[0].device) if parts[0].is_cuda else rows
            self.format.quantise([x[..., None, :] for x in parts], blocks)
            if blocks is not rows:
                rows.copy_(blocks, non_blocking=True)
            return
        for rows, x in zip(self.kv, parts, strict=False):
            rows[tokens].copy_(x.contiguous() if self.offload and x.is_cuda else x, non_blocking=True)

    def _at_once(self) -> int:
        """Tokens that are on their way at once; of blocks less, which are worked out in fp32, in several steps."""
        token = nbytes(self.kv[:, :1])
        return max(1, OFFLOAD_BYTES // token if self.format is None else OFFLOAD_BYTES // 8 // token)

    def _hold_in(self, kv: Tensor) -> None:
        self.kv = kv

    def _rows(self, capacity: int) -> Tensor:
        """Allocate rows for `capacity` tokens."""
        heads, d = self.token_shape
        if not self.offload:
            return self.tiers.on_device(self.tiers.parts, capacity, heads, d)
        if self.format is not None:
            return self.tiers.on_host(1, capacity, heads, self.format.bytes, dtype=torch.uint8)
        return self.tiers.on_host(self.tiers.parts, capacity, heads, d)

    def _moved(self, tokens: int) -> int:
        """Bytes of so many tokens that cross to or from the host: none where the cache is on the device."""
        return nbytes(self.kv[:, :tokens]) if self.offload else 0
