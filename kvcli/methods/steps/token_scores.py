"""What single tokens are scored by: one-bit keys (FIER), some channels of the keys (Loki, TokenSelect, InfiniGen)."""

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append_token import NewToken
from kvcli.kernels.group_pooling import Pooling, pool_queries, pool_scores
from kvcli.kernels.one_bit_keys import quantise_filled_group
from kvcli.kernels.one_bit_scores import one_bit_scores_device
from kvcli.kernels.slot_layout import candidates
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores_device
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.plan import StepIndex
from kvcli.methods.steps.rows import put_rows


class OneBitScores(StepIndex):
    """Scores by `codes` and `ranges` of full groups, see `kvcli.store.one_bit.OneBitIndex`; pooled over the group.

    The tokens of a group can be selected as soon as it is full: it is quantised before scoring.
    """

    needs_newest = True

    def __init__(self, slots: BatchSlots, pooling: Pooling):
        self.slots, self.pooling = slots, pooling
        self.codes, self.ranges = slots.tensors["codes"], slots.tensors["ranges"]

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor | None) -> Tensor:
        b, num_kv_heads, groups, size = self.codes.shape[:4]
        queries = pool_queries(q.float().view(b * num_kv_heads, -1, q.shape[2]), self.pooling)  # [b*Hk, G or 1, d]
        out = q.new_empty(b, queries.shape[1] * num_kv_heads, groups * size, dtype=torch.float32)
        flat = queries.reshape(b, -1, q.shape[2])
        one_bit_scores_device(flat, self.codes, self.ranges, self.slots.rows.lengths, out)
        return pooled(softmax.scale * out.view(b, num_kv_heads, -1, groups * size), self.slots, self.pooling)

    @override
    def update(self, new: NewToken) -> None:
        quantise_filled_group(self.slots.by_position, self.codes, self.ranges)


class KeyChannelScores(StepIndex):
    """Scores by the first `channels` of the keys; each query head for itself, or pooled over its group."""

    needs_newest = False

    def __init__(self, slots: BatchSlots, channels: int, pooling: Pooling | None = None):
        self.slots, self.pooling = slots, pooling
        self.keys = slots.rows.k[..., :channels]

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor | None) -> Tensor:
        b, num_kv_heads, tokens, _ = self.keys.shape
        queries = q.view(b * num_kv_heads, -1, q.shape[2])
        if self.pooling is not None:
            queries = pool_queries(queries, self.pooling)
        out = q.new_zeros(b, num_kv_heads, queries.shape[1], tokens, dtype=torch.float32)
        flat = queries.reshape(b, -1, q.shape[2])
        token_scores_device(flat, self.keys, self.slots.rows.lengths, softmax.scale, out, heads)
        return out if self.pooling is None else pooled(out, self.slots, self.pooling)

    @override
    def update(self, new: NewToken) -> None:
        """Do nothing: attention puts the key where it is scored."""


class PartialKeyScores(StepIndex):
    """Scores by a few columns of the keys, `keys`, in a `basis` of their head; the best head of a group counts."""

    needs_newest = True

    def __init__(self, slots: BatchSlots):
        self.slots, self.keys, self.basis = slots, slots.tensors["keys"], slots.tensors["basis"]

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor | None) -> Tensor:
        b, num_kv_heads, tokens, columns = self.keys.shape
        queries = q.float().view(b, num_kv_heads, -1, q.shape[2]) @ self.basis  # [b, Hk, G, c]
        out = q.new_zeros(*queries.shape[:3], tokens, dtype=torch.float32)
        flat = queries.view(b, -1, columns)
        token_scores_device(flat, self.keys, self.slots.rows.lengths, softmax.scale, out, heads)
        return over_candidates(out, self.slots).amax(2)

    @override
    def update(self, new: NewToken) -> None:
        found = (new.k.float()[:, :, None] @ self.basis)[:, :, 0]  # [b, Hk, c]
        put_rows(self.keys, self.slots.rows.lengths - 1, found)


def pooled(scores: Tensor, slots: BatchSlots, pooling: Pooling) -> Tensor:
    """Pool scores [b, Hk, G, n] of query heads over the group; softmax is over the candidates -> [b, Hk, n]."""
    return pool_scores(over_candidates(scores, slots).flatten(0, 1), pooling).unflatten(0, scores.shape[:2])  # type: ignore[no-untyped-call, no-any-return]


def over_candidates(scores: Tensor, slots: BatchSlots) -> Tensor:
    """Leave the scores [b, Hk, G, n] of tokens that can be selected, -inf for others."""
    allowed = candidates(slots.rows.lengths, slots.rows.layout, scores.shape[3])[:, None, None]
    return scores.masked_fill(~allowed, float("-inf"))
