"""The device that everything runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from gpu_parts.frame import Row
from gpu_parts.setting import Setting


def run(setting: Setting, found: Any) -> Iterator[Row]:  # noqa: ARG001
    """Yield one row; fails where there is no such device."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    row: Row = {"host_bytes": memory, "cores": os.cpu_count()}
    if setting.device.type == "cuda":
        of = torch.cuda.get_device_properties(setting.device)
        row |= {
            "device": of.name,
            "device_bytes": of.total_memory,
            "multiprocessors": of.multi_processor_count,
            "capability": f"{of.major}.{of.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    else:
        row["device"] = "CPU: references, no kernels"
    print(f"  {row['device']}, {row['host_bytes'] / 2**30:.0f} GiB of host memory", flush=True)
    yield row
