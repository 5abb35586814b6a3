"""The roofline of a decode step: the bytes and operations that it needs, over the measured rates of the machine.

The work follows from the model's shapes and from the traffic that a method's caches state (`LayerCache.traffic`).
Divided by the rates it is the least time of a step whose phases run one after another, because each phase needs the
result of the one before it; only transfers over the bus can overlap with the rest. The overhead of an implementation
(copies to gather pages, kernel launches, Python) is not counted: a profile shows it as the distance from the roofline.

Rates are measured anew for every report, because a shared machine changes from day to day, and for every run of a
profile on a CPU, because its memory is shared from minute to minute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import psutil
import torch

from kvcli.memory.tiers import Traffic
from kvcli.methods.contract import AnyMethod
from kvcli.models.geometry import ModelGeometry

REPEATS = 5
OLD = 2.0
"""Seconds after which the rates of a CPU are measured again, which takes up to half a second."""
# Bytes, far more than any cache holds, so that memory is measured; on a GPU also long against a kernel launch.
_BUFFER_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
_MATMUL_SIZE = {"cpu": 768, "cuda": 8192}  # rows and columns of the matrices that are multiplied

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
"""The phases of a step, in the order in which they are shown.

`projections` are the linear layers of attention and the model's head; `mlp` is everything else that the layers compute,
with the states that some keep. `correction`, which compares two queries, and `host`, the time that no other phase
claims, move nothing.
"""


@dataclass(frozen=True)
class Rate:
    """A rate in units a second: the median over the repeats, the slowest and the fastest of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, amount: float, seconds: list[float]) -> Rate:
        """Summarise repeats that each did `amount`."""
        return cls(amount / statistics.median(seconds), amount / max(seconds), amount / min(seconds))

    @classmethod
    def over(cls, rates: Sequence[Rate]) -> Rate:
        """Summarise measurements from several moments."""
        return cls(
            statistics.median(rate.median for rate in rates),
            min(rate.least for rate in rates),
            max(rate.most for rate in rates),
        )

    @classmethod
    def given(cls, rate: float) -> Rate:
        """Make a rate that is known without measuring."""
        return cls(rate, rate, rate)


@dataclass(frozen=True)
class MachineRates:
    """Rates of one device in bytes a second, of `matmul` in operations a second (a multiply-add is two).

    `read` is reading device memory; `copy` counts the bytes that are read, and as many again are written. `to_device`
    and `to_host` are copies from and to pinned host memory; on a CPU, where both tiers are one memory, they equal
    `copy`.
    """

    read: Rate
    copy: Rate
    to_device: Rate
    to_host: Rate
    matmul: Rate

    @classmethod
    def over(cls, measured: Sequence[MachineRates]) -> MachineRates:
        """Summarise measurements from several moments."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: Rate.over([getattr(each, name) for each in measured]) for name in names})

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for the reports."""
        return asdict(self)


