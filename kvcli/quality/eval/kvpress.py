"""A run on RULER as kvpress writes it, for its leaderboard: for each variant a folder that one can copy there.

The folder is named after the run and has predictions.csv (all fields of the rows but the context), metrics.json and
config.yaml (github.com/NVIDIA/kvpress, evaluation/evaluate.py). Its name for a method is `press_name`.

Decided: `compression_ratio`, the part of the KV that kvpress removes, is the part that a step did not read, on average
over all layers. For a method that cuts the prompt both are nearly the same; one that reads a part of what it keeps has
no other figure that compares. kvpress reads the context before it knows the question, as `requests:FILE` does; FILE
alone is its `query_aware`.
"""

import csv
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.variants import Variant
from kvcli.quality.eval.example import Example
from kvcli.quality.eval.formats import RULER, read_examples
from kvcli.quality.eval.predictions import Prediction
from kvcli.quality.eval.scorers import score
from kvcli.quality.eval.suite import FED, REQUESTS, EvaluationPlan, bare

_CONTROL = re.compile(r"[\x00-\x1f]")  # what kvpress's scorer of RULER drops


@dataclass(frozen=True)
class KvpressRun:
    """The folder `output`, and the rows of the one file that the plan asks, by task."""

    output: Path
    plan: EvaluationPlan
    examples: dict[str, list[Example]]

    @classmethod
    def of(cls, output: Path, plan: EvaluationPlan) -> "KvpressRun":
        """Make the folder.

        Raises:
            KvcliError: the run is not one that kvpress could have done, or the folder cannot be made (usage).
        """
        hint = "run it on one file of RULER, with an answer for each row"
        if len(plan.tasks) != 1 or plan.sampling.num_samples != 1:
            raise usage_error("--kvpress takes one file and --num-samples 1", hint)
        task = plan.tasks[0]
        path, rows_asked = Path(bare(task)), task.partition(":")[0] not in FED
        examples = read_examples(path, task.startswith(f"{REQUESTS}:")) if path.suffix and rows_asked else {}
        kinds = {(name.partition("_")[0], each.metric) for name, rows in examples.items() for each in rows}
        if not kinds or not all(name in RULER and metric in ("recall", "contains") for name, metric in kinds):
            raise usage_error(f"--kvpress: {task} is not a file of RULER, which the leaderboard is about", hint)
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise usage_error(f"--kvpress {output}: {error.strerror}", "name a folder that can be made") from None
        return cls(output, plan, examples)

    def write(self, model: str, predictions: Iterable[Prediction]) -> None:
        """Write the folder of each variant, over one that is there.

        Raises:
            KvcliError: a file cannot be written; a variant took no step, so that its ratio is not known.
        """
        found = [*predictions]
        for variant in self.plan.variants:
            own = [each for each in found if each.variant == variant.label]
            try:
                self._write(model, variant, own)
            except OSError as error:
                what = f"--kvpress {self.output}: {error.strerror}"
                raise KvcliError(what, "answers are kept with --predictions FILE: name another folder") from None

    def _write(self, model: str, variant: Variant, predictions: list[Prediction]) -> None:
        task, options = self.plan.tasks[0], self.plan
        folder = Path(bare(task)).resolve().parent.name
        shares = [each.attended_share for each in predictions if each.attended_share is not None]
        if not shares:
            what = f"--kvpress: {variant.label} took no step, so that what it reads is not known"
            raise KvcliError(what, "ask for longer answers: --max-tokens")
        ratio = 1 - fmean(shares)
        press = re.sub(r"[^\w.+-]+", "_", variant.label).strip("_")
        config: dict[str, Any] = {
            "dataset": "ruler",
            "data_dir": folder if folder.isdecimal() else None,
            "model": model,
            "device": None,
            "press_name": press,
            "compression_ratio": ratio,
            "key_channel_compression_ratio": None,
            "fraction": len(predictions) / sum(map(len, self.examples.values())),
            "max_new_tokens": options.max_tokens,
            "max_context_length": options.max_length,
            "query_aware": not task.startswith(f"{REQUESTS}:"),
            "needle_depth": None,
            "compression_interval": None,
            "target_size": None,
            "hidden_states_buffer_size": None,
            "output_dir": str(self.output),
            "log_level": "INFO",
            "model_kwargs": {},
            "press_init_command": f"kvcli --method {variant.profile.method} {variant.profile.settings.model_dump()}",
            "seed": options.sampling.seed,
            "fp8": False,
        }
        parts = [
            *("ruler", config["data_dir"], model.replace("/", "--"), press, f"{ratio:.2f}"),
            f"fraction{config['fraction']:.3f}" if config["fraction"] < 1 else None,
            f"max_context{options.max_length}" if options.max_length is not None else None,
            "query_aware" if config["query_aware"] else None,
        ]
        home = self.output / "__".join(part for part in parts if part)
        home.mkdir(exist_ok=True)
        scores: dict[str, list[float]] = {}
        with (home / "predictions.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            names = ("question", "answer_prefix", "answer", "task", "max_new_tokens")
            rows.writerow([*names, "predicted_answer", "compression_ratio"])
            for each in sorted(predictions, key=lambda each: each.index):
                row = self.examples[each.task][each.index]
                asked = row.prompt.removeprefix(row.shared) if row.shared else ""
                answer = [*row.references]
                rows.writerow([asked, row.answer_prefix, answer, each.task, row.max_tokens, each.text, ratio])
                said = _CONTROL.sub("", each.text.strip()).strip()
                scores.setdefault(each.task, []).append(score(row.metric, said, row.references))
        metrics = {name: {"string_match": round(100 * fmean(values), 2)} for name, values in sorted(scores.items())}
        (home / "metrics.json").write_text(json.dumps(metrics, indent=4), encoding="utf-8")
        (home / "config.yaml").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
