"""A model of the right shape with random weights, and sequences whose KV is made up, ready to decode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu_parts.device import pinned
from gpu_parts.setting import Setting
from kvcli.capacity.planning.probe import RandomKV
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.kv.cache import Tiers
from kvcli.methods import get_method
from kvcli.models.loading import Model, ModelSpec, load_model
from kvcli.runtime.engine import Engine, engine
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.counters import Counters

_ALIGNED = 4096  # elements to which views of the shared pool begin


@dataclass(frozen=True)
class SharedHost(Tiers):
    """Host memory that all who ask for some share: a pool of made-up numbers, in which each begins somewhere else."""

    pool: Tensor | None = None
    asked: list[int] = field(default_factory=list)

    def on_host_async(self, *shape: int, dtype: torch.dtype | None = None) -> Future[Tensor]:
        """Give a view of the pool; what is larger, or of another dtype, gets memory of its own."""
        assert self.pool is not None
        size = math.prod(shape)
        if size > len(self.pool) or dtype not in (None, self.pool.dtype):
            return super().on_host_async(*shape, dtype=dtype)
        places = (len(self.pool) - size) // _ALIGNED + 1
        start = sum(self.asked) // _ALIGNED % places * _ALIGNED
        self.asked.append(-(-size // _ALIGNED) * _ALIGNED)
        ready: Future[Tensor] = Future()
        ready.set_result(self.pool[start : start + size].view(shape))
        return ready


def dummy_model(setting: Setting, shape: str) -> Model:
    """Make the model up, on the device."""
    dtype = str(setting.dtype).removeprefix("torch.")
    return load_model(ModelSpec(shape, device=setting.device.type, dtype=dtype, load_format="dummy"))


class Workshop:
    """An engine, and the KV and host memory that its sequences get."""

    def __init__(self, setting: Setting, ready: Engine):
        self.setting, self.engine = setting, ready
        self.noise = RandomKV(0, setting.device, setting.dtype)
        tiers = Tiers.for_device(setting.device, setting.dtype)
        pool = pinned(setting, setting.pool // setting.dtype.itemsize)
        self.tiers = SharedHost(**vars(tiers), pool=pool)

    def profile(self, method: str, **changed: Any) -> Profile:
        """Give a method's profile with the budget of the targets, and `changed`."""
        setting, fields = self.setting, get_method(method).Config.model_fields
        same: dict[str, Any] = {"budget": setting.budget, **setting.sizes}
        if method == "freekv":
            same |= {"sink": setting.sink, "window": setting.sink, "page_size": setting.page}
        elif method == "streaming":
            same["positions"] = "original"
        return resolve_profile(method, None, {key: same[key] for key in same if key in fields} | changed)

    @torch.inference_mode()
    def sequences(self, profile: Profile, context: int, batch: int = 1, copied: bool = False) -> list[RunningSequence]:
        """Make a batch whose caches hold `context` made-up tokens each; `copied`: those of the first, copied."""
        self.engine.rope.cover(context + self.setting.spare)
        made, sampling = [], Sampling(max_tokens=self.setting.spare, ignore_eos=True)
        for row in range(batch):
            if row and copied:
                method = made[0].method.fork(Counters(len(self.engine.layers)), f"sequence {row}")
            else:
                known = self.engine.context(context, self.setting.spare)
                known.tiers = self.tiers
                method = self.engine.method(profile, known)
                self.noise.fill([method], self.engine.layers, context)
            # Sequences of one token would choose the same pages, which are then fetched once for all.
            made.append(self.engine.sequence(method, sampling, index=row, sample=row, first_token=1 + row))
        return made


@contextmanager
def workshop(setting: Setting, shape: str, contexts: Sequence[int]) -> Iterator[Workshop]:
    """Make a model of a shape ready for contexts of these lengths."""
    model = dummy_model(setting, shape)
    with engine(model, [context + setting.spare for context in contexts]) as ready:
        yield Workshop(setting, ready)