class RatesOverTime:
    """The rates of a machine during a report; `all` has every measurement, in order.

    A CPU's rates are measured again and again, because others share its memory; a GPU's once, before caches take its
    room.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        """Measure for the first time; `dtype` is that of the matrices."""
        self.device, self.dtype = device, dtype
        self.all = [measure_rates(device, dtype)]
        self._since = time.monotonic()

    def now(self) -> MachineRates:
        """Return the latest rates, on a CPU at most `OLD` seconds old."""
        if self.device.type == "cpu" and time.monotonic() - self._since > OLD:
            self.all.append(measure_rates(self.device, self.dtype))
            self._since = time.monotonic()
        return self.all[-1]


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

    def seconds(self, rates: MachineRates) -> float:
        """Return the least time of this work: memory, bus and arithmetic overlap, and the slowest of them decides."""
        return max(
            self.read / rates.read.median,
            self.to_device / rates.to_device.median,
            self.to_host / rates.to_host.median,
            self.operations / rates.matmul.median,
        )


def least_seconds(work: Mapping[str, Work], rates: MachineRates, overlapped: bool) -> float:
    """Return the least time of a step from its work by phase.

    `overlapped` is True if a bus lies between host and device memory, so that transfers can overlap with the phases.
    Otherwise both tiers are one memory, and a transfer takes its time there.
    """
    if not overlapped:
        return sum(part.seconds(rates) for part in work.values())
    on_device = sum(replace(part, to_device=0, to_host=0).seconds(rates) for part in work.values())
    transfers = replace(sum(work.values(), Work()), read=0, operations=0)
    return max(on_device, transfers.seconds(rates))


def equivalent_bandwidth(work: Mapping[str, Work], kv_bytes: int, rates: MachineRates) -> float | None:
    """Return the rate, in bytes a second, at which full attention would read all KV in a method's time.

    `kv_bytes` is all KV. The method reads what it scores and attends to on the device, and recalls pages over the bus,
    one after another; computation meanwhile is not counted (arXiv 2410.21465, section 4.2). None if it reads nothing.
    """
    read = sum(work[phase].read for phase in ("score", "attention"))
    seconds = read / rates.read.median + work["recall"].to_device / rates.to_device.median
    return kv_bytes / seconds if seconds else None


def step_work(
    geometry: ModelGeometry, itemsize: int, sequences: Sequence[tuple[AnyMethod, int]], miss_rate: float = 1.0
) -> dict[str, Work]:
    """Return the work of one decode step by phase.

    `sequences` has the method object of each sequence, which may be on the meta device, with its length in tokens,
    including the new one. `itemsize` is that of weights and KV in bytes; `miss_rate` is the part of the selected KV
    that has to be recalled.
    """
    batch, parts = len(sequences), geometry.parts
    work = dict.fromkeys(PHASES, Work())
    linear, mlp = parts.projections + parts.head, parts.used(batch)
    work["projections"] = Work(read=linear, operations=2 * batch * (parts.counts.projections + parts.counts.head))
    states = 2 * batch * sum(layer.nbytes for layer in geometry.states)  # read and written
    work["mlp"] = Work(read=mlp + states, operations=2 * batch * parts.passed)
    for method, length in sequences:
        for layer in geometry.layers:
            # A latent is read once for both, key and value.
            uses = 2 // layer.parts * layer.num_heads // layer.num_kv_heads
            one = layer_work(method.traffic(layer.index, length), uses, itemsize, miss_rate)
            for phase, part in [*one.items()] * (1 + layer.readers):
                work[phase] += part
            if method.caches[layer.index].footprint().host:
                work["offload"] += Work(to_host=layer.grows * itemsize)
    work["sampling"] = Work(read=4 * batch * geometry.vocab_size)
    return work


def layer_work(traffic: Traffic, group: int, itemsize: int, miss_rate: float = 1.0) -> dict[str, Work]:
    """Return the work of a step on the KV of one layer of one sequence; `group` query heads share a KV head.

    Every number attended to is multiplied and added once for each query head of its group. Scoring is counted only in
    bytes, because its arithmetic differs from method to method.
    """
    return {
        "attention": Work(read=traffic.attended, operations=2 * group * traffic.attended // itemsize),
        "score": Work(read=traffic.scored),
        "select": Work(read=traffic.scores),
        "recall": Work(
            read=round(miss_rate * traffic.rebuilt_from),
            to_device=round(miss_rate * traffic.recalled),
            operations=round(miss_rate * traffic.rebuilding),
        ),
    }


def measure_rates(device: torch.device, dtype: torch.dtype) -> MachineRates:
    """Measure the rates of a device; `dtype` is that of the matrices."""
    size = min(_BUFFER_BYTES[device.type], psutil.virtual_memory().available // 8)
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    numbers = max(1, size // 4)
    source = torch.ones(numbers, device=device)  # written, so that its memory pages exist
    target = torch.zeros_like(source)
    copy = Rate.of(source.nbytes, timed(lambda: target.copy_(source), device))
    to_device = to_host = copy
    if device.type == "cuda":
        pinned = torch.ones(min(numbers, 64 << 20), pin_memory=True)
        part = target[: len(pinned)]
        to_device = Rate.of(pinned.nbytes, timed(lambda: part.copy_(pinned, non_blocking=True), device))
        to_host = Rate.of(pinned.nbytes, timed(lambda: pinned.copy_(part, non_blocking=True), device))
    side = _MATMUL_SIZE[device.type]
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    return MachineRates(
        read=Rate.of(source.nbytes, timed(lambda: torch.dot(source, source), device)),
        copy=copy,
        to_device=to_device,
        to_host=to_host,
        matmul=Rate.of(2 * side**3, timed(lambda: left @ right, device)),
    )


def rate_rows(rates: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str]]:
    """Format the medians of `MachineRates.as_dict` as labels with their values."""
    labels = {"read": "memory read", "copy": "memory copy", "to_device": "host to device", "to_host": "device to host"}
    rows = [(label, f"{rates[name]['median'] / 1e9:,.1f} GB/s") for name, label in labels.items()]
    return [*rows, ("matrix products", f"{rates['matmul']['median'] / 1e12:,.3f} TFLOP/s")]


def timed(
    run: Callable[[], object],
    device: torch.device,
    repeats: int = REPEATS,
    before: Callable[[], object] = lambda: None,
) -> list[float]:
    """Time `repeats` runs, after one run that is not counted; `before` precedes each of them and is not timed.

    Returns seconds; the device has finished when the clock stops.
    """
    seconds = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            before()
            synchronize(device)
            started = time.perf_counter()
            run()
            synchronize(device)
            seconds.append(time.perf_counter() - started)
    return seconds[1:]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work that was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
