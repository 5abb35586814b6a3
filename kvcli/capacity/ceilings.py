"""What this machine can do at most, measured when asked for: memory, bus and matrix rates.

They are what a step's time is held against (`kvcli.capacity.floors`) and what one is planned with (`kvcli.plan`). All
take two seconds together and are measured anew each time: a rate kept from another day says nothing of a machine shared
today.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

REPEATS = 5
# Buffers far larger than any cache, so that memory is measured; a device's takes long enough to tell from its launch.
_BUFFER = {"cpu": 128 << 20, "cuda": 1 << 30}
_SQUARE = {"cpu": 768, "cuda": 8192}  # side of the matrices that are multiplied


@dataclass(frozen=True)
class Rate:
    """What a second yields: the median of the repeats, the slowest and the fastest of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, amount: float, seconds: list[float]) -> Rate:
        """Summarise repeats that each did `amount`."""
        return cls(amount / statistics.median(seconds), amount / max(seconds), amount / min(seconds))

    @classmethod
    def given(cls, rate: float) -> Rate:
        """A rate that was told, not measured."""
        return cls(rate, rate, rate)


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device: bytes a second, and for `matmul` operations a second (a multiply-add is two).

    `read` reads the device's memory, `copy` reads and writes as many bytes as it says. `to_device` and `to_host` are
    copies from and to pinned host memory; on a CPU, where both tiers are one memory, they are `copy`.
    """

    read: Rate
    copy: Rate
    to_device: Rate
    to_host: Rate
    matmul: Rate

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the reports."""
        return asdict(self)


def rates_text(rates: Mapping[str, Mapping[str, float]]) -> str:
    """The medians of `Ceilings.as_dict` in a line."""
    read, copied, there, back = (
        f"{rates[name]['median'] / 1e9:,.1f}" for name in ("read", "copy", "to_device", "to_host")
    )
    products = f"products {rates['matmul']['median'] / 1e12:,.3f} Top/s"
    return f"memory {read} GB/s read, {copied} copied; host to device {there} GB/s, back {back}; {products}"


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure everything; `dtype` is that of the matrices."""
    size = min(_BUFFER[device.type], psutil.virtual_memory().available // 8)
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    numbers = max(1, size // 4)
    source = torch.ones(numbers, device=device)  # written, so that the pages exist
    target = torch.zeros_like(source)
    copy = Rate.of(source.nbytes, timed(lambda: target.copy_(source), device))
    to_device = to_host = copy
    if device.type == "cuda":
        pinned = torch.ones(min(numbers, 64 << 20), pin_memory=True)
        part = target[: len(pinned)]
        to_device = Rate.of(pinned.nbytes, timed(lambda: part.copy_(pinned, non_blocking=True), device))
        to_host = Rate.of(pinned.nbytes, timed(lambda: pinned.copy_(part, non_blocking=True), device))
    side = _SQUARE[device.type]
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    return Ceilings(
        read=Rate.of(source.nbytes, timed(lambda: torch.dot(source, source), device)),
        copy=copy,
        to_device=to_device,
        to_host=to_host,
        matmul=Rate.of(2 * side**3, timed(lambda: left @ right, device)),
    )


def timed(
    work: Callable[[], object],
    device: torch.device,
    repeats: int = REPEATS,
    before: Callable[[], object] = lambda: None,
) -> list[float]:
    """Seconds of `work`, waited for, time after time and once unmeasured; `before` each of them comes off the clock."""
    seconds = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            before()
            wait(device)
            started = time.perf_counter()
            work()
            wait(device)
            seconds.append(time.perf_counter() - started)
    return seconds[1:]


def wait(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
