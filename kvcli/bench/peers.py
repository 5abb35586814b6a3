"""transformers' own caches under its own `generate`, on the same weights.

Their KV is always random, because the time of full attention does not depend on its values. kvpress is not among the
peers: its releases (0.5.5) need transformers below 5.3, which cannot be installed beside the version that kvcli needs.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, DynamicCache
from transformers.generation.streamers import BaseStreamer
from typing_extensions import override

from kvcli.bench.runs import Load, TimedRun
from kvcli.capacity.planning.probe import RandomKV
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.models.layers import cache_argument
from kvcli.models.loading import Model
from kvcli.telemetry.timeline import Timeline

_RESIDENT, _OFFLOADED = "transformers", "transformers offloaded"


class TokenClock(BaseStreamer):
    """Records when the tokens of each step arrive on the host: `times` in seconds, the first one that of the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @override
    def put(self, value: torch.Tensor) -> None:
        self.times.append(perf_counter())

    @override
    def end(self) -> None: ...


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
        """The name of the cache."""
        return _OFFLOADED if self.offloading else _RESIDENT

    def pipeline(self, load: Load) -> None:
        """Say nothing: its steps are transformers' own."""

    @torch.inference_mode()
    def run(self, load: Load, timeline: Timeline) -> TimedRun:  # noqa: ARG002
        """Decode once; the phases of the step are not timed."""
        clock, cache = TokenClock(), self.cache(load)
        for layer in self.model.geometry.layers:
            k, v = self.noise.kv(layer, load.context)
            cache.update(*(x[None].expand(load.batch, -1, -1, -1) for x in (k, v)), layer.index)
        ids = torch.ones(load.batch, load.context + 1, dtype=torch.long, device=self.model.device)
        generate: Any = self.model.module.generate
        with self.attention():
            generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{cache_argument(self.model.module): cache},
                max_new_tokens=load.max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                streamer=clock,
            )
        steps = [1000 * (later - earlier) for earlier, later in pairwise(clock.times)]
        return TimedRun(steps[len(steps) - load.steps :])

    def cache(self, load: Load) -> Cache:  # noqa: ARG002
        """Make an empty cache."""
        return DynamicCache(config=self.model.module.config, offloading=self.offloading)

    def attention(self) -> AbstractContextManager[None]:
        """Choose the kernels of attention: all but cuDNN, which torch prefers on some GPUs.

        cuDNN plans every length anew, which takes tens of milliseconds a step.
        """
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def peer_profiles(device: torch.device) -> dict[str, Profile]:
    """List the caches that run on a device: by label a profile that needs as much memory.

    The offloaded cache needs CUDA.
    """
    resident = {_RESIDENT: resolve_profile("full")}
    return resident | {_OFFLOADED: resolve_profile("offload")} if device.type == "cuda" else resident


def left_out(device: torch.device) -> list[str]:
    """List the peers that cannot run here, each with the reason."""
    offloaded = [] if device.type == "cuda" else [f"{_OFFLOADED}: it needs CUDA"]
    return [*offloaded, "kvpress: its releases need transformers below 5.3"]
