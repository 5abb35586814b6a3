"""Layers whose tokens all lie in host memory, one by one, with the first and the recent ones on the device as well."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.slot_layout import EMPTY
from kvcli.kernels.softmax import Softmax
from kvcli.store.cache import LayerCache, Tiers, both
from kvcli.store.disk_pool import page_pool
from kvcli.store.host_pool import HostPagePool
from kvcli.store.offloaded_tokens import SINKS
from kvcli.store.sliding import SlidingCache


class TokensOnHost(LayerCache):
    """In host memory: all KV, `pool`, in pages of one token. On the device: sinks and `recent` tokens, `near`.

    `chosen` [Hk, m] are the tokens that were read beside them last, EMPTY beyond those of a KV head.
    """

    pool: HostPagePool

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, sink: int, recent: int, tiers: Tiers):
        self.length = 0
        self.taken = 0  # of a prompt that is not all there yet
        self.near = SlidingCache(num_kv_heads, head_dim, min(recent, capacity), tiers, sink)
        self.pool = page_pool(num_kv_heads, head_dim, 1, capacity, tiers, kept=0 if sink else SINKS)
        self.chosen: Tensor | None = None

    @override
    def share(self, other: LayerCache, tokens: int) -> None:
        assert isinstance(other, type(self))
        self.pool.share(other.pool, tokens)

    @property
    @override
    def first_part(self) -> int:
        return self.pool.first_part

    @override
    def take(self, k: Tensor, v: Tensor) -> int:
        first, self.taken = self.taken, k.shape[1]
        return self.pool.write(first, *(x[:, first:, None] for x in (k, v)))

    @property
    def in_place(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of all tokens as they lie in host memory, [Hk, n, d], where a step can read them there."""
        pool = self.pool
        if not pool.tiers.one_memory or pool.format is not None or pool.on_disk is not None or len(pool.pieces) > 1:
            return None
        return both(pool.pieces[0][:, :, :, 0].movedim(0, 2).transpose(0, 1))  # [n, Hk, t, 1, d] -> [t, Hk, n, d]

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend to what is on the device, as long as that is everything."""
        return self.near.attend(q, softmax)

    def with_chosen(self, mask: Tensor) -> Tensor:
        """Mark what was chosen in mask [Hk, length] bool, too."""
        if self.chosen is not None:
            head, row = (self.chosen != EMPTY).nonzero(as_tuple=True)
            mask[head, self.chosen[head, row]] = True
        return mask
