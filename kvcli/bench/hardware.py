"""What a profile ran on, and the clock that belongs to it."""

from __future__ import annotations

import os
from typing import Any

import torch

from kvcli.bench.device import DeviceTimeline, MarkedTimeline
from kvcli.models.loading import Model
from kvcli.telemetry import report
from kvcli.telemetry.timeline import Timeline


def recording(device: torch.device, nvtx: bool = False) -> Timeline:
    """A timeline that is on: with the host's clock on a CPU, with events on a GPU; `nvtx` marks what it times."""
    if device.type != "cuda":
        return Timeline(enabled=True)
    return MarkedTimeline(device) if nvtx else DeviceTimeline(device)


def describe(model: Model) -> tuple[dict[str, Any], dict[str, Any]]:
    """The environment and the model, as the report shows them."""
    cuda = model.device.type == "cuda"
    environment = report.environment() | {
        "device": torch.cuda.get_device_name(model.device) if cuda else report.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }
    described = {
        "name": model.name,
        "source": model.source,
        "type": model.module.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "weight_bytes": model.geometry.weight_bytes,
        "layers": len(model.geometry.layers),
    }
    return environment, described
