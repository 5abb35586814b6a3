"""What a decode step cannot do without, phase by phase: the bytes it has to move and the operations it has to make.

The numbers follow from the model's shapes and from what the method's caches say of themselves (`LayerCache.traffic`);
divided by the machine's measured rates (`kvcli.capacity.ceilings`) they are the time below which no implementation gets
that takes the phases of a step one after another, as each needs what the one before it found. Only what crosses the bus
can go on beside all else. What an implementation adds (copies to gather, launches, Python) is not in them: that is what
a profile shows above them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcli.capacity.ceilings import Ceilings
from kvcli.methods.base import Method
from kvcli.models.geometry import ModelGeometry
from kvcli.store.cache import Traffic

PHASES = (
    "projections",
    "attention",
    "mlp",
    "score",
    "select",
    "recall",
    "correction",
    "offload",
    "sampling",
    "host",
)
"""The parts of a step, in the order in which they are shown.

`projections` are the linear layers of attention and the model's head, `mlp` is what else the layers compute. Nothing
has to be moved for `correction`, which compares two queries, and for `host`, what no other phase claims.
"""


@dataclass(frozen=True)
class Work:
    """Bytes read on the device, brought to it and written to the host, and operations (a multiply-add is two)."""

    read: int = 0
    to_device: int = 0
    to_host: int = 0
    operations: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.read + other.read,
            self.to_device + other.to_device,
            self.to_host + other.to_host,
            self.operations + other.operations,
        )

    def seconds(self, ceilings: Ceilings) -> float:
        """Least time: all goes on at once, so that the slowest part decides."""
        return max(
            self.read / ceilings.read.median,
            self.to_device / ceilings.to_device.median,
            self.to_host / ceilings.to_host.median,
            self.operations / ceilings.matmul.median,
        )


def least_seconds(work: Mapping[str, Work], ceilings: Ceilings, overlapped: bool) -> float:
    """Least time of a step of such `work` by phase; `overlapped` where host and device memory have a bus between them.

    Else both tiers are one memory, and what is copied takes the time of what is read.
    """
    if not overlapped:
        return sum(part.seconds(ceilings) for part in work.values())
    on_device = sum(replace(part, to_device=0, to_host=0).seconds(ceilings) for part in work.values())
    across = sum(work.values(), Work())
    return max(on_device, replace(across, read=0, operations=0).seconds(ceilings))


def step_work(
    geometry: ModelGeometry, itemsize: int, sequences: Sequence[tuple[Method[Any, Any], int]], miss_rate: float = 1.0
) -> dict[str, Work]:
    """What one step needs, by phase, for `sequences`: each its method object and the tokens seen with the new one.

    `itemsize` is that of weights and KV in bytes; `miss_rate` the part of what is selected that has to be recalled.
    The method objects may be on the meta device.
    """
    batch, parts = len(sequences), geometry.parts
    work = dict.fromkeys(PHASES, Work())
    linear, mlp = parts.projections + parts.head, parts.used(batch)
    active = parts.mlp + round(parts.experts * parts.active)
    work["projections"] = Work(read=linear, operations=2 * batch * linear // itemsize)
    work["mlp"] = Work(read=mlp, operations=2 * batch * active // itemsize)
    for method, length in sequences:
        for layer in geometry.layers:
            traffic, group = method.traffic(layer.index, length), layer.num_heads // layer.num_kv_heads
            for phase, part in layer_work(traffic, group, itemsize, miss_rate).items():
                work[phase] += part
            if method.caches[layer.index].footprint().host:
                work["offload"] += Work(to_host=2 * layer.num_kv_heads * layer.head_dim * itemsize)
    work["sampling"] = Work(read=4 * batch * geometry.vocab_size)
    return work


def layer_work(traffic: Traffic, group: int, itemsize: int, miss_rate: float = 1.0) -> dict[str, Work]:
    """What the KV of one layer of one sequence needs in a step; `group` query heads share a KV head.

    Every number attended to is multiplied and added once for each query head of its group. Scores are counted in
    bytes alone: what arithmetic they take is the method's own.
    """
    return {
        "attention": Work(read=traffic.attended, operations=2 * group * traffic.attended // itemsize),
        "score": Work(read=traffic.scored),
        "select": Work(read=traffic.scores),
        "recall": Work(to_device=round(miss_rate * traffic.recalled)),
    }
