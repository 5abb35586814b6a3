"""Assemble the report of a run, with the model and the machine that it ran on."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

import torch

from kvcli.inputs.profiles import Profile
from kvcli.memory.tiers import Footprint
from kvcli.models.devices import all_of
from kvcli.models.loading import Model
from kvcli.runtime.streamed_weights import Streamed
from kvcli.telemetry import report


def run_report(
    model: Model,
    profile: Profile,
    sequences: Sequence[report.Sequence],
    kv: Footprint,
    saved: Sequence[report.SavedPrompt] = (),
    weights: report.WeightTraffic | None = None,
) -> report.Report:
    """Assemble the entries of a run's sequences; `kv` is what their caches hold at its end."""
    cuda, devices = model.device.type == "cuda", all_of(model.place)
    device_name = ", ".join(map(torch.cuda.get_device_name, devices)) if cuda else "CPU"
    return report.Report(
        environment=report.environment()
        | {
            "device": device_name,
            "threads": torch.get_num_threads(),
            "spins": os.environ.get("OMP_WAIT_POLICY", os.environ.get("GOMP_SPINCOUNT")),
        },
        model=model.as_dict(),
        profile=profile.as_dict(),
        sequences=list(sequences),
        memory=report.Memory(
            device_peak_bytes=sum(map(torch.cuda.max_memory_allocated, devices)) if cuda else None,
            host_pinned_bytes=kv.host if cuda else 0,
            device_kv_bytes=kv.device,
            host_kv_bytes=kv.host,
            disk_kv_bytes=kv.disk,
            process_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        ),
        saved=list(saved),
        streamed_weights=weights,
    )


def weight_traffic(read: Streamed, decoded: Streamed, steps: int) -> report.WeightTraffic:
    """Make the entry of streamed weights from what was counted while prompts were read, and in `steps`."""
    times = read.nbytes, read.waited / 1e6, decoded.nbytes, decoded.waited / 1e6
    return report.WeightTraffic(*times, steps, decoded.asked, decoded.cached)
