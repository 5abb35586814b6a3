"""What methods do for a disk below host memory: divide it among layers, and count what was asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcli.kv.cache import LayerCache, Tiers
from kvcli.methods._latents import tiers_for
from kvcli.models.geometry import LayerGeometry
from kvcli.telemetry.counters import Count

if TYPE_CHECKING:
    from kvcli.methods.base import AnyMethod, SequenceContext


def tiers_of_layer(method: AnyMethod, layers: Sequence[LayerGeometry], dense: int, tiers: Tiers) -> Tiers:
    """The memory of one layer, where all that are neither sliding nor among the `dense` first have as much of a disk.

    Raises:
        KvcliError: the layers have latents, which the method cannot keep (usage).
    """
    tiers = tiers_for(layers, tiers, type(method).__name__, method.no_latents)
    if tiers.disk is None:
        return tiers
    retrieving = sum(layer.window is None and layer.index >= dense for layer in layers)
    return replace(tiers, disk=tiers.disk.divided(retrieving))


def count_disk(context: SequenceContext, layer: int, cache: LayerCache) -> None:
    """Count what a layer's cache asked of the disk since the last time, and show its waits on a line of their own."""
    if cache.disk is None:
        return
    tally, add = cache.disk.tally.taken(), context.counters.add
    add(layer, Count.HOST_HITS, tally.hits)
    add(layer, Count.DISK_READS, tally.misses)
    add(layer, Count.BYTES_FROM_DISK, tally.read)
    add(layer, Count.BYTES_TO_DISK, tally.written)
    add(layer, Count.DISK_WAIT_US, tally.waited // 1000)
    for begun, ended, size in tally.waits:
        context.timeline.add("disk", f"{context.track}, disk", begun, ended, layer=layer, bytes=size)
