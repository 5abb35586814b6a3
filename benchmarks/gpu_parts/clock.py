"""Seconds of work on a device: events around a batch of calls, so that the host waits for nothing in between."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from common import spread

from kvcli.memory.pinned import pinned_allocator
from kvcli.runtime.gpu.recorder import CudaRecorder

Work = Callable[[], Any]

FEWEST = 2
"""Rounds that are kept however late it is."""


def seconds_a_call(work: Work, calls: int, device: torch.device) -> float:
    """Time `calls` of `work` together; by the host's clock on a CPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - started) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / calls


def in_turn(
    works: Mapping[str, tuple[Work, int]], repeats: int, device: torch.device, deadline: float = math.inf
) -> dict[str, list[float]]:
    """Seconds a call, by name and repeat: in every round each work has its turn, of so many calls; a first is not kept.

    What disturbs a round disturbs all in it, so that a ratio taken within a round hardly knows of it. After `deadline`
    (`time.monotonic`) there are `FEWEST` rounds, or as many as there were.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        if repeat > FEWEST and time.monotonic() > deadline:
            break
        for name, (work, calls) in works.items():
            taken = seconds_a_call(work, calls, device)
            if repeat:
                times[name].append(taken)
    return times


def freed(device: torch.device) -> None:
    """Give back what nobody holds any more, and wait for it: what is timed next is not to run beside the unpinning."""
    gc.collect()
    if device.type == "cuda":
        pinned_allocator(device).allocate((1,), torch.uint8).result()  # the last in a row: its thread works in order
        torch.cuda.empty_cache()


def captured(work: Work, device: torch.device) -> Work:
    """Make a CUDA graph of work that allocates nothing the caller keeps; on a CPU it is the work itself."""
    if device.type != "cuda":
        return work
    recorder = CudaRecorder(device)
    recorder.record(work, work)
    return partial(recorder.replay, 0)


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return spread([1000 * taken for taken in seconds])
