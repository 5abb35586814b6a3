"""Advise what to run on a machine: of every method the most exact rung of the ladder that fits, the fastest step first.

The ladder has the forms of weights and of KV, a disk below host memory, and smaller budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import get_args

from kvcli.capacity.memory import need
from kvcli.capacity.planning.estimate import Machine, PlannedRun
from kvcli.capacity.planning.plan import CapacityPlan, plan_one
from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.kernels.quant import KVDtype
from kvcli.memory.disk_tier import DiskTier

MOST = 6
"""Settings to show."""

METHODS = ("full", "retroinfer", "freekv", "shadowkv", "quest", "offload")
"""Methods to try if none is named."""


@dataclass(frozen=True)
class PublishedGPU:
    """Published figures of a GPU: bytes, bytes a second of its memory and of the bus one way, dense bf16 FLOP/s."""

    memory: float
    bandwidth: float
    bus: float
    compute: float
    source: str


GPUS: Mapping[str, PublishedGPU] = {
    "rtx-3090": PublishedGPU(24e9, 936e9, 32e9, 71e12, "NVIDIA Ampere GA102 architecture, appendix A"),
    "rtx-4090": PublishedGPU(24e9, 1008e9, 32e9, 165.2e12, "NVIDIA Ada architecture, appendix A"),
    "a10": PublishedGPU(24e9, 600e9, 32e9, 125e12, "NVIDIA A10 data sheet"),
    "l4": PublishedGPU(24e9, 300e9, 32e9, 121e12, "NVIDIA L4 data sheet, without sparsity"),
    "a100-80g": PublishedGPU(80e9, 2039e9, 32e9, 312e12, "NVIDIA A100 data sheet, SXM"),
    "h100": PublishedGPU(80e9, 3350e9, 64e9, 989e12, "NVIDIA H100 data sheet, SXM, without sparsity"),
    "h200": PublishedGPU(141e9, 4800e9, 64e9, 989e12, "NVIDIA H200 data sheet, SXM, without sparsity"),
    "b200": PublishedGPU(180e9, 8000e9, 64e9, 2250e12, "NVIDIA DGX B200 data sheet, an eighth, without sparsity"),
}


def published(name: str) -> PublishedGPU:
    """Find a GPU by its name. Raises KvcliError (usage) for one that is not listed."""
    if name not in GPUS:
        raise usage_error(f"unknown --gpu {name!r}", f"choose from {', '.join(GPUS)}, or give its sizes and rates")
    return GPUS[name]


def advise(
    subjects: Sequence[PlannedRun],
    machine: Machine,
    profiles: Sequence[tuple[str, Profile]],
    contexts: Sequence[int],
    batches: Sequence[int],
    max_tokens: int,
    disk: float | None = None,
    disk_rate: float | None = None,
) -> list[CapacityPlan]:
    """Search the ladder for each profile, context and batch: the first rung that fits, the fastest step first.

    `subjects` are the model with its weights in each form to try; `disk` are free bytes for KV below host memory, on a
    disk that reads `disk_rate` a second. If nothing fits, the plans that lack least are returned.
    """
    found, nearest = [], []
    for (label, profile), context, batch in product(profiles, contexts, batches):
        for rung in rungs(label, profile, subjects, disk is not None):
            tier = None
            if rung.tiered:
                tier = DiskTier.elsewhere(Path("DIR"), machine.free["host"] // 2, batch)
            free = None if disk is None or tier is None else int(disk)
            shape = (rung.subject, machine, rung.label, rung.profile, context, batch, max_tokens, tier, free)
            short = _lacks(*shape)
            if not short:
                found.append(plan_one(*shape, disk_rate=disk_rate))
                break
            nearest.append((short, shape))
    if not found:
        least = sorted(nearest, key=lambda pair: pair[0])[:MOST]
        return [plan_one(*shape, disk_rate=disk_rate) for _, shape in least]
    return sorted(found, key=lambda plan: plan.times.step if plan.times is not None else 0.0)[:MOST]


@dataclass(frozen=True)
class Rung:
    """One setting to try; if `tiered`, host memory is a cache of KV on the disk."""

    label: str
    subject: PlannedRun
    profile: Profile
    tiered: bool


def rungs(label: str, profile: Profile, subjects: Sequence[PlannedRun], disk: bool) -> list[Rung]:
    """List every form of a profile's run, the most exact first, and among equals the fastest.

    A rung's cost adds up what it gives up: the form of weights and of KV, a disk's pace, half of the budget.
    """
    found = []
    for (fewer, halved), subject in product(_budgets(profile), subjects):
        for held, formed in forms(halved):
            for tiered in (False, True) if disk and formed.settings.on_host else (False,):
                streaming = subject.geometry.streaming
                cost = _GIVEN_UP[subject.weights] + _GIVEN_UP[held] + _OF_DISK * tiered + _OF_BUDGET * fewer
                cost += _STREAMED * (streaming is not None)
                names = [label] + [f"budget {getattr(halved.settings, 'budget', 0)}"] * bool(fewer)
                names += [f"{held} KV"] * (held != "auto")
                names += [f"{subject.weights} weights"] * (subject.weights != "auto")
                names += [] if streaming is None else [f"weights on {streaming.where}"]
                found.append((cost, Rung(", ".join(names + ["disk"] * tiered), subject, formed, tiered)))
    return [rung for _, rung in sorted(found, key=lambda pair: pair[0])]


def forms(profile: Profile) -> Iterator[tuple[str, Profile]]:
    """Yield a profile with each form that its KV in host memory can have, the most exact first."""
    if getattr(profile.settings, "kv_dtype", None) != "auto" or not profile.settings.on_host:  # none, or it was chosen
        yield "auto", profile
        return
    for held in get_args(KVDtype):
        settings = profile.settings.model_dump() | {"kv_dtype": held}
        try:
            found = resolve_profile(profile.method, overrides=settings)
        except KvcliError:  # not with these settings
            continue
        yield held, found


def _budgets(profile: Profile) -> Iterator[tuple[int, Profile]]:
    """Yield a profile with its budget, half and a quarter of it, and how often it was halved."""
    yield 0, profile
    budget = getattr(profile.settings, "budget", None)
    if not isinstance(budget, int) or not profile.settings.on_host:
        return
    parts = {name: getattr(profile.settings, name) for name in ("sink", "window") if hasattr(profile.settings, name)}
    for times in (1, 2):
        smaller = {name: size >> times for name, size in {"budget": budget, **parts}.items()}
        with suppress(KvcliError):  # too small for the method
            yield times, resolve_profile(profile.method, overrides=profile.settings.model_dump() | smaller)


_GIVEN_UP = {"auto": 0.0, "int8": 1.0, "fp8": 1.5, "k8v4": 2.0, "int4": 3.0}
"""The costs in closeness of forms of weights and of KV, in order: KV in 4 bits costs as much as weights in 4."""

_OF_DISK = 2.5
_OF_BUDGET = 4.0
_STREAMED = 3.5
"""Streaming weights is exact, but much slower than weights of fewer bits."""


def _lacks(
    subject: PlannedRun,
    machine: Machine,
    label: str,  # noqa: ARG001 - what is planned, as `plan_one` takes it
    profile: Profile,
    context: int,
    batch: int,
    max_tokens: int,
    tier: DiskTier | None,
    disk_free: int | None,
) -> int:
    """Count the bytes that a setting lacks in all pools."""
    lengths = {context: batch}
    wanted = need(profile, subject.geometry, subject.dtype, lengths, max_tokens, 1, device=machine.device, disk=tier)
    pools = wanted.on(machine.device)
    return sum(max(0, size - machine.free[pool]) for pool, size in pools.items()) + max(
        0, wanted.kv.disk - (disk_free or 0)
    )


def command(model: str | None, plan: CapacityPlan) -> str:
    """Write the command line of a plan, with `DOCUMENT` for files and without settings of the method's profile."""
    usual, settings = resolve_profile(plan.profile.method).settings.model_dump(), plan.profile.settings.model_dump()
    changed = {key: value for key, value in settings.items() if value != usual[key]}
    options = ["--method", plan.profile.method]
    for key, value in changed.items():
        options += [f"--{key.replace('_', '-')}", f"{value}"] if key in OPTIONS else ["--set", f"{key}={value}"]
    if plan.weights != "auto":
        options += ["--weights", plan.weights]
    if plan.streaming is not None:
        options += ["--weights-on", plan.streaming.where]
        options += [] if plan.streaming.limit is None else ["--weights-memory", f"{plan.streaming.limit}"]
    if plan.tier is not None:
        size = plan.tier.host_bytes >> 20
        host = f"{size >> 10}GiB" if size % 1024 == 0 else f"{size}MiB"
        options += ["--kv-disk", f"{plan.tier.folder}", "--host-memory", host]
    named = [] if model is None else ["-m", model]
    return " ".join(["kvcli generate", *named, "DOCUMENT", *options, "--max-tokens", f"{plan.max_tokens}"])


OPTIONS = ("budget", "sink", "window", "page_size", "kv_dtype")
"""Settings that `kvcli generate` takes as options of their names."""
