"""Counters of a sequence: exact counts by step and layer, and by KV head, read once at the end."""

from collections.abc import Sequence
from enum import IntEnum
from operator import add
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvcli.telemetry import report

T = TypeVar("T")


class Count(IntEnum):
    """What is counted, by the names of a report's fields; heads are KV heads, one page of one KV head counts one."""

    HEADS_CHECKED = 0
    HEADS_CORRECTED = 1
    FIRST_RETRIEVALS = 2
    PAGES_REQUESTED = 3
    MISSES = 4
    BYTES_TO_DEVICE = 5
    BYTES_TO_HOST = 6
    BYTES_EXPOSED = 7
    HOST_HITS = 8
    DISK_READS = 9
    BYTES_FROM_DISK = 10
    BYTES_TO_DISK = 11
    DISK_WAIT_US = 12


NONE = (0,) * len(Count)
"""Counts of a layer in a step that has counted nothing."""


class Counters:
    """Counts by step, layer and `Count`. Of the prefill, which is no step, only bytes written out and waits are kept.

    Counts of single heads are also summed by KV head, over all steps but the first `warmup`.
    """

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        self.warmup = 0
        # [steps][layers][Count]; tuples of numbers, unlike lists, are not looked through whenever garbage is collected.
        self.counts: list[list[tuple[int, ...]]] = []
        self.heads: list[dict[Count, list[int]]] = [{} for _ in range(num_layers)]  # [layers][Count][Hk]
        self.prefill_bytes_to_host = 0
        self.prefill_bytes_to_disk = 0
        self.prefill_disk_wait_us = 0

    def next_step(self) -> None:
        """Begin the next decode step."""
        self.counts.append([NONE] * self.num_layers)

    def add(self, layer: int, count: Count, amount: int, step: int = -1) -> None:
        """Count in a step, by default the current one."""
        if self.counts:
            row = self.counts[step][layer]
            self.counts[step][layer] = (*row[:count], row[count] + amount, *row[count + 1 :])
        elif count is Count.BYTES_TO_HOST:
            self.prefill_bytes_to_host += amount
        elif count is Count.BYTES_TO_DISK:
            self.prefill_bytes_to_disk += amount
        elif count is Count.DISK_WAIT_US:
            self.prefill_disk_wait_us += amount

    def add_heads(self, layer: int, count: Count, amounts: Sequence[int]) -> None:
        """Count in the current step, head by head: `amounts` [Hk]."""
        self.add(layer, count, sum(amounts))
        if len(self.counts) > self.warmup:
            self.sum_heads(layer, count, amounts)

    def sum_heads(self, layer: int, count: Count, amounts: Sequence[int]) -> None:
        """Add `amounts` [Hk] only to the sums by head: their steps are counted separately."""
        sums = self.heads[layer].get(count, [0] * len(amounts))
        self.heads[layer][count] = list(map(add, sums, amounts))

    def add_all(self, layer: int, amounts: Sequence[int], step: int) -> None:
        """Count everything of a layer and step at once, in the order of `Count`."""
        self.counts[step][layer] = tuple(map(add, self.counts[step][layer], amounts))

    def correction(self) -> report.CorrectionCounts:
        """Total the checks and corrections of speculation."""
        counts = self._done()
        checked, corrected = counts[..., Count.HEADS_CHECKED], counts[..., Count.HEADS_CORRECTED]
        return report.CorrectionCounts(
            layer_steps_checked=int((checked > 0).sum()),
            layer_steps_corrected=int((corrected > 0).sum()),
            **_named(report.CorrectionCounts, counts.sum((0, 1)).tolist()),
        )

    def cache(self) -> report.Cache:
        """Total requests and traffic, with the layers one by one."""
        counts = self._done()
        sums = counts.sum((0, 1)).tolist()
        total = _named(report.Cache, sums)
        total["bytes_to_host"] += self.prefill_bytes_to_host
        total["bytes_to_disk"] += self.prefill_bytes_to_disk
        return report.Cache(
            prefill_bytes_to_disk=self.prefill_bytes_to_disk,
            disk_wait_ms=sums[Count.DISK_WAIT_US] / 1000,
            prefill_disk_wait_ms=self.prefill_disk_wait_us / 1000,
            hits=total["pages_requested"] - total["misses"],
            prefill_bytes_to_host=self.prefill_bytes_to_host,
            layers=[
                report.LayerCacheCounts(
                    layer=layer,
                    hits=row[Count.PAGES_REQUESTED] - row[Count.MISSES],
                    by_head=self.by_head(layer),
                    **_named(report.LayerCacheCounts, row),
                )
                for layer, row in enumerate(counts.sum(0).tolist())
            ],
            **total,
        )

    def by_head(self, layer: int) -> report.HeadCounts | None:
        """Return the requests, misses and corrections of each KV head of a layer; None if no pages were requested."""
        sums = self.heads[layer]
        if not any(sums.get(Count.PAGES_REQUESTED, ())):
            return None
        none = [0] * len(sums[Count.PAGES_REQUESTED])
        return report.HeadCounts(**_named(report.HeadCounts, [sums.get(count, none) for count in Count]))

    def steps(self, times_ms: list[float]) -> list[report.Step]:
        """Combine the counts of each step with its time."""
        rows = self._done().sum(1).tolist()  # [steps][Count]
        return [
            report.Step(step=index, ms=ms, **_named(report.Step, row))
            for index, (ms, row) in enumerate(zip(times_ms, rows, strict=False))
        ]

    def _done(self) -> Tensor:
        """Return everything counted: [steps, layers, Count]."""
        return torch.tensor(self.counts, dtype=torch.int64).view(-1, self.num_layers, len(Count))


def _named(entry: type[Any], counts: Sequence[T]) -> dict[str, T]:
    """Return those of `counts`, in the order of `Count`, that a report's entry has a field for, by its name."""
    return {count.name.lower(): counts[count] for count in Count if count.name.lower() in entry.__dataclass_fields__}
