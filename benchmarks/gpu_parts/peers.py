"""transformers' own caches under its own `generate`, at a context that still fits: resident, offloaded, and static.

kvcli's steps come first, the peers' after them on the same weights: they are as much slower as to leave no doubt, and a
model cannot be both at once. `static` is a compiled step over a `StaticCache`, and is reported, not a target.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from transformers import Cache, StaticCache

from gpu_parts.clock import freed, milliseconds
from gpu_parts.frame import NotHere, Row
from gpu_parts.made_up import dummy_model, workshop
from gpu_parts.setting import Setting
from gpu_parts.steps import StepCase, compared
from kvcli.bench.runs import Load, Transformers
from kvcli.capacity.planning.probe import RandomKV
from kvcli.telemetry.timeline import Timeline


def run(setting: Setting, found: Any) -> Iterator[Row]:
    """Yield kvcli's rows, then the peers'."""
    context = setting.middle
    cases = [
        StepCase("streaming", "streaming", context),
        StepCase("full", "full", context),
        *(StepCase.freekv(f"freekv {part:.0%}", context, corrected=part) for part in (0.0, 0.3, 1.0)),
    ]
    with workshop(setting, setting.shape, [context]) as place:
        model, noise = place.engine.model, place.noise
        yield from compared(place, setting, cases, found)
    del place
    freed(setting.device)
    load = Load(context, batch=1, warmup=2, steps=8 if not setting.smoke else 2)
    yield _timed(Transformers(model, noise), load)
    if setting.device.type == "cuda":
        # Short of the context, because pinned memory comes in powers of two, and one token more would take it twice.
        load = Load(context - 16, batch=1, warmup=1, steps=3)
        yield _timed(Transformers(model, noise, offloading=True), load)


def static(setting: Setting, found: Any) -> Iterator[Row]:  # noqa: ARG001
    """Yield the row of the compiled static cache."""
    if setting.device.type != "cuda":
        raise NotHere("generate compiles nothing on a CPU")
    model = dummy_model(setting, setting.shape)
    load = Load(setting.middle, batch=1, warmup=8, steps=16)
    yield _timed(Static(model, RandomKV(0, setting.device, setting.dtype)), load)


@dataclass(frozen=True)
class Static(Transformers):
    """`generate` with a `StaticCache`, whose step it compiles."""

    @property
    def label(self) -> str:
        """See `Candidate.label`."""
        return "transformers static, compiled"

    def cache(self, load: Load) -> Cache:
        """See `Transformers.cache`."""
        return StaticCache(config=self.model.module.config, max_cache_len=load.capacity)

    def attention(self) -> AbstractContextManager[None]:
        """Let torch choose: no length is new."""
        return nullcontext()


def _timed(peer: Transformers, load: Load) -> Row:
    steps = peer.run(load, Timeline()).steps_ms
    step = milliseconds([taken / 1000 for taken in steps])
    print(
        f"  {peer.label:<40} {load.context:>9,} x 1: {step['median']:8.3f} ms ({step['min']:.3f} to {step['max']:.3f})"
    )
    return {"case": peer.label, "context": load.context, "batch": 1, "step_ms": step, "steps_ms": steps}
