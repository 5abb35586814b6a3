"""One calibration from its options to its outcome: load, measure every setting on every passage, choose."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from kvcli import memory, report
from kvcli.calibrate.curve import Tally, choose
from kvcli.calibrate.outcome import Calibration
from kvcli.calibrate.sweep import Collector, Sweep
from kvcli.calibrate.text import built_in, from_files
from kvcli.engine import engine
from kvcli.errors import ExitCode, KvcliError
from kvcli.fidelity import Passage, measure, reference_profile
from kvcli.fingerprint import fingerprint
from kvcli.methods import get_method
from kvcli.methods.base import Method
from kvcli.model import Checkpoint, Model, ModelSpec, open_checkpoint
from kvcli.observer import Observer
from kvcli.profile import Profile
from kvcli.sizes import format_bytes


@dataclass(frozen=True)
class Plan:
    """What to calibrate: a target of a method, by `profile`, on files or, without, on built-in text.

    `length` are tokens of a prompt, `steps` those fed after it, `samples` passages. `values` replace those of the
    target's grid, as texts that --set would take. `max_loss` is in nats.
    """

    model: ModelSpec
    sweep: Sweep
    profile: Profile
    files: Sequence[str] = ()
    length: int = 4096
    steps: int = 64
    samples: int = 8
    seed: int = 0
    max_loss: float = 0.01
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)


def calibrate(plan: Plan, observer: Observer) -> Calibration:
    """Measure every setting of the grid beside full attention and choose among them.

    Ctrl-C is no error once a passage is through: the outcome says that it is not complete.

    Raises:
        KvcliError: the model or a text cannot be read, a setting is not the method's (usage), the caches of all
            settings do not fit into memory together (exit code 3).
    """
    observer.stage("load")
    checkpoint = open_checkpoint(plan.model)
    length = _length(plan, checkpoint)
    tried = plan.sweep.profiles(plan.profile, checkpoint.geometry, length, plan.values)
    passages = _passages(plan, checkpoint, length)
    _check_fit(checkpoint, [profile for _, profile in tried], passages)
    model = checkpoint.load()
    tallies = [Tally(settings) for settings, _ in tried]
    collector = plan.sweep.collector(plan.profile.settings)
    done = 0
    try:
        for done in _measure(model, passages, [profile for _, profile in tried], tallies, collector, observer):  # noqa: B007
            pass
    except KeyboardInterrupt:
        if not done:
            raise
    observer.stage_done()
    least = tallies[-1].losses if plan.sweep.relative else None
    points = [tally.point(least) for tally in tallies]
    return Calibration(
        sweep=plan.sweep,
        points=points,
        profiles=[profile for _, profile in tried],
        choice=choose(points, plan.sweep.cost, plan.max_loss),
        figures=collector.figures(),
        provenance=_provenance(plan, checkpoint, passages[:done]),
        complete=done == len(passages),
    )


def _measure(
    model: Model,
    passages: Sequence[Passage],
    profiles: Sequence[Profile],
    tallies: Sequence[Tally],
    collector: Collector,
    observer: Observer,
) -> Iterator[int]:
    """Add passage after passage to the tallies; yields how many are through."""
    layers = len(model.geometry.layers)
    windowed = sum(get_method(profile.method).prefill_window is not Method.prefill_window for profile in profiles)
    per_passage = [
        layers * (len(each.prompt) * (1 + windowed) + len(each.continuation) * len(profiles)) for each in passages
    ]
    observer.stage("calibrate", sum(per_passage))
    for index, passage in enumerate(passages):
        witness = collector.witness()
        along = {} if witness is None else {len(profiles) - 1: witness}
        with engine(model, [passage.capacity], observer.notice) as ready:
            measured, reference = measure(ready, passage, profiles, along, observer.advance)
            collector.take(reference, passage)
        for tally, each in zip(tallies, measured, strict=True):
            tally.add(each)
        yield index + 1


def _length(plan: Plan, checkpoint: Checkpoint) -> int:
    """Tokens of a prompt: what is asked for, as far as the model has positions."""
    limit = checkpoint.geometry.max_positions
    length = plan.length if limit is None else min(plan.length, limit - plan.steps)
    if length < 1:
        raise KvcliError(
            f"{plan.steps:,} steps leave nothing of the {limit:,} positions of {checkpoint.name}",
            "ask for fewer --steps",
            ExitCode.USAGE,
        )
    return length


def _passages(plan: Plan, checkpoint: Checkpoint, length: int) -> list[Passage]:
    if plan.files:
        return from_files(plan.files, checkpoint.tokenizer, length, plan.steps, plan.samples)
    return built_in(checkpoint.tokenizer, length, plan.steps, plan.samples, plan.seed)


def _check_fit(checkpoint: Checkpoint, profiles: Sequence[Profile], passages: Sequence[Passage]) -> None:
    """Refuse what memory does not hold: the caches of all settings, and that of full attention, at once."""
    longest = max(passages, key=lambda passage: passage.capacity)
    geometry, dtype, prompt = checkpoint.geometry, checkpoint.dtype, len(longest.prompt)
    alone = memory.need(reference_profile(), geometry, dtype, [prompt], len(longest.continuation), 1)
    caches = (memory.kv_footprint(profile, geometry, longest.capacity, dtype, prompt) for profile in profiles)
    needed = replace(alone, kv=sum(caches, alone.kv)).on(checkpoint.device)
    free = memory.available(checkpoint.device)
    for pool in needed:
        if needed[pool] > free[pool]:
            raise KvcliError(
                f"{len(profiles)} settings beside full attention on {longest.capacity:,} tokens need "
                f"{format_bytes(needed[pool])} of {pool} memory, {format_bytes(free[pool])} are free",
                "try fewer values with --values, or a smaller --length",
                ExitCode.WILL_NOT_FIT,
            )


def _provenance(plan: Plan, checkpoint: Checkpoint, passages: Sequence[Passage]) -> dict[str, Any]:
    found = report.environment()
    text = json.dumps([[passage.prompt, passage.continuation] for passage in passages])
    return {
        "model": checkpoint.name,
        "model_hash": fingerprint(checkpoint),
        "model_type": checkpoint.config.model_type,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "method": plan.profile.method,
        "text": [passage.source for passage in passages],
        "text_hash": hashlib.sha256(text.encode()).hexdigest()[:12],
        "seed": plan.seed,
        "passages": len(passages),
        "prompt_tokens": round(fmean(len(passage.prompt) for passage in passages)),
        "steps": sum(len(passage.continuation) for passage in passages),
        "max_loss": plan.max_loss,
        "loss_counts_from": "the last setting" if plan.sweep.relative else "full attention",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: found[name] or "" for name in ("kvcli", "torch", "transformers", "python")},
    }
