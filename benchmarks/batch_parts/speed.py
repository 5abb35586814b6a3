"""How fast batches are, beside static ones and one row after the other, and what memory they take."""

import json
import time
from pathlib import Path
from statistics import median

import psutil

from batch_parts.rows import AT_ONCE, WORDS, ragged, run_rows
from kvcli.api import load
from kvcli.batch import inflight
from kvcli.batch.tally import Tally
from kvcli.models.loading import ModelSpec

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}
ROUNDS = 3


class Static(inflight.InFlight):
    """The next batch begins when the last row of this one has ended."""

    def _admit(self) -> None:
        if not self.flights:
            super()._admit()


def dummy(folder: Path) -> ModelSpec:
    """A model of random weights, large enough for reading them to be most of a step."""
    config = folder / "config.json"
    config.write_text(json.dumps(SHAPE))
    return ModelSpec(str(config), load_format="dummy")


def throughput(folder: Path) -> dict:
    """Tokens a second of continuous and static batches in turn, ROUNDS times, and of one row after the other."""
    spec = dummy(folder)
    rows = ragged(40, longest=256, words=24)
    tokens = sum(row["max_tokens"] for row in rows)
    ways = {
        "continuous": {},
        "static, in the file's order": {"kind": Static, "in_order": True},
        "static, longest first": {"kind": Static},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[str, int] = {}
    outcomes = []
    for _ in range(ROUNDS):
        for name, options in ways.items():
            tally, outcome = run_rows(rows, folder, spec, **options)
            outcomes.append(outcome)
            seconds[name].append(tally.progress().seconds)
            steps[name] = tally.steps
    model = load(spec.name, load_format="dummy")
    model.generate("warm", method="full", max_tokens=2)
    begun, alone = time.perf_counter(), {}
    for row in rows:
        answer = model.generate(row["prompt"], method="full", max_tokens=row["max_tokens"], ignore_eos=True)
        alone[row["custom_id"]] = answer.text
    seconds["generate, row by row"], steps["generate, row by row"] = [time.perf_counter() - begun], tokens
    continuous = seconds["continuous"]
    return {
        "rows": len(rows),
        "tokens": tokens,
        "at_once": AT_ONCE,
        "rounds": ROUNDS,
        **{
            name: {"seconds": each, "tokens_per_second": tokens / median(each), "steps": steps[name]}
            for name, each in seconds.items()
        },
        "same texts": all(outcome == alone for outcome in outcomes),
        # A way is held against the continuous run of its own round.
        "speedup": {name: spread([a / b for a, b in zip(each, continuous, strict=False)])
                    for name, each in seconds.items() if name != "continuous"},
    }  # fmt: skip


def grouped(folder: Path) -> dict:
    """Time of reading one document for all questions, and once for each."""
    spec = dummy(folder)
    document = (Path(__file__).parents[2] / "examples" / "needle-8k.txt").read_text()[:3000]
    questions = [f"What is the secret of {word}?" for word in WORDS[:8]]
    rows = [
        {"custom_id": f"q{number}", "document": document, "prompt": question, "max_tokens": 8}
        for number, question in enumerate(questions)
    ]
    together_seconds, one_by_one, same = [], [], True
    for _ in range(ROUNDS):
        together, outcome = run_rows(rows, folder, spec, method="freekv")
        alone = [run_rows([row], folder, spec, method="freekv") for row in rows]
        together_seconds.append(together.prefill_seconds)
        one_by_one.append(sum(tally.prefill_seconds for tally, _ in alone))
        same &= outcome == {name: text for _, each in alone for name, text in each.items()}
    return {
        "questions": len(rows),
        "document_tokens": together.prompt_tokens,
        "rounds": ROUNDS,
        "together_seconds": together_seconds,
        "one_by_one_seconds": one_by_one,
        "speedup": spread([a / b for a, b in zip(one_by_one, together_seconds, strict=True)]),
        "same texts": same,
    }


def spread(ratios: list[float]) -> dict[str, float]:
    """Median and both ends of what was found."""
    return {"median": median(ratios), "least": min(ratios), "most": max(ratios)}


class Resident:
    """Notes the resident bytes of this process at every thousandth row."""

    def __init__(self) -> None:
        self.found: dict[int, int] = {}

    def update(self, tally: Tally, last: bool = False) -> None:  # noqa: ARG002 - what watchers are called with
        """Look, where another thousand rows have ended."""
        if (rows := 1000 * (tally.done // 1000)) and rows not in self.found:
            self.found[rows] = psutil.Process().memory_info().rss


def memory(folder: Path) -> dict:
    """Resident bytes over 10,000 tiny rows."""
    rows = [{"custom_id": f"r{n}", "prompt": f"The merchant {n}", "max_tokens": 2} for n in range(10_000)]
    resident = Resident()
    tally, _ = run_rows(rows, folder, watch=[resident])
    bytes_ = list(resident.found.values())
    return {"rows": tally.done, "seconds": tally.progress().seconds, "resident_bytes": resident.found,
            "growth_bytes": max(bytes_) - bytes_[0]}  # fmt: skip
