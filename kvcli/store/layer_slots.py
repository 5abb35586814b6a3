"""Caches laid out in slots (`kvcli.kernels.slot_layout`), for pipelines that run a whole batch by kernels."""

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
    """What the retrieval layers of a method do at a step over slots.

    Where `correct_below` is empty they attend to all that they hold. Else they do FreeKV's speculative retrieval, and
    it is, layer by layer, the query cosine below which a KV head does not reuse the selection of the step before: above
    1 no head ever does. The other fields are FreeKV's settings of the same names.
    """

    correct_below: tuple[float, ...] = ()
    pooling: Pooling = "mean_s"
    correction_pooling: Literal["mean", "max"] = "mean"
    score_scale: bool = True
    recall: RecallBy = "gather"
    double_buffer: bool = True


class LayerSlots(NamedTuple):
    """The tensors of a cache of one layer and one sequence: keys and values kv [2, Hk, rows, d] on the device.

    A layer that retrieves has also `resident` [Hk, selected] int32, the page in each selected slot, the `bounds`
    [Hk, n, 2, d] of its full pages, both on the device, and its pages in host memory, in `pieces`.
    """

    kv: Tensor
    layout: SlotLayout
    resident: Tensor | None = None
    bounds: Tensor | None = None
    pieces: list[Tensor] | None = None
    host_layout: HostLayout = "hnd"
