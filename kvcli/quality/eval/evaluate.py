"""One evaluation from its options to its table: load a model, ask, count."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvcli.capacity import memory
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.encoding import Template, encode
from kvcli.inputs.prompts import Prompt
from kvcli.inputs.provenance import refuse_mismatch
from kvcli.inputs.variants import Variant
from kvcli.models.fingerprint import fingerprint
from kvcli.models.loading import Checkpoint, ModelSpec, open_checkpoint
from kvcli.quality.eval import suite
from kvcli.quality.eval.example import Cell
from kvcli.quality.eval.predictions import Predictions, digest
from kvcli.quality.eval.runner import Evaluation
from kvcli.quality.eval.table import EvaluationTable, results
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry import report
from kvcli.telemetry.observer import Observer


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate. `lengths` are tokens of a prompt; `limit` documents of every task and length.

    `predictions` is a file that grows while the run goes on, and from which a run that was cut off goes on.
    """

    model: ModelSpec
    variants: Sequence[Variant]
    tasks: Sequence[str]
    lengths: Sequence[int] = ()
    depths: int = 5
    limit: int = 20
    max_tokens: int | None = None
    max_length: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    template: Template = field(default_factory=Template)
    predictions: Path | None = None


def evaluate(plan: EvaluationPlan, observer: Observer) -> EvaluationTable:
    """Ask every variant every example. Ctrl-C after the first is no error: the table says that it is not complete.

    Raises:
        KvcliError: the model cannot be loaded, a task is unknown or does not fit the model's positions (usage), a
            profile is another model's (usage), a variant will not fit (exit code 3), the predictions are another
            run's (usage).
    """
    observer.stage("load")
    checkpoint = open_checkpoint(plan.model)
    most = min(filter(None, (plan.max_length, checkpoint.geometry.max_positions)), default=None)
    cells = suite.cells(_request(plan, checkpoint.tokenizer, most))
    _check_positions(cells, checkpoint)
    _check_fit(plan, cells, checkpoint)
    for variant in plan.variants:
        refuse_mismatch(variant.profile, checkpoint)
    configuration = _configuration(plan, checkpoint)
    with Predictions(plan.predictions, configuration) as predictions:
        done = len(predictions)
        if done:
            observer.notice(f"{done:,} answers are in {plan.predictions} already; going on from there")
        model = checkpoint.load()
        evaluation = Evaluation(
            model=model,
            variants=plan.variants,
            sampling=plan.sampling,
            template=plan.template,
            predictions=predictions,
            observer=observer,
            max_tokens=plan.max_tokens,
            max_length=most,
        )
        complete = True
        try:
            evaluation.run(cells)
        except KeyboardInterrupt:
            complete = False
        observer.stage_done()
        found = results(cells, plan.variants, predictions)
        environment = report.environment() | {"machine": platform.machine()}
        return EvaluationTable(environment, configuration, digest(configuration), plan.variants, found, complete)


def _request(plan: EvaluationPlan, tokenizer: PreTrainedTokenizerBase, most: int | None) -> suite.SuiteRequest:
    # What the chat template puts around a message is part of a prompt's length.
    bare = len(tokenizer("x", add_special_tokens=False, verbose=False)["input_ids"])
    frame = len(encode(Prompt("frame", "x"), plan.template, tokenizer)) - bare
    return suite.SuiteRequest(
        tasks=plan.tasks,
        lengths=plan.lengths,
        depths=plan.depths,
        limit=plan.limit,
        seed=plan.sampling.seed,
        frame=frame,
        most=most,
        max_tokens=plan.max_tokens,
        tokenizer=tokenizer,
    )


def _check_positions(cells: Sequence[Cell], checkpoint: Checkpoint) -> None:
    limit, longest = checkpoint.geometry.max_positions, _longest(cells)
    if limit is not None and longest > limit:
        raise KvcliError(
            f"a length of {longest:,} tokens is beyond the {limit:,} positions of {checkpoint.name}",
            f"ask for --length {limit} at most",
            ExitCode.USAGE,
        )


def _check_fit(plan: EvaluationPlan, cells: Sequence[Cell], checkpoint: Checkpoint) -> None:
    """Refuse a variant that does not fit into memory on its own; the lengths in files are not known beforehand."""
    longest = _longest(cells)
    if longest:
        sampling = replace(plan.sampling, max_tokens=plan.max_tokens or suite.MAX_TOKENS)
        for variant in plan.variants:
            memory.check(variant.profile, checkpoint, [longest], sampling)


def _longest(cells: Sequence[Cell]) -> int:
    return max(cell.length or 0 for cell in cells)


def _configuration(plan: EvaluationPlan, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what two runs must have in common to share a file of predictions."""
    sampling = {key: getattr(plan.sampling, key) for key in ("seed", "temperature", "top_p", "num_samples")}
    return {
        "model": checkpoint.name,
        "model_hash": fingerprint(checkpoint),
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
