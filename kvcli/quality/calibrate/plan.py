"""The options of a calibration, the passages that they select, and the provenance of the result."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.encoding import encode, encode_question
from kvcli.inputs.options import Template
from kvcli.inputs.profiles import Profile
from kvcli.inputs.prompts import Prompt, read_document
from kvcli.models.loading import Checkpoint, ModelSpec, fingerprint
from kvcli.quality.fidelity import Passage
from kvcli.quality.tasks import make_row
from kvcli.telemetry import report

SPLIT = "calibration"
"""The split of the built-in rows: neither the one that the demo model learned nor the one for evaluation."""
BUILT_IN = ("niah_multikey", "niah_single", "vt", "niah_multivalue")


@dataclass(frozen=True)
class CalibrationPlan:
    """What to calibrate: a method by `profile`, on files or, without, on built-in text.

    `length` is the tokens of a prompt, `steps` the number fed after it, `samples` the number of passages. If values are
    tried, `values` replace the target's own, as texts that --set would take, and `max_loss` is the limit of what they
    may add, in nats. `per_layer` also tries a separate value for each layer.
    """

    model: ModelSpec
    profile: Profile
    files: Sequence[str] = ()
    length: int = 4096
    steps: int = 64
    samples: int = 16
    seed: int = 0
    max_loss: float = 0.01
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    per_layer: bool = False


def prompt_length(plan: CalibrationPlan, checkpoint: Checkpoint) -> int:
    """Return the tokens of a prompt: as many as requested, as far as the model has positions.

    Raises:
        KvcliError: the steps after it leave no position (usage).
    """
    limit = checkpoint.geometry.max_positions
    length = plan.length if limit is None else min(plan.length, limit - plan.steps)
    if length < 1:
        raise KvcliError(
            f"{plan.steps:,} steps leave nothing of the {limit:,} positions of {checkpoint.name}",
            "use fewer --steps",
            ExitCode.USAGE,
        )
    return length


def passages_of(plan: CalibrationPlan, checkpoint: Checkpoint) -> list[Passage]:
    """Return the passages to measure on.

    Raises:
        KvcliError: the text cannot be read or is too short (usage).
    """
    length = prompt_length(plan, checkpoint)
    if plan.files:
        return from_files(plan.files, checkpoint.tokenizer, length, plan.steps, plan.samples)
    return built_in(checkpoint.tokenizer, length, plan.steps, plan.samples, plan.seed)


def built_in(
    tokenizer: PreTrainedTokenizerBase, length: int, steps: int, samples: int, seed: int, split: str = SPLIT
) -> list[Passage]:
    """Make documents with a question, in turn from each task of `BUILT_IN`; the continuation is the right answer.

    Prompts have `length` tokens or a few less, answers at most `steps`.

    Raises:
        KvcliError: `length` is too small for a document and its question (usage).
    """

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    frame = len(encode(Prompt("frame", "x"), Template(), tokenizer)) - count_tokens("x")
    passages = []
    for index in range(samples):
        task = BUILT_IN[index % len(BUILT_IN)]
        row = make_row(task, length=length, frame=frame, seed=seed, index=index, count_tokens=count_tokens, split=split)
        prompt = Prompt(f"{task} {index}", row.document, row.question)
        answer = tokenizer(" " + row.answer, add_special_tokens=False, verbose=False)["input_ids"]
        ids, question = encode(prompt, Template(), tokenizer), encode_question(prompt, tokenizer)
        passages.append(Passage(prompt.source, ids, list(answer)[:steps], question))
    return passages


def from_files(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, steps: int, samples: int
) -> list[Passage]:
    """Cut files into stretches of `length` tokens and the `steps` that follow them, at most `samples`, files in turn.

    A file shorter than one stretch gives what it has.

    Raises:
        KvcliError: a file cannot be read or is too short to continue (usage).
    """
    stretches = [_stretches(name, tokenizer, length, steps) for name in files]
    passages = []
    for turn in range(max(map(len, stretches))):
        passages += [each[turn] for each in stretches if turn < len(each)]
    return passages[:samples]


def _stretches(name: str, tokenizer: PreTrainedTokenizerBase, length: int, steps: int) -> list[Passage]:
    ids: list[int] = list(tokenizer(read_document(name), verbose=False)["input_ids"])
    if len(ids) <= 2 * steps:
        raise KvcliError(
            f"{name}: {len(ids):,} tokens are too few to continue for {steps:,}",
            f"give a longer text, or --steps {max(1, len(ids) // 4)}",
            ExitCode.USAGE,
        )
    whole = length + steps
    if len(ids) < whole:
        return [Passage(name, ids[:-steps], ids[-steps:])]
    parts = [ids[start : start + whole] for start in range(0, len(ids) - whole + 1, whole)]
    return [Passage(f"{name} {i}", part[:length], part[length:]) for i, part in enumerate(parts)]


def provenance(plan: CalibrationPlan, checkpoint: Checkpoint, passages: Sequence[Passage]) -> dict[str, Any]:
    """Return the origin of a result: the model and its fingerprint, the text, seed, versions and date."""
    found = report.environment()
    text = json.dumps([[passage.prompt, passage.continuation] for passage in passages])
    read = {
        "text": [passage.source for passage in passages],
        "text_hash": hashlib.sha256(text.encode()).hexdigest()[:12],
        "seed": plan.seed,
        "passages": len(passages),
        "prompt_tokens": round(fmean(len(passage.prompt) for passage in passages)) if passages else 0,
        "steps": sum(len(passage.continuation) for passage in passages),
    }
    return {
        "model": checkpoint.name,
        "model_hash": fingerprint(checkpoint),
        "model_type": checkpoint.config.model_type,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "method": plan.profile.method,
        **(read if passages else {}),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: found[name] or "" for name in ("kvcli", "torch", "transformers", "python")},
    }
