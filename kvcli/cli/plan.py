"""`kvcli plan`: memory, times and the longest context, from a model's config alone."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from kvcli.cli.command import command, compared, distinct, names
from kvcli.cli.output import check_files, progress, write_result
from kvcli.errors import KvcliError, usage_error
from kvcli.inputs import options

if TYPE_CHECKING:
    import torch

    from kvcli.capacity.planning.estimate import Machine, PlannedRun

_RUN, _MACHINE = options.Panel("Run"), options.Panel("Machine", env=True)
_SIZE = options.positive_size


@options.group
class Run:
    """The planned run."""

    context: str = _RUN("32K", "--context", "TOKENS,...", "Prompt lengths, as in 8K,128K.")
    batch_size: str = _RUN("1", "--batch-size", "N,...", "Prompts decoded together.")
    max_tokens: int = _RUN(256, "--max-tokens", "TOKENS", "Most tokens to generate.", options.positive_count, env=True)
    advise: bool = _RUN.flag(
        "--advise", "Search methods, weights, KV, disk and budgets; show what fits and its command."
    )


@options.group
class MachineOptions:
    """The known sizes and rates of another machine."""

    gpu: str | None = _MACHINE(
        None, "--gpu", "NAME", "Plan for a GPU by its published sizes and rates: rtx-4090, l4, h100, ..."
    )
    device_memory: int | None = _MACHINE(
        None, "--device-memory", "SIZE", "Free memory of another machine's GPU, as in 80GiB.", _SIZE
    )
    host_memory: int | None = _MACHINE(
        None,
        "--host-memory",
        "SIZE",
        "Free memory of its host, as in 512GiB; on this machine, for KV with --kv-disk.",
        _SIZE,
    )
    bandwidth: int | None = _MACHINE(
        None, "--bandwidth", "SIZE", "Memory bandwidth of its GPU in bytes per second, as in 3350GB.", _SIZE
    )
    bus: int | None = _MACHINE(
        None, "--bus", "SIZE", "Bandwidth between host and GPU in bytes per second, as in 55GB.", _SIZE
    )
    compute: float | None = _MACHINE(
        None, "--compute", "TFLOPS", "Rate of its matrix products in TFLOP/s, as in 600.", options.positive
    )
    disk: int | None = _MACHINE(
        None, "--disk", "SIZE", "Free disk space that --advise may use for KV, as in 1TB.", _SIZE
    )
    disk_rate: int | None = _MACHINE(
        None, "--disk-rate", "SIZE", "Read rate of the KV disk in bytes per second, as in 5GB.", _SIZE
    )


@command
def plan(
    model: Annotated[
        options.ModelOptions,
        options.Some(
            "model dtype weights weights_on weights_memory offline",
            model={
                "metavar": "NAME",
                "help": "Checkpoint, config.json, hub id or shape; needs no weights. Default: the bundled demo model.",
            },
        ),
    ],
    chosen: Annotated[options.Compared, options.Some("method profile budget set kv_dtype")],
    kv_disk: Annotated[options.DiskOptions | None, options.Some("kv_disk")],
    run: Run,
    place: Annotated[options.ModelOptions, options.Some("device", device={"panel": "Machine"})],
    asked: MachineOptions,
    output: Annotated[options.Output, options.Some("json output quiet debug")],
) -> None:
    """Plan the memory and time of a run, and check whether it fits.

    kvcli plan -m llama-3.1-8b --method full,freekv --context 8K,128K,1M

    Reads a config.json and needs no weights. Measures the rates of this machine and a few
    layers, which takes seconds. To plan for another machine, give --device-memory and
    --host-memory; for times also --bandwidth, --bus and --compute. --gpu sets all of
    these except --host-memory. --advise searches methods, forms of weights and KV, a disk
    (--disk) and budgets. It shows the most exact setting of each method that fits, the
    fastest step first.

    Exit codes: 0 done, whether or not the run fits; 1 failed, 2 usage, 130 interrupted.
    """
    file, advise, gpu = output.output, run.advise, asked.gpu
    shape = replace(model, device=place.device, load_format="dummy")
    check_files({"-o": file}, shape, profiles=names(chosen.profile, "--profile"), settings=chosen.settings)
    unnamed = chosen.method is None and chosen.profile is None
    if advise and unnamed:
        from kvcli.capacity.planning.advice import METHODS as TRIED

        chosen = replace(chosen, method=",".join(TRIED))
    variants = compared(chosen)
    contexts, batches = distinct(run.context, "--context"), distinct(run.batch_size, "--batch-size")
    compute = asked.compute and 1e12 * asked.compute
    rates = {"--bandwidth": asked.bandwidth, "--bus": asked.bus, "--compute": compute}
    host_memory, tier = asked.host_memory, kv_disk
    if tier is not None and not any((gpu, asked.device_memory, *rates.values())):  # this machine's memory is measured
        tier, host_memory = replace(tier, host_memory=host_memory), None
    sizes: dict[str, float | None] = {"--device-memory": asked.device_memory, "--host-memory": host_memory, **rates}
    if gpu is not None:
        from kvcli.capacity.planning.advice import published

        known = published(gpu)
        sizes["--device-memory"] = asked.device_memory or known.memory
        sizes |= {"--bandwidth": asked.bandwidth or known.bandwidth, "--bus": asked.bus or known.bus}
        sizes["--compute"] = rates["--compute"] or known.compute
    told: dict[str, float] = {name: size for name, size in sizes.items() if size is not None}

    from kvcli.capacity.planning import tables
    from kvcli.capacity.planning.advice import advise as search
    from kvcli.capacity.planning.advice import command as command_of
    from kvcli.capacity.planning.plan import choice
    from kvcli.capacity.planning.plan import plan as plan_all
    from kvcli.inputs.profiles import resolve_profile
    from kvcli.inputs.variants import scaled
    from kvcli.ui import console

    with progress(output.quiet) as observer:
        if model.model is None:
            observer.notice("no -m: planning for the small demo model that comes with kvcli")
        observer.stage("measure")
        subject, machine = _subject_and_machine(shape, told, gpu)
        if unnamed and subject.geometry.selects is not None:
            variants = compared(replace(chosen, method="full,native"))
        subjects = [subject]
        if advise and machine.placement is not None:
            raise usage_error(
                f"--advise works for one device, but --device names {shape.device}", "leave one of them out"
            )
        if advise and subject.geometry.weights == "auto" and subject.geometry.streaming is None:
            subjects += [subject.with_weights(each) for each in ("int8", "int4")]
        if advise and subject.geometry.streaming is None:
            with suppress(KvcliError):  # its weights do not pass
                subjects.append(subject.with_weights_on("host" if machine.device.type == "cuda" else "disk"))
        observer.stage_done()
        beyond = subject.geometry.beyond_positions(max(contexts) + run.max_tokens, model.model or "the demo model")
        if beyond is not None:
            observer.notice(beyond)
        labelled = [(variant.label, variant.profile) for variant in variants]
        for line in scaled(labelled, min(contexts)):
            observer.notice(line)
        plans = []
        if advise:
            observer.stage("plan")
            plans = search(subjects, machine, labelled, contexts, batches, run.max_tokens, asked.disk, asked.disk_rate)
        else:
            observer.stage("plan", len(labelled) * len(contexts) * len(batches))
            sizes_of = (contexts, batches, run.max_tokens, asked.disk_rate, tier)
            for each_plan in plan_all(subject, machine, labelled, *sizes_of):
                plans.append(each_plan)
                observer.advance()
    commands = [{"command": command_of(model.model, entry)} if advise else {} for entry in plans]
    choices = []
    if unnamed and not advise and tier is None and not (chosen.budget or chosen.settings):
        retrieval = resolve_profile(overrides=chosen.kv_dtype and {"kv_dtype": chosen.kv_dtype})
        shapes = [(context, batch) for context in contexts for batch in batches] if retrieval.unnamed else []
        choices = [(*shape, choice(retrieval, subject, machine, *shape, run.max_tokens)) for shape in shapes]
    if output.as_json:
        found = [entry.as_dict() | line for entry, line in zip(plans, commands, strict=True)]
        body = _as_dict(model.model, subject, machine, found)
        body["choices"] = [
            {"context": context, "batch_size": batch, "profile": profile.as_dict()}
            for context, batch, profile in choices
        ]
        text = json.dumps(body) + "\n"
    else:
        of_what = f"{model.model or 'demo model'}, {str(subject.dtype).removeprefix('torch.')}"
        title = f"{of_what}, {run.max_tokens:,} tokens of output"
        notes = tables.notes(plans, machine.rates, machine.here)
        notes += [(entry.label, line["command"]) for entry, line in zip(plans, commands, strict=True) if line]
        notes += [(f"{context:,}, batch {batch}", profile.chosen or "") for context, batch, profile in choices]
        if advise and not any(entry.fits for entry in plans):
            notes.append(("advice", "nothing fits; these settings come closest"))
        if gpu is not None:
            notes.append(("GPU", f"{gpu}: {published(gpu).source}"))
        text = console.render_tables(tables.tables(title, plans), file is not None, notes)
    write_result(file, text)


def _subject_and_machine(
    model: options.ModelOptions, told: dict[str, float], gpu: str | None
) -> tuple[PlannedRun, Machine]:
    """Read the config, and measure this machine or take another's sizes and rates from the options in `told`.

    `gpu` is the name that stands for some of them.
    """
    from kvcli.capacity.memory import available
    from kvcli.capacity.need import devices_of
    from kvcli.capacity.planning.estimate import Machine, PlannedRun
    from kvcli.capacity.roofline import MachineRates, Rate, measure_rates
    from kvcli.models.devices import another_machine, placed, resolve_devices
    from kvcli.models.loading import form_in, locate, read_config, resolve_dtype
    from kvcli.models.streamed import check_place

    spec, device = model.spec(), model.device
    config = read_config(spec, header_only=True)

    def subject_on(place: torch.device, here: bool) -> PlannedRun:
        path = locate(spec, header_only=True)
        form = form_in(config, model.weights, place, path, here, model.dtype)
        subject = PlannedRun.of(config, resolve_dtype(model.dtype, config, place), form, path)
        streams = model.weights_on != "device"
        return subject.with_weights_on(model.weights_on, model.weights_memory) if streams else subject

    others, asked = another_machine(device), next(iter(told), None) if gpu is None else f"--gpu {gpu}"
    if told and not others:
        what = f"{asked} plans for another machine with a GPU, but --device {device} is this one"
        raise usage_error(what, "leave one of them out")
    check_place(model.weights_on, model.weights_memory, others if told else resolve_devices(device))
    if not told:
        devices = resolve_devices(device)
        first = devices[0]
        subject = subject_on(first, True)
        placement = None
        if subject.geometry.streaming is None:
            placement = placed(device, config, subject.dtype, subject.geometry, devices)
        rates = measure_rates(first, subject.dtype)
        return subject, Machine(first, available(placement or first), rates, True, placement)
    missing = [name for name in ("--device-memory", "--host-memory") if name not in told]
    if missing:
        hint = "give --device-memory and --host-memory, and for times --bandwidth, --bus and --compute"
        hint = hint if gpu is None else "give the memory of its host, such as --host-memory 64G"
        raise usage_error(f"{asked} plans for another machine, but {missing[0]} is not given", hint)
    of_each, host = int(told["--device-memory"]), int(told["--host-memory"])
    given = [told.get(name) for name in ("--bandwidth", "--bus", "--compute")]
    given_rates = None
    if all(rate is not None for rate in given):
        read, bus, matmul = (Rate.given(rate or 0.0) for rate in given)
        given_rates = MachineRates(read, Rate.given(read.median / 2), bus, bus, matmul)
    elif any(rate is not None for rate in given):
        raise usage_error("--bandwidth, --bus and --compute are only partly given", "give all of them")
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
