"""What a run will need, what of it fits, and how long it will take, from a model's config alone.

Memory is counted by the arithmetic that `generate` refuses by (`kvcli.capacity.memory`); times are
`kvcli.capacity.planning.estimate`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from kvcli.capacity import memory
from kvcli.capacity.memory import RUNTIME_BYTES, Need
from kvcli.capacity.planning.estimate import Machine, PlannedRun, Times, estimate
from kvcli.capacity.planning.probe import PROMPT
from kvcli.inputs.profiles import Profile

LONGEST = 1 << 27  # tokens: longer contexts are not looked for


@dataclass(frozen=True)
class CapacityPlan:
    """One combination of profile, context and batch; `label` names the profile.

    `needed` and `free` are bytes by pool of memory; `longest` is the longest context that fits, in tokens, None where
    nothing up to `LONGEST` is too long. `bound`: the prompt decides how much KV is kept, and this is the most.
    """

    label: str
    profile: Profile
    context: int
    batch: int
    max_tokens: int
    need: Need
    needed: dict[str, int]
    free: dict[str, int]
    longest: int | None
    bound: bool
    times: Times | None

    @property
    def fits(self) -> bool:
        """Whether the machine holds it."""
        return memory.fits(self.needed, self.free)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the JSON report: bytes, milliseconds, and what each figure stands on."""
        return {
            "profile": self.profile.as_dict(),
            "context": self.context,
            "batch_size": self.batch,
            "max_tokens": self.max_tokens,
            "memory": {
                "weights": self.need.weights,
                "kv_device": self.need.kv.device,
                "kv_host": self.need.kv.host,
                "workspace": self.need.workspace,
                "runtime": RUNTIME_BYTES,
                "needed": self.needed,
                "free": self.free,
            },
            "fits": self.fits,
            "longest_context": self.longest,
            "times": None if self.times is None else _times(self.times),
            "basis": {
                "weights": "counted",
                "kv": self.kv_basis,
                "workspace": "estimated",
                "times": self.time_basis,
            },
        }

    @property
    def kv_basis(self) -> str:
        """What the size of the KV stands on."""
        return "counted, the most that a prompt may need" if self.bound else "counted"

    @property
    def time_basis(self) -> str:
        """What the times stand on."""
        if self.times is None:
            return "not known without --bandwidth, --bus and --compute"
        if not self.times.tried:
            return "estimated: the least that the rates allow, all selected pages recalled"
        times = self.times
        whole = times.layers == times.tried and times.tried_length == self.context
        tried = f"measured on {times.tried} of {times.layers} layers at {times.tried_length:,} tokens"
        missed = "" if times.missed is None else f" with {times.missed:.0%} of the selected pages recalled"
        prefill = f"prefill measured on {PROMPT} tokens, estimated beyond"
        return f"step {tried}{missed}{'' if whole else ', estimated beyond'}; {prefill}"


def plan(
    subject: PlannedRun,
    machine: Machine,
    profiles: Sequence[tuple[str, Profile]],
    contexts: Sequence[int],
    batches: Sequence[int],
    max_tokens: int,
) -> Iterator[CapacityPlan]:
    """Plan every combination: prompts of so many tokens, so many of them at once, each continued by `max_tokens`."""
    for (label, profile), context, batch in product(profiles, contexts, batches):
        yield _plan(subject, machine, label, profile, context, batch, max_tokens)


def _plan(
    subject: PlannedRun, machine: Machine, label: str, profile: Profile, context: int, batch: int, max_tokens: int
) -> CapacityPlan:
    def need(length: int) -> Need:
        return memory.need(profile, subject.geometry, subject.dtype, [length] * batch, max_tokens, 1)

    wanted = need(context)
    longest = memory.longest_fitting(lambda length: need(length).on(machine.device), machine.free, LONGEST)
    method = memory.planned_method(profile, subject.geometry, context + max_tokens, subject.dtype, context)
    return CapacityPlan(
        label=label,
        profile=profile,
        context=context,
        batch=batch,
        max_tokens=max_tokens,
        need=wanted,
        needed=wanted.on(machine.device),
        free=machine.free,
        longest=None if longest == LONGEST - 1 else longest,
        bound=method.planned_is_bound,
        times=estimate(subject, machine, profile, method, context, batch),
    )


def _times(times: Times) -> dict[str, Any]:
    return {
        "prefill_ms": 1000 * times.prefill,
        "step_ms": 1000 * times.step,
        "floor_ms": 1000 * times.floor,
        "missed": times.missed,
        "phases": [
            {"phase": phase, **asdict(work), "floor_ms": 1000 * seconds}
            for phase, (work, seconds) in times.floors.items()
        ],
    }
