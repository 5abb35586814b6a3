"""Chunks by their mean keys, whose values are fetched while their keys are rebuilt (ShadowKV)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append_token import NewToken
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.rebuild_keys import rebuild_missing_keys
from kvcli.kernels.resolve_pages import MissList
from kvcli.kernels.slot_layout import SlotLayout
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores_device
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.over_slots import ScoredIndex
from kvcli.methods.steps.plan import Index


class LandmarkScores(Index):
    """The softmax of each query head over the mean keys of chunks, and its maximum over the group.

    Outliers score less than any other.
    """

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        scores: Tensor = cache.landmarks.scores(q, len(candidates), softmax.scale)
        return scores

    @override
    def over_slots(self, slots: BatchSlots) -> LandmarkScoresOverSlots:
        return LandmarkScoresOverSlots(slots)


class LandmarkScoresOverSlots(ScoredIndex):
    """The same of a batch, by `means` and `excluded`. What is generated changes nothing."""

    needs_newest = False

    def __init__(self, slots: BatchSlots):
        self.slots, self.means, self.excluded = slots, slots.tensors["means"], slots.tensors["excluded"]

    @property
    @override
    def scored(self) -> tuple[Tensor, SlotLayout]:
        return self.slots.tensors["chunks"], SlotLayout(1, 0, self.slots.into.selected, 0)

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor) -> Tensor:
        out = q.new_empty(self.means.shape[:3], dtype=torch.float32)
        if out.numel():
            token_scores_device(q, self.means, *self.scored, Softmax(softmax.scale), "max_s", out, heads, self.excluded)
        return out

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None: ...


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
