"""Chunks by their mean keys, whose values are fetched while their keys are rebuilt (ShadowKV)."""

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append_token import NewToken
from kvcli.kernels.rebuild_keys import rebuild_missing_keys
from kvcli.kernels.resolve_pages import MissList
from kvcli.kernels.slot_layout import SlotLayout
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores_device
from kvcli.kernels.topk import topk_pages_device
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.plan import Choice, Chosen, StepIndex


class LandmarkScores(StepIndex):
    """The softmax of each query head over the mean keys of chunks, `means`, and its maximum over the group.

    Outliers, `excluded`, score less than any other. What is generated changes nothing.
    """

    needs_newest = False

    def __init__(self, slots: BatchSlots):
        self.means, self.excluded = slots.tensors["means"], slots.tensors["excluded"]
        self.chunks = slots.tensors["chunks"]  # [b], those of each sequence

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor | None) -> Tensor:
        b, num_kv_heads, chunks, _ = self.means.shape
        products = q.new_zeros(b, num_kv_heads, q.shape[1] // num_kv_heads, chunks, dtype=torch.float32)
        token_scores_device(q, self.means, self.chunks, softmax.scale, products, heads)
        weights = products.masked_fill(self.excluded[:, :, None], float("-inf")).softmax(-1)
        return weights.amax(2).masked_fill(self.excluded, -1.0)

    @override
    def update(self, new: NewToken) -> None: ...


class BestChunks(Choice):
    """The chunks that score best."""

    def __init__(self, slots: BatchSlots):
        self.chunks, self.layout = slots.tensors["chunks"], SlotLayout(1, 0, slots.into.selected, 0)

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor) -> Chosen:
        selected = torch.full((*heads.shape, self.layout.selected), -1, dtype=torch.int32, device=q.device)
        scores = index.scores(q, softmax, heads)
        if scores.shape[2]:
            topk_pages_device(scores, self.chunks, self.layout, selected, heads)
        return Chosen(selected)


class RebuiltKeys:
    """Makes the keys of chunks that are missing, by the factors `a` and `b`, straight in their slots."""

    def __init__(self, slots: BatchSlots):
        self.a, self.b, self.k, self.first = slots.tensors["a"], slots.tensors["b"], slots.rows.k, slots.into.sink
        (one, *others), d = slots.rotary, self.k.shape[3]
        rows = [slice(None)] if all(other is one for other in others) else [slice(i, i + 1) for i in range(len(self.k))]
        rotations = [None if rotary is None else rotary.rotation(d) for rotary in slots.rotary[: len(rows)]]
        self.parts = list(zip(rows, rotations, strict=True)) if self.a.numel() else []  # no sequence has any chunks

    def __call__(self, misses: MissList) -> None:
        """Rebuild what `misses` lists."""
        for rows, rotation in self.parts:
            own = MissList(*(part[rows] for part in misses))
            rebuild_missing_keys(self.a[rows], self.b[rows], own, rotation, self.k[rows], self.first)
