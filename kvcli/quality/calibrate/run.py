"""Run a calibration from its options to its result: load, read every passage, and choose a setting or find tensors."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvcli.capacity import memory
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile, reference_profile
from kvcli.models.loading import Checkpoint, Model, open_checkpoint
from kvcli.quality.calibrate.outcome import Calibration, TensorCalibration
from kvcli.quality.calibrate.plan import CalibrationPlan, passages_of, prompt_length, provenance
from kvcli.quality.calibrate.sweep import Collector, PassageSums, Sweep, choose, layerwise
from kvcli.quality.calibrate.tensors import TensorTarget
from kvcli.quality.fidelity import Passage, measure
from kvcli.runtime.engine import Engine, engine
from kvcli.runtime.sampling import Sampling
from kvcli.sizes import format_bytes
from kvcli.telemetry.observer import Observer


def calibrate(sweep: Sweep, plan: CalibrationPlan, observer: Observer) -> Calibration:
    """Compare every setting of the grid with full attention and choose among them.

    Ctrl-C after a whole passage is not an error: the result covers the passages until then and says so.

    Raises:
        KvcliError: the model or a text cannot be read, a setting is not the method's or has no value for each layer
            (usage), the caches of all settings do not fit into memory together (exit code 3).
    """
    observer.stage("load")
    checkpoint = open_checkpoint(plan.model)
    length = prompt_length(plan, checkpoint)
    tried = sweep.profiles(plan.profile, checkpoint.geometry, length, plan.values)
    passages = passages_of(plan, checkpoint)
    _check_fit(checkpoint, [profile for _, profile in tried], passages)
    if plan.per_layer:
        _check_per_layer(sweep, [settings for settings, _ in tried])
    model = checkpoint.load()
    collector = sweep.collector(plan.profile.settings)
    tallies, done = _measure(model, passages, tried, collector, observer)
    if not done:
        raise KeyboardInterrupt
    complete = done == len(passages)
    least = tallies[-1].losses if sweep.relative else None
    if plan.per_layer and complete:
        mixed = sweep.profiles(
            plan.profile, checkpoint.geometry, length, {sweep.name: _by_layer(sweep, tallies, model)}
        )
        more, through = _measure(model, passages, mixed, Collector(), observer)
        complete = through == len(passages)
        if complete:
            tried, tallies = [*mixed, *tried], [*more, *tallies]
    points = [tally.point(least) for tally in tallies]
    return Calibration(
        sweep=sweep,
        points=points,
        profiles=[profile for _, profile in tried],
        choice=choose(points, sweep.cost, plan.max_loss, sweep.relative),
        figures=collector.figures(),
        provenance={
            **provenance(plan, checkpoint, passages[:done]),
            "max_loss": plan.max_loss,
            "loss_counts_from": "the last setting" if sweep.relative else "full attention",
        },
        complete=complete,
    )


def find(search: TensorTarget, plan: CalibrationPlan, observer: Observer) -> TensorCalibration:
    """Read every passage by exact prefill and find the tensors of a target; Ctrl-C as in `calibrate`.

    Raises:
        KvcliError: the model or a text cannot be read, the method takes no such file (usage), a passage does not fit
            into memory (exit code 3).
    """
    search.check(plan.profile, plan.files)
    observer.stage("load")
    checkpoint = open_checkpoint(plan.model)
    passages = passages_of(plan, checkpoint) if search.reads_text else [Passage("the probe", [0], [0])]
    longest = max(passage.capacity for passage in passages)
    memory.check(reference_profile(), checkpoint, [longest], Sampling(max_tokens=1))
    model = checkpoint.load()
    source = search.source(plan.profile, model.geometry.layers)
    observer.stage("calibrate", model.geometry.depth * sum(passage.capacity for passage in passages))
    done = _each(model, passages, observer, lambda ready, passage: source.read(ready, passage, observer.advance))
    if not done:
        raise KeyboardInterrupt
    found = provenance(plan, checkpoint, passages[:done] if search.reads_text else [])
    return TensorCalibration(search, plan.profile, source, found, done == len(passages))


def _each(
    model: Model, passages: Sequence[Passage], observer: Observer, measure: Callable[[Engine, Passage], None]
) -> int:
    """Measure one passage after another; return how many are done, which Ctrl-C may cut short."""
    done = 0
    with suppress(KeyboardInterrupt):
        for passage in passages:
            with engine(model, [passage.capacity], observer.notice) as ready:
                measure(ready, passage)
            done += 1
    observer.stage_done()
    return done


def _measure(
    model: Model,
    passages: Sequence[Passage],
    tried: Sequence[tuple[dict[str, Any], Profile]],
    collector: Collector,
    observer: Observer,
) -> tuple[list[PassageSums], int]:
    """Measure all settings; return their tallies and the number of passages measured."""
    tallies, profiles = [PassageSums(settings) for settings, _ in tried], [profile for _, profile in tried]
    if not tried:
        return [], len(passages)
    planned = [memory.planned_method(profile, model.geometry, 1, model.dtype) for profile in profiles]
    windowed = sum(method.prefill_window is not None for method in planned)
    read = sum((1 + windowed) * len(passage.prompt) for passage in passages)
    fed = sum(len(profiles) * len(passage.continuation) for passage in passages)
    observer.stage("calibrate", model.geometry.depth * (read + fed))

    def add(ready: Engine, passage: Passage) -> None:
        own = collector.begin_passage()
        along = {} if own is None else {len(profiles) - 1: own}
        measured, reference = measure(ready, passage, profiles, along, observer.advance)
        collector.end_passage(reference, passage)
        for tally, each in zip(tallies, measured, strict=True):
            tally.add(each)

    return tallies, _each(model, passages, observer, add)


def _check_per_layer(sweep: Sweep, tried: Sequence[dict[str, Any]]) -> None:
    if not sweep.by_layer:
        raise KvcliError(f"{sweep.name} has no value of its own for a layer", "leave --per-layer out", ExitCode.USAGE)
    if any(len(settings) > 1 for settings in tried):
        others = ", ".join(key for key in tried[0] if key != sweep.name)
        raise KvcliError(f"--per-layer with several values of {others}", "calibrate one of them first", ExitCode.USAGE)


def _by_layer(sweep: Sweep, tallies: Sequence[PassageSums], model: Model) -> list[tuple[float, ...]]:
    """Combine the measured values by layer, into no more combinations than values: those fitted into memory."""
    found = {float(tally.settings[sweep.name]): tally.by_layer() for tally in tallies}
    values = sorted(found)
    curves = {layer: [found[value][layer] for value in values] for layer in found[values[0]]}
    return layerwise(values, curves, len(model.geometry.layers), len(tallies))


def _check_fit(checkpoint: Checkpoint, profiles: Sequence[Profile], passages: Sequence[Passage]) -> None:
    """Refuse what memory does not hold: the caches of all settings, and that of full attention, at once."""
    longest = max(passages, key=lambda passage: passage.capacity)
    geometry, dtype, device, prompt = checkpoint.geometry, checkpoint.dtype, checkpoint.place, len(longest.prompt)
    alone = memory.need(reference_profile(), geometry, dtype, [prompt], len(longest.continuation), 1, device=device)
    caches = (memory.kv_footprint(profile, geometry, longest.capacity, dtype, prompt, device) for profile in profiles)
    needed, free = replace(alone, kv=sum(caches, alone.kv)).on(device), memory.available(device)
    for pool in needed:
        if needed[pool] > free[pool]:
            raise KvcliError(
                f"{len(profiles)} settings and full attention on {longest.capacity:,} tokens need "
                f"{format_bytes(needed[pool])} of {pool} memory, but {format_bytes(free[pool])} are free",
                "try fewer values with --values, or a smaller --length",
                ExitCode.WILL_NOT_FIT,
            )
