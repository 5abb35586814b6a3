"""A layer that attends in chunks: to the tokens of the newest one's chunk (Llama 4)."""

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.prefill_attention import prefill_attention
from kvcli.kernels.slot_layout import SlotLayout
from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import LayerGeometry
from kvcli.store.cache import Tiers, Traffic
from kvcli.store.layer_slots import LayerSlots
from kvcli.store.sliding import SlidingCache


def windowed_cache(layer: LayerGeometry, tiers: Tiers) -> SlidingCache:
    """Make the cache of a layer whose window slides, or is a chunk."""
    assert layer.window is not None
    kind = ChunkCache if layer.chunked else SlidingCache
    return kind(layer.num_kv_heads, layer.head_dim, layer.window, tiers)


class ChunkCache(SlidingCache):
    """The tokens of the newest token's chunk of `window`, in as many rows; those of the chunks before it are gone."""

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
