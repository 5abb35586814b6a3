"""KV in narrower forms against KV as the model computes it: answers of the demo model, and decode steps.

    python benchmarks/kv_dtype.py answers               about fifteen minutes on one core
    python benchmarks/kv_dtype.py answers --limit 4     a look
    python benchmarks/kv_dtype.py steps                 about ten minutes on two cores
    python benchmarks/kv_dtype.py steps --methods freekv --repeats 3
    python benchmarks/kv_dtype.py resident              about ten minutes on two cores
    python benchmarks/kv_dtype.py resident --models smollm2 --depths 0 4096 --repeats 2

`answers`: the same documents for all three, each read once, through `freekv` with a small budget, which recalls pages
of what is rounded, `fier`, which recalls single tokens, and `offload`, which attends to all of it. `less` is what a
document loses by rounding, paired over the documents: the mean with its standard error.

`steps`: a dummy Llama of mid size continues 16K made-up tokens whose queries turn completely at every step, so that
nearly all that is selected is recalled; `offload` and `refreekv`, which keeps everything here, read all of it. In fp32
and in bfloat16, in turn, repeat after repeat; a ratio is taken within each repeat.

`resident`: `full` with KV in each form, at each depth on made-up KV, all in one process in turn. The models are those
of `peers_cpu.py`. Every step is also put over the step at the first depth with KV as computed.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import add_command, arguments, ratios, said, save, spread
from peers_parts.files import file_of
from random_weights import CONFIG, Run, kvcli_steps, made_up_kv
from transformers import LlamaForCausalLM

from kvcli.inputs.profiles import resolve_profile
from kvcli.models.loading import ModelSpec, load_model

TASKS, LENGTH, BUDGET, ENDS = "niah_single,niah_multikey,vt,ppl", "4K", 512, 64
DTYPES = ("auto", "int8", "int4")
RESIDENT = ("auto", "bfloat16", "int8", "k8v4")
ASKED = {f"freekv {BUDGET}": {"budget": BUDGET, "sink": ENDS, "window": ENDS}}
ASKED |= {f"fier {BUDGET}": {"budget": BUDGET, "sink": ENDS, "window": ENDS, "offload": True}, "offload": {}}


def scored(tasks: str, limit: int) -> list[dict[str, Any]]:
    """Run `kvcli eval` with all of them; a row for each dtype, method and task."""
    with TemporaryDirectory() as folder:
        profiles = []
        for method, settings in ASKED.items():
            for dtype in DTYPES:
                name = method.split()[0]
                profiles.append(Path(folder) / f"{name}-{dtype}.toml")
                lines = [f'method = "{name}"', f'description = "{dtype}"', "[settings]", f'kv_dtype = "{dtype}"']
                profiles[-1].write_text(
                    "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in settings.items())])
                )
        kept = Path(folder) / "answers.jsonl"
        command = [sys.executable, "-m", "kvcli", "eval", "--tasks", tasks, "--length", LENGTH, "--limit", str(limit)]
        command += ["--profile", ",".join(map(str, profiles)), "--predictions", str(kept), "--json", "--quiet"]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)["results"]
        scores = defaultdict[tuple[str, str], dict[int, float]](dict)
        for line in kept.read_text().splitlines()[1:]:
            answer = json.loads(line)
            if answer["score"] is not None:
                scores[answer["variant"], answer["task"]][answer["index"]] = 100 * answer["score"]
    rows = []
    for dtype in DTYPES:
        for result in (each for each in found if f"-{dtype}" in each["variant"]):
            method, task = result["variant"].replace(f"-{dtype}", ""), result["task"]
            own, exact = scores[result["variant"], task], scores[result["variant"].replace(dtype, "auto"), task]
            less = paired([exact[index] - own[index] for index in own]) if own and dtype != "auto" else {}
            rows.append({"kv_dtype": dtype, "method": method, "task": task, **result["score"], **less})
    return rows


def paired(less: list[float]) -> dict[str, float]:
    """The mean of differences, with its standard error."""
    error = statistics.stdev(less) / len(less) ** 0.5 if len(less) > 1 else 0.0
    return {"less": statistics.fmean(less), "less_stderr": error}


def answers(given: argparse.Namespace) -> None:
    """Ask with KV in each form."""
    rows = scored(given.tasks, given.limit)
    for row in rows:
        print(*(row.get(key, "") for key in ("kv_dtype", "method", "task", "value", "stderr", "less", "less_stderr")))
    save(given.output, {"length": LENGTH, "budget": BUDGET, "sink": ENDS, "window": ENDS, "rows": rows})


TIMED: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("freekv", "arkvale", "shadowkv", "infllm", "infinigen", "pariskv", "retroinfer")},
    "magicpig": {},
    "fier": {"offload": True},
    "offload": {},
    "refreekv": {"offload": True, "threshold": 0.0},
}


def measure(method: str, context: int, dtype: torch.dtype, steps: int, repeats: int) -> dict[str, Any]:
    """Run one method with all of them, print and return the figures."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval().to(dtype)
    kv = [(k.to(dtype), v.to(dtype)) for k, v in made_up_kv(context)]
    taken: dict[str, list[float]] = {held: [] for held in DTYPES}
    for _ in range(repeats):
        for held, times in taken.items():
            run = Run(resolve_profile(method, overrides={**TIMED[method], "kv_dtype": held}))
            times.append(statistics.median(kvcli_steps(run, model, kv, context, steps)[0]))
    row: dict[str, Any] = {"method": method, "dtype": str(dtype).removeprefix("torch."), "context": context}
    for held, times in taken.items():
        row[f"{held}_ms"] = spread(times)
        row[f"{held}_ratio"] = ratios(times, taken["auto"])
    said = ", ".join(f"{held} {row[f'{held}_ratio']['median']:.2f}" for held in DTYPES[1:])
    print(f"{method:<11} {row['dtype']:<9} {row['auto_ms']['median']:6.1f} ms as computed; {said} of it", flush=True)
    return row


