"""Every token of a layer on a CPU in a narrow form, which attention reads in place."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.narrow_attention import (
    TILE,
    NarrowAndRecent,
    NarrowDtype,
    NarrowTokens,
    TileFormat,
    Tiles,
    narrow_attention,
)
from kvcli.kernels.prefill_attention import prefill_attention
from kvcli.kernels.quant import channel_sizes
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import LayerCache, token_mask
from kvcli.kv.dense import RecentTokens
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Tiers, Traffic, nbytes


class NarrowCache(LayerCache):
    """Tiles of keys and of values, [Hk, tiles, bytes], and the `recent` tokens as computed.

    Quantised keys have channel `sizes`. A token is rounded when it comes, and read so once it is no longer recent.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, held: NarrowDtype, tiers: Tiers):
        self.length, self.capacity = 0, capacity
        self.format = TileFormat(held, head_dim)
        shapes = [(num_kv_heads, -(-capacity // TILE), size) for size in self.format.bytes]
        self.tiles = cast(Tiles, tuple(tiers.on_device(*shape, dtype=torch.uint8) for shape in shapes))
        self.sizes = tiers.on_device(num_kv_heads, head_dim, dtype=torch.float32).fill_(1)
        self.recent = RecentTokens(capacity, num_kv_heads, head_dim, tiers)

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        if self.format.block is not None:
            self.sizes.copy_(channel_sizes(k))
        self.length = 0
        self._put(k, v)
        return 0

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        self._put(k[:, None], v[:, None])
        return 0

    @override
    def tokens_in_chain(self) -> NarrowAndRecent | None:
        found = self.recent.with_next()
        if found is None or self.length == self.capacity or not self.format.fills_registers:
            return None
        rows, newest = found
        return NarrowAndRecent(self._far._replace(tokens=self.length + 1 - rows.shape[2]), rows, newest)

    @override
    def take_row(self) -> int:
        self.recent.count(self.length, 1)
        self.length += 1
        return 0

    @override
    def rewind(self, length: int) -> None:
        self.length = length
        self.recent.rewind(length)

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        return narrow_attention(q, self._far, self.recent.views(), softmax)

    def attend_window(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Append tokens k, v [Hk, n, d] and attend with their queries q [H, n, d] causally; return [H, n, d]."""
        self._put(k, v)
        seen = zip(self._far.read(), self.recent.tokens(), strict=True)
        k, v = (torch.cat((far.to(q.dtype), near), 1) for far, near in seen)
        return prefill_attention(q, k, v, softmax)

    def settled(self) -> list[Settled]:
        """Return the tiles that are full."""
        return [Settled(each, 1, self.length // TILE, -(-self.length // TILE)) for each in self.tiles]

    @override
    def attended(self) -> Tensor:
        return token_mask(self.tiles[0], self.length, range(self.length))

    @override
    def footprint(self) -> Footprint:
        return Footprint(device=nbytes(*self.tiles, self.sizes)) + self.recent.footprint()

    @override
    def traffic(self, length: int) -> Traffic:
        recent = min(length, self.recent.kv.shape[1])
        tiles = (length - recent) * nbytes(*(each[:, :1] for each in self.tiles)) // TILE
        return Traffic(attended=tiles + recent * nbytes(self.recent.kv[:, :1]))

    @property
    def _far(self) -> NarrowTokens:
        return NarrowTokens(self.tiles, self.recent.first, self.format, self.sizes)

    def _put(self, k: Tensor, v: Tensor) -> None:
        self.format.write(self.tiles, self.length, k, v, self.sizes)
        self.recent.put(self.length, (k.transpose(0, 1), v.transpose(0, 1)))
        self.length += k.shape[1]
