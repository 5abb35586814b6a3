"""Caches laid out in slots (`kvcli.kernels.slot_layout`), for pipelines that run a batch by kernels alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.host_pages import HostLayout
from kvcli.kernels.slot_layout import SlotLayout

RecallBy = Literal["gather", "copy"]


@dataclass(frozen=True)
class SlotRule:
    """What a method's own layers do at a step over slots: attend to all they hold, or FreeKV's speculative retrieval.

    `correct_below` is, layer by layer, the query cosine under which a KV head does not reuse the selection of the step
    before: above 1 none ever does. Empty: nothing is retrieved.
    """

    correct_below: tuple[float, ...] = ()
    pooling: Pooling = "mean_s"
    correction_pooling: Literal["mean", "max"] = "mean"
    score_scale: bool = True
    recall: RecallBy = "gather"
    double_buffer: bool = True


class LayerSlots(NamedTuple):
    """One layer of one sequence: keys and values kv [2, Hk, rows, d]; and of a layer that retrieves the rest.

    resident [Hk, selected] int32 page numbers, bounds [Hk, n, 2, d] of full pages, and the host's pages in pieces.
    """

    kv: Tensor
    layout: SlotLayout
    resident: Tensor | None = None
    bounds: Tensor | None = None
    pieces: list[Tensor] | None = None
    host_layout: HostLayout = "hnd"
