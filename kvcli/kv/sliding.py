"""Caches that keep first and last tokens, or the current chunk, and select nothing."""

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import Tokens, decode_attention
from kvcli.kernels.narrow_attention import ChainTokens
from kvcli.kernels.page_table import SlotLayout
from kvcli.kernels.prefill_attention import prefill_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import LayerSlots, ResidentCache, Tiers, token_mask
from kvcli.memory.tiers import Traffic, nbytes
from kvcli.models.geometry import LayerGeometry


class SlidingCache(ResidentCache):
    """The first `sink` and the last `window` tokens, one row each; the tokens between them are dropped.

    The window is a ring: attention does not depend on the order of keys that carry their own positions.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, window: int, tiers: Tiers, sink: int = 0):
        super().__init__(num_kv_heads, head_dim, sink + window, tiers)
        self.sink, self.window = sink, window

    @property
    def dropped(self) -> int:
        """Number of tokens that have left the window."""
        return max(0, self.length - self.sink - self.window)

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        self.length = k.shape[1]
        kept = torch.arange(self.length, device=k.device)
        kept = torch.cat((kept[: self.sink], kept[self.sink :][-self.window :]))
        rows = self.rows_of(kept)
        self.k[:, rows], self.v[:, rows] = k[:, kept], v[:, kept]
        return 0

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        row = self.row_of(self.length)
        self.k[:, row], self.v[:, row] = k, v
        return self.take_row()

    @override
    def tokens_in_chain(self) -> ChainTokens | None:
        return Tokens(self.kv, min(self.length + 1, self.sink + self.window), self.row_of(self.length))

    @override
    def take_row(self) -> int:
        self.length += 1
        return 0

    def row_of(self, position: int) -> int:
        """Return the row of the token at `position`, or the row that it had while it was held."""
        return position if position < self.sink else self.sink + (position - self.sink) % self.window

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        k, v = self.resident()
        return decode_attention(q, k, v, softmax)

    def attend_window(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Append tokens k, v [Hk, n, d], attend with their queries q [H, n, d]; return [H, n, d]. Without sinks only.

        Each query sees the last `window` tokens up to its own.
        """
        seen_k, seen_v = self.extend(k, v)
        return prefill_attention(q, seen_k, seen_v, softmax, self.window)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens k, v [Hk, n, d]; return held and new keys and values in order, [Hk, held + n, d].

        Sinks are included only while no token has been dropped.
        """
        first = self.sink + self.dropped if self.dropped else 0
        held = self.rows_of(torch.arange(first, self.length, device=k.device))
        seen_k, seen_v = torch.cat((self.k[:, held], k), 1), torch.cat((self.v[:, held], v), 1)
        start = self.length
        self.length += k.shape[1]
        new = torch.arange(start, self.length, device=k.device)
        new = new[(new < self.sink) | (new >= self.sink + self.dropped)]
        rows = self.rows_of(new)
        self.k[:, rows], self.v[:, rows] = k[:, new - start], v[:, new - start]
        return seen_k, seen_v

    def resident(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values held, sinks in order and the window in ring order: [Hk, n, d] each."""
        held = self.length - self.dropped
        return self.k[:, :held], self.v[:, :held]

    @override
    def attended(self) -> Tensor:
        return token_mask(self.k, self.length, range(self.sink), range(self.sink + self.dropped, self.length))

    @override
    def as_slots(self) -> LayerSlots:
        return LayerSlots(self.kv, SlotLayout(1, self.sink, 0, self.window))

    @override
    def traffic(self, length: int) -> Traffic:
        return Traffic(attended=min(length, self.sink + self.window) * nbytes(self.kv[:, :, :1]))

    def rows_of(self, positions: Tensor) -> Tensor:
        """Return the rows of the tokens at `positions`, like `row_of`."""
        ring = self.sink + (positions - self.sink) % self.window
        return torch.where(positions < self.sink, positions, ring)


def windowed_cache(layer: LayerGeometry, tiers: Tiers) -> SlidingCache:
    """Make the cache of a layer with a sliding window or chunks."""
    assert layer.window is not None
    kind = ChunkCache if layer.chunked else SlidingCache
    return kind(layer.num_kv_heads, layer.head_dim, layer.window, tiers)


class ChunkCache(SlidingCache):
    """The tokens of the newest token's chunk of `window`, one row each; earlier chunks are dropped (Llama 4)."""

    @property
    @override
    def dropped(self) -> int:
        return max(0, self.length - 1) // self.window * self.window

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        self.length = k.shape[1]
        held = self.length - self.dropped
        self.k[:, :held], self.v[:, :held] = k[:, self.dropped :], v[:, self.dropped :]
        return 0

    @override
    def tokens_in_chain(self) -> ChainTokens | None:
        return Tokens(self.kv, self.row_of(self.length) + 1)

    @override
    def attend_window(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        first = self.dropped
        seen_k, seen_v = (torch.cat((held, new), 1) for held, new in zip(self.resident(), (k, v), strict=True))
        self.length += k.shape[1]
        kept = slice(self.dropped - first, None)
        held = self.length - self.dropped
        self.k[:, :held], self.v[:, :held] = seen_k[:, kept], seen_v[:, kept]
        return prefill_attention(q, seen_k, seen_v, softmax, self.window, chunked=True)

    @override
    def traffic(self, length: int) -> Traffic:
        return super().traffic((length - 1) % self.window + 1)

    @override
    def as_slots(self) -> LayerSlots:
        return LayerSlots(self.kv, SlotLayout.everything(self.window), period=self.window)
