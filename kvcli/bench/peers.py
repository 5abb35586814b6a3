"""transformers' own caches under its own `generate`, on the weights that kvcli runs on.

Their KV is made up in every case: full attention takes as long whatever the values are. kvpress is no peer here: its
releases (0.5.5) need transformers below 5.3, and one environment has one transformers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, DynamicCache
from transformers.generation.streamers import BaseStreamer

from kvcli.bench.candidates import TimedRun
from kvcli.bench.sources import Load, RandomKV
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.models.loading import Model
from kvcli.telemetry.timeline import Timeline

_RESIDENT, _OFFLOADED = "transformers", "transformers offloaded"


class Clock(BaseStreamer):
    """Notes when the tokens of a step arrive; they are on the host by then."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002
        """Take the tokens of a step, or the prompt at the beginning."""
        self.times.append(perf_counter())

    def end(self) -> None:
        """Nothing more comes."""


@dataclass(frozen=True)
class Transformers:
    """`generate` with a `DynamicCache`: resident, or offloaded to host memory layer by layer."""

    model: Model
    noise: RandomKV
    offloading: bool = False
    kind: str = "peer"
    profile: None = None

    @property
    def label(self) -> str:
        """See `Candidate.label`."""
        return _OFFLOADED if self.offloading else _RESIDENT

    @torch.inference_mode()
    def run(self, load: Load, timeline: Timeline) -> TimedRun:  # noqa: ARG002
        """See `Candidate.run`; its step is not taken apart."""
        clock, cache = Clock(), self.cache(load)
        for layer in self.model.geometry.layers:
            k, v = self.noise.kv(layer, load.context)
            cache.update(*(x[None].expand(load.batch, -1, -1, -1) for x in (k, v)), layer.index)
        ids = torch.ones(load.batch, load.context + 1, dtype=torch.long, device=self.model.device)
        generate: Any = self.model.module.generate
        with self.attention():
            generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=load.max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                streamer=clock,
            )
        steps = [1000 * (later - earlier) for earlier, later in pairwise(clock.times)]
        return TimedRun(steps[len(steps) - load.steps :])

    def cache(self, load: Load) -> Cache:  # noqa: ARG002
        """Make the empty cache."""
        return DynamicCache(config=self.model.module.config, offloading=self.offloading)

    def attention(self) -> AbstractContextManager[None]:
        """Choose the kernels of attention.

        Without cuDNN, which torch prefers on some GPUs: it plans every length anew, tens of milliseconds a step.
        """
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def peer_profiles(device: torch.device) -> dict[str, Profile]:
    """Those that run on a device, by label: a profile that needs as much memory. The offloaded cache needs CUDA."""
    resident = {_RESIDENT: resolve_profile("full")}
    return resident | {_OFFLOADED: resolve_profile("offload")} if device.type == "cuda" else resident


def left_out(device: torch.device) -> list[str]:
    """Peers that cannot run here, with the reason."""
    offloaded = [] if device.type == "cuda" else [f"{_OFFLOADED}: it needs CUDA"]
    return [*offloaded, "kvpress: its releases need transformers below 5.3"]
