"""What single tokens are scored by: one-bit keys (FIER), some channels of the keys (Loki, TokenSelect, InfiniGen)."""

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append_token import NewToken
from kvcli.kernels.filled_page import take_in_filled_page
from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.one_bit_keys import quantise_filled_group
from kvcli.kernels.one_bit_scores import one_bit_scores_device
from kvcli.kernels.project_heads import project_heads, project_newest
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores_device
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.plan import ScoredIndex


class OneBitScores(ScoredIndex):
    """Scores by `codes` and `ranges` of full groups, see `kvcli.store.one_bit.OneBitIndex`; pooled over the group.

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


class KeyChannelScores(ScoredIndex):
    """Scores by the first `channels` of the keys, pooled over the group or, `together`, over all query heads."""

    needs_newest = False

    def __init__(self, slots: BatchSlots, channels: int, pooling: Pooling, together: bool = False):
        self.slots, self.pooling = slots, pooling
        self.keys, self.rows = slots.rows.k[..., :channels], 1 if together else slots.rows.k.shape[1]

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor) -> Tensor:
        out = q.new_empty(len(q), self.rows, self.keys.shape[2], dtype=torch.float32)
        token_scores_device(q, self.keys, *self.scored, Softmax(softmax.scale), self.pooling, out, heads)
        return out

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        """Do nothing: attention puts the key where it is scored."""


class PartialKeyScores(ScoredIndex):
    """Scores by a few columns of the keys, `keys`, in a `basis` of their head; the best head of a group counts."""

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
