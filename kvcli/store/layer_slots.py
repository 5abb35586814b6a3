"""Caches laid out in slots (`kvcli.kernels.slot_layout`), for pipelines that run a whole batch by kernels."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from kvcli.kernels.host_pages import HostLayout
from kvcli.kernels.quantised_blocks import BlockFormat
from kvcli.kernels.slot_layout import SlotLayout

NEVER = 2**31 - 1
"""More tokens than a sequence can have."""


class LayerSlots(NamedTuple):
    """The tensors of a cache of one layer and one sequence: keys and values kv [2, Hk, rows, d] on the device.

    `in_place`: the rows are those of all tokens in order. `on_host`: kv lies in host memory instead, token by token,
    and the layer comes to the device whole. What else the layer has on the device is in `tensors`, by name: among them
    `resident` [Hk, selected] int32, the page in each selected slot, where pages come from host memory, in which they
    lie in `pieces`, quantised where there is a `format`, with `sizes` [Hk, d] of channels where keys need them. Of the
    tokens seen, `dropped` are not held, and never more than `most`, nor those before the last multiple of `period` that
    there was before the newest. A layer chooses once `active_from` tokens are seen, by default when it has outgrown its
    slots. Pages go to the slots of `into` where these are not those of the layout.
    """

    kv: Tensor
    layout: SlotLayout
    tensors: Mapping[str, Tensor] = MappingProxyType({})
    in_place: bool = False
    on_host: bool = False
    dropped: int = 0
    most: int | None = None
    period: int | None = None
    active_from: int | None = None
    into: SlotLayout | None = None
    pieces: list[Tensor] | None = None
    host_layout: HostLayout = "hnd"
    format: BlockFormat | None = None
    sizes: Tensor | None = None
