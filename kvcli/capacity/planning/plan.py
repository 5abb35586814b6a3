"""The memory and the time of a run, and whether it fits, from a model's config alone.

Memory is counted as `generate` counts it before it refuses a run (`kvcli.capacity.memory`); times come from
`kvcli.capacity.planning.estimate`.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from kvcli.capacity import memory, unnamed
from kvcli.capacity.disk import disk_tier
from kvcli.capacity.memory import COMPILER_BYTES, RUNTIME_BYTES, Need
from kvcli.capacity.planning.estimate import DiskReads, Machine, PlannedRun, Times, estimate
from kvcli.capacity.planning.probe import PROMPT
from kvcli.capacity.smaller import SmallerForm, smaller_forms, that_fit
from kvcli.inputs.options import DiskOptions
from kvcli.inputs.profiles import Profile
from kvcli.kv.recurrent import state_marks
from kvcli.memory.disk_tier import DiskTier
from kvcli.models.devices import Placement
from kvcli.models.streamed import WeightStreaming
from kvcli.sizes import Share

LONGEST = 1 << 27  # tokens; the search for the longest context that fits ends here


@dataclass(frozen=True)
class CapacityPlan:
    """One combination of profile, context and batch; `label` names the profile, and a share's tokens.

    `needed` and `free` are bytes by pool of memory. `longest` is the longest context that fits, in tokens, and None if
    every context up to `LONGEST` fits. `bound` is True if the prompt decides how much KV is kept, and `need` has the
    upper bound. `disk` is the bytes of the prompts' saved KV, `disk_rate` the bytes that a disk reads in a second, if
    given. `tier` is the disk below host memory, if there is one, with `disk_free` bytes. `weights` is the form that
    weights are brought into on loading, `placement` the devices of layers, if there are several. Where the run does not
    fit, it would with one of the options of the model in `fits_with`. `streaming` says which weights are streamed, and
    `step_weights` how many bytes of them a step reads.
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
    disk: int
    disk_rate: float | None = None
    tier: DiskTier | None = None
    disk_free: int | None = None
    weights: str = "auto"
    placement: Placement | None = None
    fits_with: tuple[str, ...] = ()
    streaming: WeightStreaming | None = None
    step_weights: int = 0

    @property
    def load_seconds(self) -> float | None:
        """Seconds to load the prompts' KV from a disk of this rate, None if that is unknown."""
        return None if self.disk_rate is None else self.disk / self.disk_rate

    @property
    def fits(self) -> bool:
        """Tell whether the memory of the machine holds the run, and its disk the KV there."""
        return memory.fits(self.needed, self.free) and self.need.kv.disk <= (self.disk_free or 0)

    @property
    def compiles(self) -> bool:
        """Tell whether a first run compiles loops, which no pool counts: on a CPU, whose memory is one pool."""
        return set(self.needed) == {"host"}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for the JSON report: bytes, milliseconds, and the basis of each figure."""
        return {
            "profile": self.profile.as_dict(),
            "context": self.context,
            "batch_size": self.batch,
            "max_tokens": self.max_tokens,
            "weights": self.weights,
            **({} if self.placement is None else {"placement": self.placement.as_dict()}),
            **({} if self.streaming is None else {"weights_on": self.streaming.where}),
            "memory": {
                "weights": self.need.weights,
                **({} if self.streaming is None else {"streamed_weights": self.step_weights}),
                "kv_device": self.need.kv.device,
                "kv_host": self.need.kv.host,
                "kv_disk": self.need.kv.disk,
                "states": self.need.states,
                "workspace": self.need.workspace,
                "workspace_parts": dict(self.need.prefill.device),
                "workspace_host_parts": dict(self.need.prefill.host),
                "kv_away": self.need.prefill.away,
                "runtime": RUNTIME_BYTES,
                **({"compiler_in_first_run": COMPILER_BYTES} if self.compiles else {}),
                "needed": self.needed,
                "free": self.free,
            },
            "disk": {"bytes": self.disk, "load_ms": None if self.load_seconds is None else 1000 * self.load_seconds},
            "fits": self.fits,
            **({} if self.fits else {"fits_with": self.fits_with}),
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
        """The basis of the size of the KV."""
        return "counted, the most that a prompt may need" if self.bound else "counted"

    @property
    def time_basis(self) -> str:
        """The basis of the times."""
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
    disk_rate: float | None = None,
    disk: DiskOptions | None = None,
) -> Iterator[CapacityPlan]:
    """Plan every combination of profile, context in tokens and batch size, with `max_tokens` of output each.

    A `disk` takes what host memory is not to hold, under those profiles that keep KV in host memory.

    Raises:
        KvcliError: the disk cannot be used, or by none of the profiles (usage); its cache is too small (will not fit).
    """
    if disk is not None and not any(profile.settings.on_host for _, profile in profiles):
        disk_tier(disk, profiles[0][1], machine.device, 1)
    forms: list[SmallerForm] | None = None
    for (label, named), context, batch in product(profiles, contexts, batches):
        profile = unnamed.native(named, subject.geometry)
        label = label if profile is named else profile.name
        tier = disk_free = None
        if disk is not None and profile.settings.on_host:
            tier = disk_tier(disk, profile, machine.device, batch, machine.free["host"])
            disk_free = shutil.disk_usage(tier.folder).free
        found = plan_one(subject, machine, label, profile, context, batch, max_tokens, tier, disk_free, disk_rate)
        if not found.fits and machine.placement is None:
            model = subject.config, subject.dtype, subject.geometry, subject.path
            forms = forms or [*smaller_forms(*model, machine.device)]
            found = replace(found, fits_with=_fits_with(forms, found, machine))
        yield found


def choice(
    retrieval: Profile, subject: PlannedRun, machine: Machine, context: int, batch: int, max_tokens: int
) -> Profile:
    """Return the profile that a generation takes on this machine if nobody names a method."""
    place = machine.place

    def lack(profile: Profile) -> str | None:
        need = memory.need(profile, subject.geometry, subject.dtype, {context: batch}, max_tokens, 1, device=place)
        return memory.shortage(memory.contexts(batch, context), need, place, machine.free)

    lengths = [context + max_tokens] * batch
    return unnamed.choose(retrieval, subject.geometry, subject.dtype, place, lengths, lack)


def _fits_with(forms: Sequence[SmallerForm], plan: CapacityPlan, machine: Machine) -> tuple[str, ...]:
    """Return the options of the model with which a plan would fit."""

    def fits(form: SmallerForm) -> bool:
        sizes = (plan.profile, form.geometry, form.dtype, {plan.context: plan.batch}, plan.max_tokens, 1)
        return memory.fits(memory.need(*sizes, device=machine.place, disk=plan.tier).on(machine.place), plan.free)

    return tuple(that_fit(forms, fits))


def plan_one(
    subject: PlannedRun,
    machine: Machine,
    label: str,
    profile: Profile,
    context: int,
    batch: int,
    max_tokens: int,
    tier: DiskTier | None = None,
    disk_free: int | None = None,
    disk_rate: float | None = None,
) -> CapacityPlan:
    """Plan one combination, with a `tier` of `disk_free` bytes for what host memory is not to hold.

    `disk_rate` is the bytes that a disk, also the tier's, reads in a second.
    """
    resolved = profile.for_prompt(context)
    if isinstance(getattr(profile.settings, "budget", None), Share):
        label = f"{label} = {getattr(resolved.settings, 'budget', 0):,}"

    def need(length: int) -> Need:
        lengths, device = {length: batch}, machine.place
        return memory.need(profile, subject.geometry, subject.dtype, lengths, max_tokens, 1, device=device, disk=tier)

    wanted = need(context)
    free = machine.free | ({} if disk_free is None else {"disk": disk_free})

    def pools(length: int) -> dict[str, int]:
        found = need(length)
        return found.on(machine.place) | ({} if tier is None else {"disk": found.kv.disk})

    longest = memory.longest_fitting(pools, free, LONGEST)
    capacity, place, streaming = context + max_tokens, machine.place, subject.geometry.streaming
    method = memory.planned_method(profile, subject.geometry, capacity, subject.dtype, context, tier, place)
    return CapacityPlan(
        label=label,
        profile=resolved,
        context=context,
        batch=batch,
        max_tokens=max_tokens,
        need=wanted,
        needed=wanted.on(machine.place),
        free=machine.free,
        longest=None if longest == LONGEST - 1 else longest,
        bound=method.planned_is_bound,
        times=estimate(
            *(subject, machine, resolved, method, context, batch, DiskReads.of(disk_rate, wanted.kv), disk_rate)
        ),
        disk=batch * _saved_bytes(subject, context),
        tier=tier,
        disk_free=disk_free,
        disk_rate=disk_rate,
        weights=subject.weights,
        placement=machine.placement,
        streaming=streaming,
        step_weights=0 if streaming is None else streaming.per_step(subject.geometry.parts.active, batch),
    )


def _saved_bytes(subject: PlannedRun, context: int) -> int:
    """Return the bytes of a prompt's saved keys and values in all layers, and of the saved states."""
    geometry = subject.geometry
    kept = len(state_marks(geometry.states, context)) * sum(layer.nbytes for layer in geometry.states)
    return context * subject.dtype.itemsize * sum(layer.token_size for layer in geometry.layers) + kept


def _times(times: Times) -> dict[str, Any]:
    return {
        "prefill_ms": 1000 * times.prefill,
        "step_ms": 1000 * times.step,
        "floor_ms": 1000 * times.roofline,
        "bytes_from_disk": times.from_disk,
        "missed": times.missed,
        "phases": [
            {"phase": phase, **asdict(work), "floor_ms": 1000 * seconds}
            for phase, (work, seconds) in times.phases.items()
        ],
    }
