"""The step of ShadowKV: chunks selected by their mean keys, values fetched while keys are rebuilt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append import NewToken, take_in_filled_page
from kvcli.kernels.norm_rope import Rotation
from kvcli.kernels.page_table import MissList, SlotLayout
from kvcli.kernels.recall import HostPages
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores_device
from kvcli.methods.shadowkv.kernels import StoredChunks, keep_leaving_chunk, rebuild_missing_keys
from kvcli.methods.step import BatchSlots, Index, ScoredIndex


class LandmarkScores(Index):
    """Scores chunks by each query head's softmax over the mean keys, and its maximum over the group.

    Outliers score lower than any other chunk.
    """

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        scores: Tensor = cache.landmarks.scores(q, len(candidates), softmax.scale)
        return scores

    @override
    def over_slots(self, slots: BatchSlots) -> LandmarkScoresOverSlots:
        return LandmarkScoresOverSlots(slots)


class LandmarkScoresOverSlots(ScoredIndex):
    """`LandmarkScores` for a batch, by `means` and `excluded`; `chunks` counts the selectable chunks.

    In a rolling window, a chunk is stored one token before it leaves, so that the next step can select it. Otherwise
    generated tokens change nothing.
    """

    needs_newest = False

    def __init__(self, slots: BatchSlots):
        self.slots, self.means, self.excluded = slots, slots.tensors["means"], slots.tensors["excluded"]
        self.left = torch.zeros_like(slots.tensors["chunks"])
        self.parts = rotations(slots)

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
    def update(self, new: NewToken, host: HostPages | None) -> None:
        if host is None:
            return
        tensors, kv = self.slots.tensors, self.slots.rows
        stored = StoredChunks(tensors["a"], self.means, tensors["chunks"], tensors["room"], self.left)
        for rows, rotation in self.parts:
            own = kv._replace(k=kv.k[rows], v=kv.v[rows], lengths=kv.lengths[rows])
            keep_leaving_chunk(own, tensors["b"][rows], rotation, StoredChunks(*(part[rows] for part in stored)))
        take_in_filled_page(kv._replace(lengths=self.left), host=host)


class RebuiltKeys:
    """Rebuilds the keys of missing chunks from the factors `a` and `b`, directly in their slots."""

    def __init__(self, slots: BatchSlots):
        self.a, self.b, self.k, self.first = slots.tensors["a"], slots.tensors["b"], slots.rows.k, slots.into.sink
        self.parts = rotations(slots) if self.a.numel() else []  # empty: no sequence has chunks

    def __call__(self, misses: MissList) -> None:
        """Rebuild the chunks that `misses` lists."""
        for rows, rotation in self.parts:
            own = MissList(*(part[rows] for part in misses))
            rebuild_missing_keys(self.a[rows], self.b[rows], own, rotation, self.k[rows], self.first)


def rotations(slots: BatchSlots) -> list[tuple[slice, Rotation | None]]:
    """Return the rotation of the keys per sequence, or once for all rows where it is the same; None: not rotated."""
    (one, *others), (b, _, _, d) = slots.rotary, slots.rows.k.shape
    rows = [slice(None)] if all(other is one for other in others) else [slice(i, i + 1) for i in range(b)]
    known = [None if rotary is None else rotary.rotation(d) for rotary in slots.rotary[: len(rows)]]
    return list(zip(rows, known, strict=True))
