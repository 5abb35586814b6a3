"""Caches that keep a part of their prompt (SnapKV and similar), or evict a token for each new one (H2O, TOVA)."""

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import Tokens, decode_attention
from kvcli.kernels.narrow_attention import ChainTokens
from kvcli.kernels.page_table import SlotLayout
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import kept_tokens
from kvcli.kv.cache import LayerSlots, ResidentCache, Tiers
from kvcli.kv.dense import TokenMajorCache
from kvcli.kv.pages import take
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Traffic, nbytes


class PrunedCache(TokenMajorCache):
    """The kept tokens of each KV head in order: k, v [rows, Hk, d] on the device or, with `offload`, in host memory.

    Their `positions` [Hk, rows] are on the device. Until the prompt comes nothing is allocated, and `rows` is a plan,
    for most methods an upper bound. Then there is one row for each kept token and each token to come, up to `capacity`.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, rows: int, capacity: int, tiers: Tiers, offload: bool = False):
        meta = torch.device("meta")
        planned = replace(tiers, device=meta, host=meta, pinned=None, staging=None)
        super().__init__(num_kv_heads, head_dim, rows, planned, offload)
        self.capacity, self.tiers = capacity, tiers
        self.positions = planned.on_device(num_kv_heads, rows, dtype=torch.int32)

    @override
    def take(self, k: Tensor, v: Tensor) -> int:
        """Store nothing yet: what is kept depends on the whole prompt."""
        return 0

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        """Keep every token of the prompt."""
        return self.load_subset(k, v, torch.arange(k.shape[1], device=k.device).expand(k.shape[0], -1))

    def load_subset(self, k: Tensor, v: Tensor, kept: Tensor) -> int:
        """Store the tokens `kept` [Hk, n], ascending, of a prompt k, v [Hk, s, d]; return the bytes like `load`."""
        self.length = k.shape[1]
        return self._hold(k, v, kept, kept)

    def prune(self, rows: Tensor) -> None:
        """Keep only `rows` [Hk, n], ascending, of the rows held, and free the memory of the others."""
        if rows.shape[1] < self.held:
            k, v, _ = self.fetch()
            self._hold(k, v, rows, self.positions.take_along_dim(rows, 1))

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        self.positions[:, self.held] = self.length
        return super().append(k, v)

    @override
    def tokens_in_chain(self) -> ChainTokens | None:
        """Return the kept tokens, unless the layer comes to the device for every step."""
        return None if self.offload else Tokens(self.kv.transpose(1, 2), self.held + 1)

    @override
    def take_row(self) -> int:
        self.positions[:, self.held] = self.length
        self.length, self.held = self.length + 1, self.held + 1
        return 0

    @override
    def settled(self) -> list[Settled]:
        return [*super().settled(), Settled(self.positions, 1, self.held)]

    @override
    def attended(self) -> Tensor:
        mask = torch.zeros(len(self.positions), self.length, dtype=torch.bool, device=self.positions.device)
        return mask.scatter_(1, self.positions[:, : self.held].long(), True)

    @override
    def as_slots(self) -> LayerSlots | None:
        if self.offload:
            return None
        kv = self.kv.transpose(1, 2)  # [t, Hk, rows, d]
        return LayerSlots(kv, SlotLayout.everything(kv.shape[2]), dropped=self.length - self.held)

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        self._hold_in(slots.kv.transpose(1, 2))

    @override
    def footprint(self) -> Footprint:
        return super().footprint() + Footprint(device=nbytes(self.positions))

    @override
    def traffic(self, length: int) -> Traffic:
        """Estimate for a prompt of which as much is kept as was planned."""
        return super().traffic(max(0, length - self.capacity + self.kv.shape[1]))

    def _hold(self, k: Tensor, v: Tensor, rows: Tensor, positions: Tensor) -> int:
        """Allocate for `rows` [Hk, n] of k, v [Hk, m, d] and all tokens to come, and store these rows."""
        num_kv_heads, self.held = rows.shape
        room = self.held + self.capacity - self.length
        with torch.inference_mode(False):  # like every cache, writable wherever decoding goes on
            self._hold_in(self._rows(room))
            self.positions = self.tiers.on_device(num_kv_heads, room, dtype=torch.int32)
        kept_k, kept_v = (x.take_along_dim(rows[..., None], 1) for x in (k, v))
        self._fill(kept_k, kept_v)
        self.positions[:, : self.held] = positions
        return self._moved(self.held)


class EvictingCache(ResidentCache):
    """The held tokens of each KV head on the device: k, v [Hk, rows, d], `positions` and `scores` [Hk, rows].

    The `recent` newest tokens stay; of the others the one with the lowest score is evicted, the newest in a tie. The
    method sets the scores. Tokens keep their positions, and are in no order once one was evicted. A step attends to at
    most `rows` tokens, including the current one, so a token is evicted when another one arrives.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, rows: int, recent: int, tiers: Tiers):
        super().__init__(num_kv_heads, head_dim, rows, tiers)
        self.held = 0
        self.rows, self.recent = rows, recent
        self.positions = tiers.on_device(num_kv_heads, rows, dtype=torch.int64)
        self.scores = tiers.on_device(num_kv_heads, rows, dtype=torch.float32)

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        """Store a prompt whose tokens all have the same score."""
        return self.load_scored(k, v, k.new_zeros(k.shape[:2]))

    def load_scored(self, k: Tensor, v: Tensor, scores: Tensor) -> int:
        """Store the tokens of a prompt k, v [Hk, s, d] with the best scores [Hk, s]; return the bytes like `load`."""
        self.length = k.shape[1]
        self.held = min(self.length, self.rows)
        recent = min(self.recent, self.held)
        kept = kept_tokens(scores[:, : self.length - recent], recent, self.held)  # [Hk, held]
        self.k[:, : self.held] = take(k, kept)
        self.v[:, : self.held] = take(v, kept)
        self.positions[:, : self.held] = kept
        self.scores[:, : self.held] = scores.take_along_dim(kept, 1)
        return 0

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        """Store the current token with score zero."""
        if self.held < self.rows:
            row = torch.full((k.shape[0],), self.held, device=k.device)
            self.held += 1
        else:
            row = self._lowest()  # [Hk]
        heads = torch.arange(k.shape[0], device=k.device)
        self.k[heads, row], self.v[heads, row] = k, v
        self.positions[heads, row] = self.length
        self.scores[heads, row] = 0
        self.length += 1
        return 0

    @property
    def resident(self) -> tuple[Tensor, Tensor]:
        """Keys and values held, [Hk, held, d] each."""
        return self.k[:, : self.held], self.v[:, : self.held]

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        return decode_attention(q, *self.resident, softmax)

    @override
    def attended(self) -> Tensor:
        mask = torch.zeros(self.k.shape[0], self.length, dtype=torch.bool, device=self.k.device)
        return mask.scatter_(1, self.positions[:, : self.held], True)

    @override
    def as_slots(self) -> LayerSlots:
        rows = torch.tensor(self.rows, device=self.k.device)
        tensors = {"positions": self.positions, "scores": self.scores, "rows": rows}
        return LayerSlots(self.kv, SlotLayout.everything(self.rows), tensors, most=self.rows)

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        super().adopt_slots(slots)
        self.positions, self.scores = slots.tensors["positions"], slots.tensors["scores"]

    @override
    def footprint(self) -> Footprint:
        return super().footprint() + Footprint(device=nbytes(self.positions, self.scores))

    @override
    def traffic(self, length: int) -> Traffic:
        """Count the keys twice: they are also read for the scores."""
        held = min(length, self.rows)
        keys = held * nbytes(self.k[:, :1])
        return Traffic(attended=keys * len(self.kv), scored=keys, scores=nbytes(self.scores[:, :held]))

    def _lowest(self) -> Tensor:
        """Return rows [Hk] of the tokens to evict for the next one, which counts as recent."""
        evictable = self.positions <= self.length - self.recent
        scores = self.scores.where(evictable, torch.inf)
        least = evictable & (scores == scores.amin(1, keepdim=True))
        return self.positions.where(least, -1).argmax(1)
