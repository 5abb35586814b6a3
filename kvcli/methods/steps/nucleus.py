"""The fewest tokens of chosen pages that hold a part of the attention, by keys of four bits (Twilight)."""

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append_token import NewToken
from kvcli.kernels.four_bit_keys import quantise_newest
from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.nucleus import NucleusTally, keep_nucleus
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import Selection
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.page_bounds import PageBoundsIndex
from kvcli.methods.steps.plan import Choice, Chosen, StepIndex


class BoundsAndFourBits(PageBoundsIndex):
    """Bounds of pages, and beside them all keys in four bits: `codes` and `ranges`, see `Int4Keys`."""

    needs_newest = True

    def __init__(self, slots: BatchSlots, pooling: Pooling):
        super().__init__(slots, pooling)
        self.codes, self.ranges = slots.tensors["codes"], slots.tensors["ranges"]

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        super().update(new, host)
        quantise_newest(new.k, self.slots.rows.lengths, self.codes, self.ranges)


class Nucleus(Choice):
    """The best pages, and of their tokens the fewest that hold the part `p` of each query head's attention."""

    def __init__(self, slots: BatchSlots, p: float):
        self.slots, self.p = slots, p
        (b, num_kv_heads), layout = slots.rows.k.shape[:2], slots.rows.layout
        self.kept = torch.empty(
            b, num_kv_heads, layout.total * layout.size, dtype=torch.bool, device=slots.rows.k.device
        )
        counts = torch.zeros(len(NucleusTally._fields), b, dtype=torch.int64, device=slots.rows.k.device)
        self.counts = NucleusTally(*counts)
        self.counts.fewest.fill_(torch.iinfo(torch.int64).max)
        self.tally = self.counts._asdict()

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        index.best(q, softmax, heads, selection)
        rows, tensors = self.slots.rows._replace(resident=selection.selected), self.slots.tensors
        keep_nucleus(q, rows, tensors["codes"], tensors["ranges"], softmax, self.p, heads, self.kept, self.counts)
        return Chosen(selection.selected, self.kept)
