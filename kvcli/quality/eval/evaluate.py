"""Run an evaluation from its options to its table: load a model, ask, score."""

import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

from kvcli.capacity import memory, unnamed
from kvcli.capacity.disk import disk_for
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.encoding import encode
from kvcli.inputs.profiles import refuse_mismatch
from kvcli.inputs.prompts import Prompt
from kvcli.inputs.variants import Variant, scaled
from kvcli.memory.disk_tier import DiskTier
from kvcli.models.loading import Checkpoint, fingerprint, open_checkpoint, text_fingerprint
from kvcli.quality.eval import suite
from kvcli.quality.eval.example import Cell
from kvcli.quality.eval.kvpress import KvpressRun
from kvcli.quality.eval.predictions import Prediction, Predictions, digest
from kvcli.quality.eval.runner import Evaluation
from kvcli.quality.eval.suite import EvaluationPlan
from kvcli.quality.eval.table import EvaluationTable, results
from kvcli.telemetry import report
from kvcli.telemetry.observer import Observer


def evaluate(plan: EvaluationPlan, observer: Observer) -> EvaluationTable:
    """Ask every variant every example. Ctrl-C after the first is not an error: the table is then marked incomplete.

    Raises:
        KvcliError: the model cannot be loaded, a task is unknown or does not fit the model's positions (usage), a
            profile is another model's (usage), a variant will not fit (exit code 3), the predictions are another run's
            (usage).
    """
    observer.stage("load")
    checkpoint = open_checkpoint(plan.model)
    own = [unnamed.native(each.profile, checkpoint.geometry) for each in plan.variants]
    both = zip(plan.variants, own, strict=True)
    plan = replace(plan, variants=[was if now is was.profile else Variant(now.method, None, now) for was, now in both])
    most = min(filter(None, (plan.max_length, checkpoint.geometry.max_positions)), default=None)
    # The text that the chat template adds around a message is part of a prompt's length.
    frame = len(encode(Prompt("frame", "x"), plan.template, checkpoint.tokenizer))
    frame -= suite.count_tokens(checkpoint.tokenizer, "x")
    cells = suite.Suite(plan, checkpoint.tokenizer, frame, most, observer.notice).cells()
    _check_positions(cells, checkpoint)
    export = None if plan.kvpress is None else KvpressRun.of(plan.kvpress, plan)
    profiles = [variant.profile for variant in plan.variants]
    disk = disk_for(plan.disk, profiles, checkpoint.device, _together(plan, cells))
    _check_fit(plan, cells, checkpoint, disk)
    for notice in checkpoint.notices(plan.sampling.repetition_penalty):
        observer.notice(notice)
    for variant in plan.variants:
        refuse_mismatch(variant.profile, checkpoint)
    lengths = [cell.length for cell in cells if cell.length is not None]
    for line in scaled([(each.label, each.profile) for each in plan.variants], min(lengths, default=None)):
        observer.notice(line)
    configuration = _configuration(plan, checkpoint)
    with Predictions(plan.predictions, configuration) as predictions:
        done = len(predictions)
        if done:
            observer.notice(f"{done:,} answers are in {plan.predictions} already; continuing from there")
        evaluation = Evaluation(plan, checkpoint.load(), predictions, observer, most, disk)
        complete = True
        try:
            with disk or nullcontext():
                evaluation.run(cells)
        except KeyboardInterrupt:
            complete = False
        observer.stage_done()
        for notice in cut_notices(predictions, most):
            observer.notice(notice)
        if export is not None and complete:
            export.write(checkpoint.name, predictions)
        found = results(cells, plan.variants, predictions, plan.sampling.num_samples)
        environment = report.environment() | {"machine": platform.machine()}
        return EvaluationTable(environment, configuration, digest(configuration), plan.variants, found, complete)


def cut_notices(predictions: Iterable[Prediction], most: int | None) -> Iterator[str]:
    """Say for each task how many prompts were truncated, and by how much at most."""
    cut: dict[str, dict[int, int]] = defaultdict(dict)
    for each in predictions:
        if each.cut_tokens:
            cut[each.task][each.index] = each.cut_tokens
    for task, tokens in cut.items():
        those = f"{len(tokens):,} prompt{'s' * (len(tokens) > 1)}"
        most_cut = max(tokens.values())
        yield f"{task}: {those} truncated in the middle, by up to {most_cut:,} tokens, to fit into {most:,} tokens"


def _together(plan: EvaluationPlan, cells: Sequence[Cell]) -> int:
    """Count the sequences that may share a disk's cache: the samples that one variant answers with, and prompts.

    The prompts are those that the other variants have read, and that the answering one copies for further questions.
    """
    using = sum(variant.profile.settings.on_host for variant in plan.variants)
    copied = any(cell.series for cell in cells)
    return plan.sampling.num_samples + max(0, using - 1) + copied


def _check_positions(cells: Sequence[Cell], checkpoint: Checkpoint) -> None:
    limit, longest = checkpoint.geometry.max_positions, _longest(cells)
    if limit is not None and longest > limit:
        raise KvcliError(
            f"a length of {longest:,} tokens is beyond the {limit:,} positions of {checkpoint.name}",
            f"use --length {limit} at most",
            ExitCode.USAGE,
        )


def _check_fit(
    plan: EvaluationPlan, cells: Sequence[Cell], checkpoint: Checkpoint, disk: DiskTier | None = None
) -> None:
    """Refuse a variant that does not fit into memory on its own; the lengths in files are not known beforehand."""
    longest = _longest(cells)
    if longest:
        rooms = {cell.task: cell.make(0) for cell in cells if cell.length == longest}
        room = max(example.max_tokens for example in rooms.values())
        sampling = replace(plan.sampling, max_tokens=plan.max_tokens or max(room, suite.MAX_TOKENS))
        for variant in plan.variants:
            own = disk if variant.profile.settings.on_host else None
            memory.check(variant.profile, checkpoint, [longest], sampling, disk=own)


def _longest(cells: Sequence[Cell]) -> int:
    return max(cell.length or 0 for cell in cells)


def _configuration(plan: EvaluationPlan, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what two runs must have in common to share a file of predictions."""
    sampling = {key: getattr(plan.sampling, key) for key in ("seed", "temperature", "top_p", "num_samples")}
    # Left out when off, as in the files of runs from before these options existed.
    off = {"top_k": 0, "min_p": 0, "repetition_penalty": 1}
    sampling |= {key: value for key, none in off.items() if (value := getattr(plan.sampling, key)) != none}
    return {
        "model": checkpoint.name,
        "model_hash": fingerprint(checkpoint),
        "tokenizer": text_fingerprint(checkpoint),
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "tasks": list(plan.tasks),
        "files": suite.digests(plan.tasks),
        "lengths": list(plan.lengths),
        "depths": plan.depths,
        "limit": plan.limit,
        "max_tokens": plan.max_tokens,
        "max_length": plan.max_length,
        **sampling,
        "template": asdict(plan.template),
        "variants": {variant.label: variant.profile.hash for variant in plan.variants},
    }
