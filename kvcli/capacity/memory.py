"""Count the memory that a run needs in each tier, and check that it fits, before anything is allocated.

A method built on the meta device has tensors of the right shapes without bytes, so its KV is counted, not estimated. If
the prompt decides how much a method keeps, the count is an upper bound (`Method.planned_is_bound`). The workspace of
the prefill (`kvcli.capacity.workspace`) is an estimate of the largest tensors that exist at once.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import psutil
import torch

from kvcli.capacity import cgroup
from kvcli.capacity.need import COMPILER_BYTES as COMPILER_BYTES
from kvcli.capacity.need import RUNTIME_BYTES as RUNTIME_BYTES
from kvcli.capacity.need import Need as Need
from kvcli.capacity.need import devices_of
from kvcli.capacity.smaller import SmallerForm, in_words, smaller_forms, that_fit
from kvcli.capacity.workspace import Workspace
from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.inputs.profiles import Profile
from kvcli.memory.disk_tier import DiskTier
from kvcli.memory.pinned import HostAllocator
from kvcli.memory.tiers import Footprint
from kvcli.methods import get_method
from kvcli.methods.card import GRAPH, gpu_step_of
from kvcli.methods.contract import AnyMethod, SequenceContext
from kvcli.methods.step import Whole
from kvcli.models.devices import Place, Placement, first_of, placement_of
from kvcli.models.geometry import ModelGeometry
from kvcli.models.loading import Checkpoint
from kvcli.runtime.sampling import Sampling
from kvcli.sizes import format_bytes

CPU = torch.device("cpu")
LONGEST_SEQUENCE = 1 << 40  # tokens; sizes of longer ones overflow in torch


class PromptSize(NamedTuple):
    """Tokens of a prompt; its first `shared` ones are those of another prompt, which holds their KV in host memory."""

    tokens: int
    shared: int = 0


Prompts = Sequence[int | PromptSize] | Mapping[int, int] | Mapping[PromptSize, int]
"""Sizes of prompts (those that share nothing as plain numbers of tokens), or the number of prompts of each size."""


def kv_footprint(
    profile: Profile,
    geometry: ModelGeometry,
    capacity: int,
    dtype: torch.dtype,
    prompt_tokens: int | None = None,
    place: Place | None = None,
) -> Footprint:
    """Count the KV bytes of one sequence of `capacity` tokens, `prompt_tokens` of them its prompt, if known.

    `place` is where the layers lie; by default, one device with a memory of its own.

    Raises:
        KvcliError: the sequence is longer than `LONGEST_SEQUENCE` (will not fit).
    """
    return planned_method(profile, geometry, capacity, dtype, prompt_tokens, place=place).footprint()


def planned_method(
    profile: Profile,
    geometry: ModelGeometry,
    capacity: int,
    dtype: torch.dtype,
    prompt_tokens: int | None = None,
    disk: DiskTier | None = None,
    place: Place | None = None,
    pinned: HostAllocator | None = None,
) -> AnyMethod:
    """Make the method object of a sequence on the meta device; parameters and errors as in `kv_footprint`.

    `pinned`, if given, allocates the host memory. A `disk` takes what host memory is not to hold; raises KvcliError if
    its cache is too small (will not fit), or if settings are for a CPU alone (usage). A budget that is a share of the
    prompt but too small for the method is taken to hold everything.
    """
    if prompt_tokens is not None:
        with suppress(KvcliError):
            profile = profile.for_prompt(prompt_tokens)
    if capacity > LONGEST_SEQUENCE:
        what = f"a sequence of {capacity:,} tokens is longer than any memory can hold"
        raise KvcliError(what, "use fewer tokens", ExitCode.WILL_NOT_FIT)
    dense, layers = getattr(profile.settings, "dense_layers", 0), len(geometry.layers)
    if dense > layers:
        what = f"{profile.method}: dense_layers = {dense}, but the model has {layers} layers"
        raise usage_error(what, f"give {layers} at most; method full attends to everything in all layers")
    cpu_only = profile.settings.cpu_only
    if cpu_only is not None and place is not None and place.type != "cpu":
        hint = "leave it at auto, or use --method offload, whose KV lies in host memory"
        raise usage_error(f"{cpu_only} of {profile.method} is for a CPU", hint)
    meta = torch.device("meta")
    known: dict[str, Any] = {"prompt_tokens": prompt_tokens, "states": geometry.states}
    known["placement"] = None if place is None else placement_of(place)
    context = SequenceContext.of(len(geometry.layers), meta, dtype, capacity, **known)
    one_memory = place is not None and place.type == "cpu"
    context.tiers = replace(context.tiers, pinned=pinned, one_memory=one_memory).above(disk)
    return get_method(profile.method)(profile.settings, geometry.layers, context)


def reads_by_windows(profile: Profile, checkpoint: Checkpoint) -> bool:
    """Tell whether a method reads prompts window by window, at positions that a longer prompt does not exceed."""
    return planned_method(profile, checkpoint.geometry, 1, checkpoint.dtype).prefill_window is not None


def need(
    profile: Profile,
    geometry: ModelGeometry,
    dtype: torch.dtype,
    prompts: Prompts,
    max_tokens: int,
    samples: int,
    beside: Profile | None = None,
    device: Place = CPU,
    together: int = 0,
    layers_beside: int = 0,
    disk: DiskTier | None = None,
) -> Need:
    """Add up the memory of a run over `prompts`, each continued `samples` times by `max_tokens`.

    With a profile `beside`, every sequence also holds the KV of a second method. The prefill's workspace depends on the
    kind of `device` (or devices), and on `together`, the largest total of tokens of prompts that are read together. The
    KV of `layers_beside` layers is on its way to or from the disk. The tier `disk` takes what host memory is not to
    hold.

    Raises:
        KvcliError: a sequence is longer than `LONGEST_SEQUENCE` (will not fit).
    """
    counted, kv = _counted(prompts), Footprint()

    def planned(tokens: int) -> AnyMethod:
        return planned_method(profile, geometry, tokens + max_tokens, dtype, tokens, disk, device)

    for (tokens, shared), number in counted.items():
        for sequences, common in ((number, shared), (number * (samples - 1), tokens)):  # samples share a whole prompt
            if not sequences:
                continue
            method = planned(tokens)
            if common:
                method.share(planned(tokens), common)
            held = method.footprint()
            if beside is not None:
                held += kv_footprint(beside, geometry, tokens + max_tokens, dtype, tokens, device)
            kv += replace(held, shared=0).times(sequences)
    longest = max(counted).tokens
    reader = planned(longest)
    kinds = [planned(size.tokens) for size in counted] if device.type == "cuda" and beside is None else []
    total, stacked = counted.total() * samples, 0
    if kinds and disk is None and all(gpu_step_of(type(method), method) == GRAPH for method in kinds):
        widest = max(layer.head_dim for layer in geometry.layers)
        slots = _in_slots(kinds, total, widest)
        kv = replace(kv, device=slots.device, by_device=slots.by_device)
        stacked = max(_layers_in_slots(kinds, total)) if total > 1 else 0
    if geometry.selects is not None:
        stacked = (1 if geometry.selects.alone else total) * geometry.scratch * (longest + max_tokens)
    size = max(longest, together) + reader.config.read_again(longest), dtype.itemsize
    workspace = Workspace.of(geometry, longest, reader.prefill_window, first_of(device), *size, reader)
    away = 0 if isinstance(device, Placement) else workspace.away  # the workspace is not split by device
    workspace = replace(workspace, away=away, stacked=stacked)
    widest = max(layer.token_size for layer in geometry.layers)
    kv += Footprint(host=layers_beside * longest * widest * dtype.itemsize)
    states = total * (1 if beside is None else 2) * sum(layer.nbytes for layer in geometry.states)
    on_host = 0 if geometry.streaming is None else geometry.streaming.on_host
    return Need(geometry.held_bytes, kv, workspace, states, on_host)


def _in_slots(methods: Sequence[AnyMethod], sequences: int, head_dim: int) -> Footprint:
    """Count the bytes of a batch over slots on its devices; a layer's tensors are stacked, each as long as the longest.

    `methods` has one for each kind of sequence. A step plan that rotates outside the model adds tables of all
    positions.
    """
    context, plan = methods[0].context, methods[0].step_plan
    held = methods[0].state_footprint().times(sequences)
    if plan is not None and isinstance(plan.fetch, Whole):
        held += _whole_layers(methods).times(sequences)
    for layer, size in enumerate(_layers_in_slots(methods, sequences)):
        held += context.placed(Footprint(size), context.device(layer))
    if plan is not None and plan.rotates:
        longest = max(method.context.capacity for method in methods)
        for device in dict.fromkeys(map(context.device, range(len(methods[0].caches)))):
            held += context.placed(Footprint(2 * longest * head_dim * torch.float32.itemsize), device)
    return held


def _layers_in_slots(methods: Sequence[AnyMethod], sequences: int) -> list[int]:
    """Count the bytes of each layer of a batch over slots."""
    layers = range(len(methods[0].caches))
    return [sequences * max(method.caches[layer].footprint().device for method in methods) for layer in layers]


def _whole_layers(methods: Sequence[AnyMethod]) -> Footprint:
    """Count the bytes of the buffers into which layers are fetched whole; layers on a device take turns with them."""
    held, context = Footprint(), methods[0].context
    for device in dict.fromkeys(map(context.device, methods[0].retrieval)):
        layers = [layer for layer in methods[0].retrieval if context.device(layer) == device]
        most = max(method.caches[layer].footprint().host for method in methods for layer in layers)
        held += context.placed(Footprint(Whole.buffers(len(layers)) * most), device)
    return held


def shortage(run: str, wanted: Need, place: Place, free: dict[str, int]) -> str | None:
    """Say of which memory a `run` needs more than is `free`; None if it fits."""
    pool = next((name for name, size in wanted.on(place).items() if size > free[name]), None)
    if pool is None:
        return None
    weights = f"weights {format_bytes(wanted.weights)}, " if wanted.weights else ""
    return (
        f"{run} needs {format_bytes(wanted.on(place)[pool])} of {pool} memory ({weights}"
        f"KV {format_bytes(wanted.kv.device + wanted.kv.host)}), but {format_bytes(free[pool])} are free"
    )


def contexts(number: int, longest: int) -> str:
    """Name a run over a number of prompts."""
    single = f"a context of {longest:,} tokens"
    return single if number == 1 else f"a batch of {number:,} contexts of up to {longest:,} tokens"


def check(
    profile: Profile,
    checkpoint: Checkpoint,
    prompts: Prompts,
    sampling: Sampling,
    beside: Profile | None = None,
    *,
    loaded: bool = False,
    together: int = 0,
    layers_beside: int = 0,
    disk: DiskTier | None = None,
    way_out: str = "use a smaller --budget, --dtype, --max-tokens or --num-samples, or fewer files at once",
) -> None:
    """Refuse a run that will not fit; `together` to `disk` are as in `need`, `way_out` says what a user can change.

    Raises:
        KvcliError: exit code 3, with the bytes needed and free, the longest context that would fit, and the forms of
            the model with which all of it would; the method refuses a budget that is a share of a prompt (usage).
    """
    counted = _counted(prompts)
    for size in counted:
        profile.for_prompt(size.tokens)

    def planned(longest: int, form: SmallerForm | None = None) -> Need:
        sizes: Counter[PromptSize] = Counter()
        for (tokens, shared), number in counted.items():
            sizes[PromptSize(min(longest, tokens), min(longest, shared))] += number
        wanted = need(
            profile,
            checkpoint.geometry if form is None else form.geometry,
            checkpoint.dtype if form is None else form.dtype,
            sizes,
            sampling.max_tokens,
            sampling.num_samples,
            beside,
            device,
            together,
            layers_beside,
            disk,
        )
        return replace(wanted, weights=0, weights_on_host=0) if loaded else wanted

    device, longest = checkpoint.place, max(counted).tokens
    free, wanted = available(device), planned(longest)
    lacking = shortage(contexts(counted.total(), longest), wanted, device, free)
    if lacking is None:
        if disk is not None:
            disk.check(wanted.kv.disk)
        return
    fitting = longest_fitting(lambda n: planned(n).on(device), free, longest)
    if fitting:
        least = f"up to {fitting:,} tokens would fit"
    elif wanted.weights + RUNTIME_BYTES > max(free.values()):
        least = "not even the weights fit"
    else:
        least = f"with {sampling.max_tokens:,} tokens of output no context fits"
    if not loaded and not isinstance(device, Placement):
        path = None if checkpoint.spec.dummy else checkpoint.path
        forms = smaller_forms(checkpoint.config, checkpoint.dtype, checkpoint.geometry, path, checkpoint.device)
        if options := that_fit(forms, lambda form: fits(planned(longest, form).on(device), free)):
            least += f"; it fits with {in_words(options)}"
    raise KvcliError(
        lacking,
        f"{least}; or {way_out}" + (", or leave out --audit or --lossless" if beside else ""),
        ExitCode.WILL_NOT_FIT,
    )


def available(place: Place) -> dict[str, int]:
    """Return the free bytes of each pool of memory; a container may grant less than the machine has.

    What torch holds of a GPU for later use is free: an earlier turn of a chat used it.
    """
    machine, group = int(psutil.virtual_memory().available), cgroup.memory_free()
    free = {"host": machine if group is None else min(machine, group)}
    for name, device in devices_of(place).items():
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free[name] = torch.cuda.mem_get_info(device)[0] + reusable
    return free


def fits(needed: dict[str, int], free: dict[str, int]) -> bool:
    """Tell whether every pool of memory holds what is needed of it."""
    return all(needed[pool] <= free[pool] for pool in needed)


def longest_fitting(needed: Callable[[int], dict[str, int]], free: dict[str, int], limit: int) -> int:
    """Find the longest context below `limit`, in tokens, whose needs fit every pool; 0 if none does.

    Needs grow with the context, except for one step down at the length from which hidden states lie in host memory.
    """
    # If a model's width is a power of two, the step is right after a power of two.
    tried = sorted({1, *((1 << bit) + 1 for bit in range(limit.bit_length())), limit - 1})
    lengths = [length for length in tried if 0 < length < limit]
    fitting = next((length for length in reversed(lengths) if fits(needed(length), free)), None)
    if fitting is None:
        return 0
    beyond = next((length for length in lengths if length > fitting), limit)
    more: int = bisect_left(range(fitting + 1, beyond), True, key=lambda n: not fits(needed(n), free))
    return fitting + more


def _counted(prompts: Prompts) -> Counter[PromptSize]:
    """Count the prompts of each size."""
    counted: Counter[PromptSize] = Counter()
    for size, number in (prompts if isinstance(prompts, Mapping) else Counter(prompts)).items():
        counted[size if isinstance(size, PromptSize) else PromptSize(size)] += number
    return counted