def steps(given: argparse.Namespace) -> None:
    """Time decode steps with KV in each form."""
    dtypes = (torch.float32, torch.bfloat16)
    pairs = [(method, dtype) for method in given.methods.split(",") for dtype in dtypes]
    rows = [measure(method, given.context, dtype, given.steps, given.repeats) for method, dtype in pairs]
    save(given.output, {"model": CONFIG.to_diff_dict(), "rows": rows})


def resident(given: argparse.Namespace) -> None:
    """Time decode steps of full attention with KV in each form."""
    rows = []
    for name in given.models:
        model = load_model(ModelSpec(str(file_of(name)), device="cpu", offline=True)).module
        taken: dict[tuple[int, str], list[float]] = defaultdict(list)
        for _ in range(given.repeats):
            for depth, held in product(given.depths, RESIDENT):
                run = Run(resolve_profile("full", overrides={"kv_dtype": held}))
                times = kvcli_steps(run, model, None, max(1, depth), given.steps)[0]
                taken[depth, held].append(statistics.median(times))
        for (depth, held), times in taken.items():
            row: dict[str, Any] = {"model": name, "context": depth, "kv_dtype": held, "ms": spread(times)}
            row["over_auto"] = ratios(times, taken[depth, "auto"])
            row["over_first"] = ratios(times, taken[given.depths[0], "auto"])
            rows.append(row)
            figures = f"{row['ms']['median']:7.1f} ms, {said(row['over_auto'])} of auto"
            print(
                f"{name:<18} {depth:>6} {held:<9} {figures}, {said(row['over_first'])} of the first depth", flush=True
            )
    save(given.output, {"steps": given.steps, "rows": rows})


def main() -> None:
    """Measure, print, keep."""
    commands = (parser := arguments(__doc__)).add_subparsers(required=True)
    one = add_command(commands, answers, "kv_dtype")
    one.add_argument("--limit", type=int, default=30, help="documents of each task")
    one.add_argument("--tasks", default=TASKS)
    two = add_command(commands, steps, "kv_step")
    two.add_argument("--methods", default=",".join(TIMED))
    two.add_argument("--context", type=int, default=16_384, help="tokens")
    two.add_argument("--steps", type=int, default=10, help="timed decode steps a run")
    two.add_argument("--repeats", type=int, default=5, help="runs of each, in turn")
    three = add_command(commands, resident, "kv_resident")
    three.add_argument("--models", nargs="+", default=["smollm2", "llama-3.2-1b-q8_0", "llama-3.2-1b-q4_k"])
    three.add_argument("--depths", nargs="+", type=int, default=[0, 4096, 16_384], help="tokens")
    three.add_argument("--steps", type=int, default=16, help="timed decode steps a run")
    three.add_argument("--repeats", type=int, default=5, help="runs of each, in turn")
    given = parser.parse_args()
    given.work(given)


if __name__ == "__main__":
    main()
