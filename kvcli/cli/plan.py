"""`kvcli plan`: memory, times and the longest context, from a model's config alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from kvcli.cli import options
from kvcli.cli.options import MODEL, Panel, at_least, compared, distinct, names, positive, positive_count
from kvcli.cli.output import progress, write_result
from kvcli.cli.reads import check_files
from kvcli.cli.saved import KVDisk
from kvcli.errors import usage_error
from kvcli.sizes import parse_bytes

if TYPE_CHECKING:
    import torch

    from kvcli.capacity.planning.estimate import Machine, PlannedRun
    from kvcli.models.weights import Weights

_SIZE = at_least(1, parse_bytes)
_RUN, _MACHINE = Panel("Run"), Panel("Machine", env=True)


def plan(
    model: Annotated[
        str | None,
        MODEL.option(
            "--model -m",
            "NAME",
            "Checkpoint, config.json, hub id or shape; weights are not needed. Without it, the small demo model.",
        ),
    ] = None,
    dtype: options.DType = "auto",
    weights: options.Weights = "auto",
    offline: options.Offline = False,
    method: options.Methods = None,
    profile: options.Profiles = None,
    budget: options.Budgets = None,
    settings: options.Settings = None,
    kv_dtype: options.KVDType = None,
    kv_disk: KVDisk = None,
    context: Annotated[str, _RUN.option("--context", "TOKENS,...", "Lengths of the prompt, as in 8K.")] = "32K",
    batch_size: Annotated[str, _RUN.option("--batch-size", "N,...", "Prompts continued together.")] = "1",
    max_tokens: Annotated[
        int, _RUN.option("--max-tokens", "TOKENS", "Longest output.", positive_count, env=True)
    ] = 256,
    device: Annotated[str, options.device(_MACHINE)] = "auto",
    gpu: Annotated[
        str | None,
        _MACHINE.option("--gpu", "NAME", "Another GPU by its published sizes and rates: rtx-4090, l4, h100, ..."),
    ] = None,
    device_memory: Annotated[
        int | None,
        _MACHINE.option("--device-memory", "SIZE", "Free memory of another machine's GPU, as in 80GiB.", _SIZE),
    ] = None,
    host_memory: Annotated[
        int | None,
        _MACHINE.option(
            "--host-memory", "SIZE", "Free memory of its host, as in 512GiB; here, of KV beside --kv-disk.", _SIZE
        ),
    ] = None,
    bandwidth: Annotated[
        int | None,
        _MACHINE.option("--bandwidth", "SIZE", "Memory bandwidth of its GPU, bytes a second, as in 3350GB.", _SIZE),
    ] = None,
    bus: Annotated[
        int | None,
        _MACHINE.option("--bus", "SIZE", "Bandwidth between host and GPU, bytes a second, as in 55GB.", _SIZE),
    ] = None,
    compute: Annotated[
        float | None,
        _MACHINE.option("--compute", "TFLOPS", "Rate of its matrix products in TFLOP/s, as in 600.", positive),
    ] = None,
    disk: Annotated[
        int | None,
        _MACHINE.option("--disk", "SIZE", "Free disk for KV below host memory, as in 1TB: a rung of --advise.", _SIZE),
    ] = None,
    disk_rate: Annotated[
        int | None,
        _MACHINE.option("--disk-rate", "SIZE", "What the disk of KV reads, bytes a second, as in 5GB.", _SIZE),
    ] = None,
    advise: Annotated[
        bool, _RUN.flag("--advise", "Search methods, weights, KV, disk and budgets; show what fits, how to run it.")
    ] = False,
    as_json: options.AsJson = False,
    output: options.Output = None,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the guard around every command
) -> None:
    """Plan the memory and the time of a run, and tell whether it fits.

    kvcli plan -m llama-3.1-8b --method full,freekv --context 8K,128K,1M

    Reads a config.json and needs no weights. The rates of this machine and the times of
    a few layers are measured in seconds; --device-memory and --host-memory plan for
    another machine instead, and --bandwidth, --bus and --compute give its rates; --gpu
    knows all but --host-memory of some. --advise searches methods, forms of weights and
    of KV, a disk (--disk) and budgets: of each method the most exact that fits, the
    fastest step first.

    Exit codes: 0 done, whether or not it fits; 1 failed, 2 usage, 130 interrupted.
    """
    check_files({"-o": output}, model=model, profiles=names(profile, "--profile"), settings=settings)
    if advise and method is None and profile is None:
        from kvcli.capacity.planning.advice import METHODS as TRIED

        method = ",".join(TRIED)
    from kvcli.inputs.kv_options import disk_options

    chosen = compared(method, profile, settings, budget, kv_dtype)
    contexts, batches = distinct(context, "--context"), distinct(batch_size, "--batch-size")
    rates = {"--bandwidth": bandwidth, "--bus": bus, "--compute": compute and 1e12 * compute}
    for_kv = None
    if kv_disk is not None and not any((gpu, device_memory, *rates.values())):  # this machine's memory is measured
        for_kv, host_memory = host_memory, None
    tier = disk_options(kv_disk, for_kv)
    sizes: dict[str, float | None] = {"--device-memory": device_memory, "--host-memory": host_memory, **rates}
    if gpu is not None:
        from kvcli.capacity.planning.advice import published

        known = published(gpu)
        sizes["--device-memory"] = device_memory or known.memory
        sizes |= {"--bandwidth": bandwidth or known.bandwidth, "--bus": bus or known.bus}
        sizes["--compute"] = rates["--compute"] or known.compute
    told: dict[str, float] = {name: size for name, size in sizes.items() if size is not None}

    from kvcli.capacity.planning import advice, tables
    from kvcli.capacity.planning.plan import plan as plan_all
    from kvcli.ui import console

    with progress(quiet) as observer:
        if model is None:
            observer.notice("no -m: planning for the small demo model that comes with kvcli")
        observer.stage("measure")
        subject, machine = _subject_and_machine(model, dtype, weights, device, offline, told)
        subjects = [subject]
        if advise and machine.placement is not None:
            raise usage_error(f"--advise is for one device, --device names {device}", "leave one of them out")
        if advise and subject.geometry.weights == "auto":
            subjects += [subject.with_weights(each) for each in ("int8", "int4")]
        observer.stage_done()
        beyond = subject.geometry.beyond_positions(max(contexts) + max_tokens, model or "the demo model")
        if beyond is not None:
            observer.notice(beyond)
        labelled = [(variant.label, variant.profile) for variant in chosen]
        plans = []
        if advise:
            observer.stage("plan")
            plans = advice.advise(subjects, machine, labelled, contexts, batches, max_tokens, disk, disk_rate)
        else:
            observer.stage("plan", len(labelled) * len(contexts) * len(batches))
            for each_plan in plan_all(subject, machine, labelled, contexts, batches, max_tokens, disk_rate, tier):
                plans.append(each_plan)
                observer.advance()
    commands = [{"command": advice.command(model, entry)} if advise else {} for entry in plans]
    if as_json:
        found = [entry.as_dict() | line for entry, line in zip(plans, commands, strict=True)]
        text = json.dumps(_as_dict(model, subject, machine, found)) + "\n"
    else:
        title = f"{model or 'demo model'}, {str(subject.dtype).removeprefix('torch.')}, {max_tokens:,} tokens of output"
        notes = tables.notes(plans, machine.rates, machine.here)
        notes += [(entry.label, line["command"]) for entry, line in zip(plans, commands, strict=True) if line]
        if advise and not any(entry.fits for entry in plans):
            notes.append(("advice", "nothing that was tried fits: these lack least"))
        if gpu is not None:
            notes.append(("GPU", f"{gpu}: {published(gpu).source}"))
        text = console.render_tables(tables.tables(title, plans), output is not None, notes)
    write_result(output, text)


def _subject_and_machine(
    model: str | None, dtype: str, weights: Weights, device: str, offline: bool, told: dict[str, float]
) -> tuple[PlannedRun, Machine]:
    """Read the config, and measure this machine or take the sizes and rates of another from the options in `told`."""
    from kvcli.capacity.memory import available
    from kvcli.capacity.need import devices_of
    from kvcli.capacity.planning.estimate import Machine, PlannedRun
    from kvcli.capacity.roofline import MachineRates, Rate, measure_rates
    from kvcli.models.devices import another_machine, placed, resolve_devices
    from kvcli.models.loading import ModelSpec, form_in, locate, read_config, resolve_dtype

    spec = ModelSpec(model, load_format="dummy", offline=offline, weights=weights)
    config = read_config(spec)

    def subject_on(place: torch.device, here: bool) -> PlannedRun:
        path = locate(spec)
        form = form_in(config, weights, place, path, here, dtype)
        return PlannedRun.of(config, resolve_dtype(dtype, config, place), form, path)

    others = another_machine(device)
    if told and not others:
        what = f"{next(iter(told))} plans for another machine with a GPU, --device {device} for this one"
        raise usage_error(what, "leave one of them out")
    if not told:
        devices = resolve_devices(device)
        first = devices[0]
        subject = subject_on(first, True)
        placement = placed(device, config, subject.dtype, subject.geometry, devices)
        rates = measure_rates(first, subject.dtype)
        return subject, Machine(first, available(placement or first), rates, True, placement)
    missing = [name for name in ("--device-memory", "--host-memory") if name not in told]
    if missing:
        raise usage_error(
            f"{next(iter(told))} plans for another machine, and {missing[0]} is not given",
            "give --device-memory and --host-memory, and for times --bandwidth, --bus and --compute",
        )
    of_each, host = int(told["--device-memory"]), int(told["--host-memory"])
    given = [told.get(name) for name in ("--bandwidth", "--bus", "--compute")]
    given_rates = None
    if all(rate is not None for rate in given):
        read, bus, matmul = (Rate.given(rate or 0.0) for rate in given)
        given_rates = MachineRates(read, Rate.given(read.median / 2), bus, bus, matmul)
    elif any(rate is not None for rate in given):
        raise usage_error("of --bandwidth, --bus and --compute some are given and some are not", "give all of them")
    subject = subject_on(others[0], False)
    placement = placed(device, config, subject.dtype, subject.geometry, others, [of_each] * len(others))
    free = dict.fromkeys(devices_of(placement or others[0]), of_each) | {"host": host}
    return subject, Machine(others[0], free, given_rates, False, placement)


def _as_dict(model: str | None, subject: PlannedRun, machine: Machine, plans: list[dict[str, Any]]) -> dict[str, Any]:
    from kvcli.telemetry import report

    return {
        "schema_version": 1,
        "environment": report.environment(),
        "model": {
            "name": model or "demo",
            "type": subject.config.model_type,
            "dtype": str(subject.dtype).removeprefix("torch."),
            "weights": subject.geometry.weights,
            "weight_bytes": subject.geometry.weight_bytes,
            "layers": subject.geometry.depth,
        },
        "machine": {
            "device": str(machine.place),
            "here": machine.here,
            "free": machine.free,
            "ceilings": None if machine.rates is None else machine.rates.as_dict(),
        },
        "plans": plans,
    }
