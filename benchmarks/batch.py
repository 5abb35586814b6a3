"""`kvcli batch`: its throughput, documents read once, flat memory, and nothing lost to kills.

    python benchmarks/batch.py

- throughput: ragged rows by continuous batching, by static batches in the order of the file and longest first, and by
  `generate` row by row, on a dummy Llama (8 layers, width 1024, fp32). A static batch ends before the next one begins.
- grouped: several questions on one document in one batch, against each in a batch of its own: time of the prefill.
- memory: resident bytes while 10,000 tiny rows run.
- kills: 300 ragged rows, 5 % of them bad, killed (-9) 30 times at random moments and started again; texts are compared
  with those of `generate`, row by row.
- ray: two workers here, one of them killed twice (where Ray is installed).

A part that the results file has is not run again without --again.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import psutil
import torch
from common import arguments, ratios, save, spread

from kvcli.api import load
from kvcli.batch import inflight
from kvcli.batch import run as batch_run
from kvcli.batch.run import BatchRequest
from kvcli.batch.stop import Stop
from kvcli.batch.tally import Tally
from kvcli.cli import main as command
from kvcli.inputs.options import Sampling
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.loading import ModelSpec
from kvcli.telemetry.observer import Observer

AT_ONCE = 8
WORDS = "If the mist comes gladly the merchant takes a book to the orchard and opens an old tower".split()  # noqa: SIM905


def ragged(count: int, longest: int, words: int, seed: int = 0) -> list[dict]:
    """Rows of which most are short and some are long."""
    drawn = random.Random(seed)
    return [
        {
            "custom_id": f"r{number}",
            "prompt": " ".join(drawn.choices(WORDS, k=drawn.randint(4, words))),
            "max_tokens": max(2, round(longest ** drawn.random())),
            "ignore_eos": True,
        }
        for number in range(count)
    ]


def with_bad(rows: list[dict]) -> list[dict]:
    """Make every twentieth row bad, in turn by a field, its length and its value."""
    bad = ({"tools": []}, {"prompt": "merchant " * 9000}, {"top_p": 2})
    return [{**row, **bad[n // 20 % 3]} if n % 20 == 7 else row for n, row in enumerate(rows)]


def run_rows(rows, folder: Path, spec=None, method="full", kind=inflight.InFlight, in_order=False, watch=()):
    """Run rows in this process; gives the counts and the texts by name."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    output.unlink(missing_ok=True)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tally = Tally(watchers=list(watch))
    request = BatchRequest(str(source), output, resolve_profile(method), Sampling(), max_inflight=AT_ONCE)
    before = batch_run.InFlight, batch_run.grouped
    batch_run.InFlight = kind
    if in_order:
        batch_run.grouped = lambda jobs: [[job] for job in jobs]
    try:
        batch_run.run(spec or ModelSpec(), request, Observer(), tally, Stop())
    finally:
        batch_run.InFlight, batch_run.grouped = before
    return tally, texts(output)


def texts(path: Path) -> dict[str, str]:
    """What each row came to: its text, or the code of its error."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    found = {
        each["custom_id"]: each["error"]["code"]
        if each["error"]
        else each["response"]["body"]["choices"][0]["message"]["content"]
        for each in results
    }
    assert len(found) == len(results), "a row is there twice"
    return found


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
    document = (Path(__file__).parents[1] / "examples" / "needle-8k.txt").read_text()[:3000]
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
        "speedup": ratios(one_by_one, together_seconds),
        "same texts": same,
    }


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


def kills(folder: Path) -> dict:
    """Kill a batch again and again; what it comes to in the end."""
    rows, wanted_kills, drawn = with_bad(ragged(300, longest=150, words=60, seed=1)), 30, random.Random(2)
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(source), "-o", str(output), "--max-inflight", "2"]
    killed, lines = 0, []
    while killed < wanted_kills:
        process = start(folder, *arguments)
        time.sleep(drawn.uniform(0.6, 1.8))
        os.kill(process, signal.SIGKILL)
        if ended(process) >= 0:
            break  # it had ended before
        killed += 1
        lines.append(output.read_bytes().count(b"\n") if output.exists() else 0)
    code = ended(start(folder, *arguments))
    found, model = texts(output), load()
    good = [row for row in rows if not row.keys() & {"tools", "top_p"} and len(row["prompt"]) < 9000]
    alone = {
        row["custom_id"]: model.generate(row["prompt"], max_tokens=row["max_tokens"], ignore_eos=True).text
        for row in good
    }
    errors = sorted({text for name, text in found.items() if name not in alone})
    return {
        "rows": len(rows),
        "kills": killed,
        "lines_after_each": lines,
        "exit_code": code,
        "every row once": set(found) == {row["custom_id"] for row in rows},
        "errors": len(rows) - len(good),
        "codes": errors,
        "same texts": {name: found[name] for name in alone} == alone,
    }


def ray(folder: Path) -> dict | None:
    """Two workers, one of them killed twice."""
    if find_spec("ray") is None:
        return None
    rows = with_bad(ragged(100, longest=96, words=60, seed=3))
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, wanted = run_rows(rows, folder, method="freekv")
    output.unlink()
    begun = time.perf_counter()
    process = start(folder, str(source), "-o", str(output), "--engine", "ray", "--workers", "2")
    shard, killed, at = folder / "out.1-of-2.jsonl", [], 0
    while len(killed) < 2 and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)
        if not shard.exists() or shard.read_bytes().count(b"\n") < at + 4:
            continue
        for child in psutil.Process(process).children(recursive=True):
            writes = any(file.path == str(shard) for file in child.open_files())
            if writes and child.pid not in killed:
                at = shard.read_bytes().count(b"\n")
                child.kill()
                killed.append(child.pid)
    code = ended(process)
    found = texts(output)
    return {"rows": len(rows), "workers": 2, "kills": len(killed), "exit_code": code, "same results": found == wanted,
            "seconds": time.perf_counter() - begun}  # fmt: skip


def start(folder: Path, *arguments: str) -> int:
    """Start the command in a process that has its libraries loaded; gives its number."""
    if (process := os.fork()) == 0:
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        sys.argv = ["kvcli", "batch", *arguments]
        try:
            command()
        except SystemExit as end:
            os._exit(int(end.code or 0))  # nothing of the benchmark is to be tidied up here
        os._exit(70)
    return process


def ended(process: int) -> int:
    """Wait for a process; gives its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


PARTS = {"throughput": throughput, "grouped": grouped, "kills": kills, "ray": ray, "memory": memory}


def main() -> None:
    """Run what the results file lacks, and write it after every part."""
    parser = arguments(__doc__, "batch")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which of them")
    parser.add_argument("--again", action="store_true", help="also those that the file has")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(args.output.read_text()) if args.output.exists() else {}
    results.pop("provenance", None)
    for name in args.parts:
        if name in results and not args.again:
            continue
        with tempfile.TemporaryDirectory() as folder:
            pid = os.fork()  # a part of its own process: no thread is there when it forks, and memory is its own
            if pid == 0:
                Path(folder, "result").write_text(json.dumps(PARTS[name](Path(folder))))
                os._exit(0)
            if ended(pid):
                sys.exit(f"{name} failed")
            found = json.loads(Path(folder, "result").read_text())
        print(name, json.dumps(found, indent=1))
        if found is not None:
            results[name] = found
            save(args.output, results)


if __name__ == "__main__":
    main()
