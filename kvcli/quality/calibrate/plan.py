"""The options of a calibration, the text they come to, and the provenance of the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile
from kvcli.models.fingerprint import fingerprint
from kvcli.models.loading import Checkpoint, ModelSpec
from kvcli.quality.calibrate.text import built_in, from_files
from kvcli.quality.fidelity import Passage
from kvcli.telemetry import report


@dataclass(frozen=True)
class CalibrationPlan:
    """What to calibrate: a method by `profile`, on files or, without, on built-in text.

    `length` are tokens of a prompt, `steps` those fed after it, `samples` passages. Where values are tried, `values`
    replace the target's own, as texts that --set would take, and `max_loss` is what they may add, in nats. `per_layer`
    tries a value of its own for each layer beside them.
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
    """Return the tokens of a prompt: as many as asked for, as far as the model has positions.

    Raises:
        KvcliError: the steps after it leave no position (usage).
    """
    limit = checkpoint.geometry.max_positions
    length = plan.length if limit is None else min(plan.length, limit - plan.steps)
    if length < 1:
        raise KvcliError(
            f"{plan.steps:,} steps leave nothing of the {limit:,} positions of {checkpoint.name}",
            "ask for fewer --steps",
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


def provenance(plan: CalibrationPlan, checkpoint: Checkpoint, passages: Sequence[Passage]) -> dict[str, Any]:
    """Return where a result comes from: the model and its fingerprint, text that was read, seed, versions and date."""
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
