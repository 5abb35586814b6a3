"""transformers beside kvcli: its caches under its own `generate` at a context that still fits, and its prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, StaticCache

from gpu_parts.clock import freed, milliseconds
from gpu_parts.frame import Found, NotHere, Row, Rows
from gpu_parts.made_up import dummy_model, workshop
from gpu_parts.setting import Setting
from gpu_parts.steps import StepCase, compared
from kvcli.bench.runs import Load, Transformers, seeded_tokens
from kvcli.capacity.planning.probe import RandomKV
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.layers import cache_argument
from kvcli.models.loading import Model
from kvcli.runtime.engine import engine
from kvcli.telemetry.timeline import Timeline


def peers(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield kvcli's rows, then the peers' on the same weights, as a model cannot be both at once.

    Peers are as much slower as to leave no doubt.
    """
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
    resident, offloaded = Transformers(model, noise), Transformers(model, noise, offloading=True)
    if not found.has(resident.label):
        yield [_timed(resident, load)]
    if setting.device.type == "cuda" and not found.has(offloaded.label):
        # Short of the context, because pinned memory comes in powers of two, and one token more would take it twice.
        load = Load(context - 16, batch=1, warmup=1, steps=3)
        yield [_timed(offloaded, load)]


def static(setting: Setting, found: Found) -> Iterator[Rows]:  # noqa: ARG001
    """Yield the row of a compiled step over a `StaticCache`, which is reported, not a target."""
    if setting.device.type != "cuda":
        raise NotHere("generate compiles nothing on a CPU")
    model = dummy_model(setting, setting.shape)
    load = Load(setting.middle, batch=1, warmup=8, steps=16)
    yield [_timed(Static(model, RandomKV(0, setting.device, setting.dtype)), load)]


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


ROUNDS = 2


def reading(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield the rows of a round, a reading of a long prompt by each in turn; a short one of each goes before.

    kvcli's KV leaves for pinned host memory, which is allocated within the time taken; that of transformers (sdpa)
    stays on the device. Both return the logits of one token. Peak memory is the allocator's, above weights and hidden
    states; kvcli's includes the intermediates of a chunk, so that what is related to KV is less.
    """
    model = dummy_model(setting, setting.shape)
    ids = seeded_tokens(setting.middle, model.geometry.vocab_size, 0)
    readers: dict[str, Callable[[Model, list[int]], object]] = {"kvcli": by_kvcli, "transformers": by_transformers}
    for reader in readers.values():
        reader(model, ids[: setting.middle // 32])
    for number in range(ROUNDS):
        if not found.has(*readers, round=number):
            yield [
                reading_shown({"case": name, "round": number} | _measured(model, ids, reader))
                for name, reader in readers.items()
            ]


def by_kvcli(model: Model, ids: list[int]) -> object:
    """Read as `generate` does, into freekv."""
    with engine(model, [len(ids) + 1]) as ready:
        method = ready.method(resolve_profile("freekv"), ready.context(len(ids), 1))
        return method, ready.prefill(ids, [method])


@torch.inference_mode()
def by_transformers(model: Model, ids: list[int]) -> object:
    """Read in one forward pass."""
    cache, tokens = DynamicCache(config=model.module.config), torch.tensor([ids], device=model.device)
    given = {cache_argument(model.module): cache, "use_cache": True}
    return cache, model.module(input_ids=tokens, logits_to_keep=1, **given)


def _measured(model: Model, ids: list[int], reader: Callable[[Model, list[int]], object]) -> Row:
    freed(model.device)  # the KV of the reading before, many GiB of pinned memory
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started = time.perf_counter()
    kept = reader(model, ids)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    del kept
    hidden = len(ids) * model.module.config.hidden_size * model.dtype.itemsize
    peak = torch.cuda.max_memory_allocated() if cuda else None
    return {
        "context": len(ids),
        "seconds": seconds,
        "peak_bytes": peak,
        "weight_bytes": model.geometry.weight_bytes,
        "hidden_bytes": hidden,
        "above_bytes": None if peak is None else peak - model.geometry.weight_bytes - hidden,
    }


def reading_shown(row: Row) -> Row:
    """Print a reading, and pass it on."""
    above = row["above_bytes"]
    memory = "" if above is None else f", {above / 2**30:.2f} GiB above weights and hidden states"
    print(f"  {row['case']:<34} {row['context']:>9,} tokens: {row['seconds']:8.2f} s{memory}", flush=True)
    return row
