"""The bytes that a run needs of each pool of memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcli.capacity.workspace import Workspace
from kvcli.memory.tiers import Footprint
from kvcli.models.devices import Place, Placement

# Bytes that a process holds in addition to tensors: libraries' own memory, a tokenizer, compiled loops, allocator
# slack, thread stacks, a CUDA context. SmolLM2 on a CPU holds 340 to 370 MiB, of which tokenizer and loops are a third.
RUNTIME_BYTES = 384 << 20

# At most what the compiler of a CPU's loops leaves in a process that compiles all of them, the first one on a machine.
# SmolLM2's first run of `full` took 139 MiB more than later ones, that of `freekv` 246. No run is refused for it.
COMPILER_BYTES = 256 << 20


@dataclass(frozen=True)
class Need:
    """Bytes of a run: `weights`, `kv` of all sequences by tier, and the workspace of the longest `prefill`.

    `states` is the part of `kv` that layers keep in a fixed size. Weights that a GPU's host memory holds are in
    addition to those on the device.
    """

    weights: int
    kv: Footprint
    prefill: Workspace
    states: int = 0
    weights_on_host: int = 0

    @property
    def workspace(self) -> int:
        """Bytes of the prefill on the device, or on each of several, as everything but a layer's own passes all."""
        return self.prefill.on_device

    def on(self, place: Place) -> dict[str, int]:
        """Return the total by pool of memory; on a CPU both tiers are host memory, and each GPU is a pool."""
        held, beside = by_pool(self.kv, place), self.workspace + RUNTIME_BYTES
        if place.type != "cuda":
            return {"host": held["host"] + self.weights + beside}
        weights = weights_by_pool(self.weights, place)
        for name in devices_of(place):
            held[name] += beside + weights[name]
        held["host"] += self.prefill.on_host + self.weights_on_host + RUNTIME_BYTES
        return held


def weights_by_pool(weights: int, place: Place) -> dict[str, int]:
    """Return the bytes of a model's weights by pool of memory; 0 if they are loaded already."""
    if isinstance(place, Placement) and place.type == "cuda":
        return {name: place.weights(device) if weights else 0 for name, device in devices_of(place).items()}
    return {"device" if place.type == "cuda" else "host": weights}


def by_pool(kv: Footprint, place: Place) -> dict[str, int]:
    """Return the bytes of KV by pool of memory."""
    if place.type != "cuda":
        return {"host": kv.device + kv.host}
    devices = devices_of(place)
    of_each = kv.by_device or ((kv.device,) if len(devices) == 1 else (0,) * len(devices))
    return dict(zip(devices, of_each, strict=True)) | {"host": kv.host}


def devices_of(place: Place) -> dict[str, torch.device]:
    """Name the pools of memory that belong to GPUs; the host's is called host."""
    if place.type != "cuda":
        return {}
    if isinstance(place, Placement):
        return {str(device): device for device in place.devices}
    return {"device": place}
