"""What to run on a machine: of every method the most exact form of its KV that fits, the fastest step first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from kvcli.capacity.planning.plan import CapacityPlan
from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.kernels.quantised_blocks import KVDtype

MOST = 5
"""Settings that are shown."""

METHODS = ("full", "freekv", "shadowkv", "quest", "offload")
"""Methods that are tried where none is named."""


@dataclass(frozen=True)
class PublishedGPU:
    """What a maker says of a GPU: bytes, bytes a second of its memory and of the bus one way, dense bf16 FLOP/s."""

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
        raise usage_error(f"--gpu {name!r} is not listed", f"one of {', '.join(GPUS)}; or say its sizes and rates")
    return GPUS[name]


def forms(label: str, profile: Profile) -> Iterator[tuple[str, Profile]]:
    """Give a profile in each form that its KV in host memory can have, the most exact first."""
    if getattr(profile.settings, "kv_dtype", None) != "auto":  # it has none, or it was chosen
        yield label, profile
        return
    for held in get_args(KVDtype):
        settings = profile.settings.model_dump() | {"kv_dtype": held}
        try:
            found = resolve_profile(profile.method, overrides=settings)
        except KvcliError:  # not with these settings: KV is on the device
            continue
        yield label if held == "auto" else f"{label} {held}", found


def best(plans: Sequence[CapacityPlan]) -> list[CapacityPlan]:
    """Choose among the plans of `forms`: per method and budget the first that fits, the fastest step first.

    Where nothing fits, those that lack least.
    """
    fitting: dict[tuple[object, ...], CapacityPlan] = {}
    for plan in plans:
        budget = getattr(plan.profile.settings, "budget", None)
        if plan.fits:
            fitting.setdefault((plan.profile.method, budget, plan.context, plan.batch), plan)
    found = sorted(fitting.values(), key=lambda plan: plan.times.step if plan.times is not None else 0.0)
    return (found or sorted(plans, key=_lacking))[:MOST]


def _lacking(plan: CapacityPlan) -> int:
    return sum(max(0, size - plan.free[pool]) for pool, size in plan.needed.items())


def command(model: str | None, plan: CapacityPlan) -> str:
    """Write the command line of a plan, `DOCUMENT` in the place of files; settings of the method's profile left out."""
    usual, settings = resolve_profile(plan.profile.method).settings.model_dump(), plan.profile.settings.model_dump()
    changed = {key: value for key, value in settings.items() if value != usual[key]}
    options = ["--method", plan.profile.method]
    for key, value in changed.items():
        options += [f"--{key.replace('_', '-')}", f"{value}"] if key in OPTIONS else ["--set", f"{key}={value}"]
    named = [] if model is None else ["-m", model]
    return " ".join(["kvcli generate", *named, "DOCUMENT", *options, "--max-tokens", f"{plan.max_tokens}"])


OPTIONS = ("budget", "sink", "window", "page_size", "kv_dtype")
"""Settings that `kvcli generate` takes as options of their names."""
