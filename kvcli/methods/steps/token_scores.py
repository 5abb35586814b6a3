"""What single tokens are scored by: one-bit keys (FIER), some channels of the keys (Loki, TokenSelect, InfiniGen)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append import NewToken, take_in_filled_page
from kvcli.kernels.group_pooling import HeadPooling, Pooling, pool_queries, pool_scores
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.one_bit import one_bit_scores_device, quantise_filled_group
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import project_heads, project_newest, token_scores_device
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.over_slots import ScoredIndex
from kvcli.methods.steps.plan import Index


@dataclass(frozen=True)
class OneBit(Index):
    """Scores by one-bit keys of full groups, see `kvcli.store.one_bit.OneBitIndex`; pooled over the group."""

    pooling: HeadPooling

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        scores: Tensor = cache.index.scores(q, candidates, softmax.scale, self.pooling)
        return scores

    @override
    def over_slots(self, slots: BatchSlots) -> OneBitOverSlots:
        assert self.pooling != "none", "query heads that choose alone are served phase after phase"
        return OneBitOverSlots(slots, self.pooling)


class OneBitOverSlots(ScoredIndex):
    """The same of a batch, by `codes` and `ranges`.

    The tokens of a group can be selected as soon as it is full: it is quantised before scoring.
    """

    needs_newest = True

    def __init__(self, slots: BatchSlots, pooling: Pooling):
        self.slots, self.pooling = slots, pooling
        self.codes, self.ranges = slots.tensors["codes"], slots.tensors["ranges"]

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor) -> Tensor:
        b, num_kv_heads, groups, size = self.codes.shape[:4]
        out = q.new_empty(b, num_kv_heads, groups * size, dtype=torch.float32)
        one_bit_scores_device(q, self.codes, self.ranges, *self.scored, softmax.scale, self.pooling, out, heads)
        return out

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        quantise_filled_group(self.slots.by_position, self.codes, self.ranges)
        if host is not None:
            take_in_filled_page(self.slots.rows, host=host)


@dataclass(frozen=True)
class KeyChannels(Index):
    """Scores by the first `channels` of the keys (None: all), over the group or, `together`, over all query heads."""

    channels: int | None
    pooling: Pooling
    together: bool = False

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        pooled = 1 if self.together else cache.k.shape[0]
        queries = pool_queries(q.view(pooled, -1, q.shape[-1]), self.pooling)  # [Hk or 1, G or 1, d]
        scores = cache.index.scores(queries.flatten(0, 1), candidates, softmax.scale)  # [Hk, G or 1, n]
        return pool_scores(scores.reshape(pooled, -1, scores.shape[-1]), self.pooling)

    @override
    def over_slots(self, slots: BatchSlots) -> KeyChannelsOverSlots:
        return KeyChannelsOverSlots(slots, self)


class KeyChannelsOverSlots(ScoredIndex):
    """The same of a batch."""

    needs_newest = False

    def __init__(self, slots: BatchSlots, of: KeyChannels):
        self.slots, self.pooling = slots, of.pooling
        self.keys, self.rows = slots.rows.k[..., : of.channels], 1 if of.together else slots.rows.k.shape[1]

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor) -> Tensor:
        out = q.new_empty(len(q), self.rows, self.keys.shape[2], dtype=torch.float32)
        token_scores_device(q, self.keys, *self.scored, Softmax(softmax.scale), self.pooling, out, heads)
        return out

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        """Do nothing: attention puts the key where it is scored."""


class PartialKeys(Index):
    """Scores by a few columns of the keys in a basis of their head; the best head of a group counts."""

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        return pool_scores(cache.index.scores(q, candidates, softmax.scale), "max_qk")

    @override
    def over_slots(self, slots: BatchSlots) -> PartialKeysOverSlots:
        return PartialKeysOverSlots(slots)


class PartialKeysOverSlots(ScoredIndex):
    """The same of a batch, by `keys` and `basis`."""

    needs_newest = True

    def __init__(self, slots: BatchSlots):
        self.slots, self.keys, self.basis = slots, slots.tensors["keys"], slots.tensors["basis"]

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor) -> Tensor:
        b, num_kv_heads, tokens, columns = self.keys.shape
        queries = q.new_empty(b, q.shape[1], columns, dtype=torch.float32)
        project_heads(q, self.basis, queries)
        out = q.new_empty(b, num_kv_heads, tokens, dtype=torch.float32)
        token_scores_device(queries, self.keys, *self.scored, Softmax(softmax.scale), "max_qk", out, heads)
        return out

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        project_newest(new.k, self.basis, self.slots.rows.lengths, self.keys)
        if host is not None:
            take_in_filled_page(self.slots.rows, host=host)
