"""Answers of the demo model with KV in host memory as the model computes it, in 8 bits and in 4.

    python benchmarks/kv_dtype.py                    about fifteen minutes on one core
    python benchmarks/kv_dtype.py --limit 4          a look
    python benchmarks/kv_dtype.py --tasks vt --limit 100

The same documents for all three, each read once, through `freekv` with a small budget, which recalls pages of what is
rounded, `fier`, which recalls single tokens, and `offload`, which attends to all of it. `less` is what a document loses
by rounding, paired over the documents: the mean with its standard error.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import add_output, save

TASKS, LENGTH, BUDGET, ENDS = "niah_single,niah_multikey,vt,ppl", "4K", 512, 64
DTYPES = ("auto", "int8", "int4")
METHODS = {f"freekv {BUDGET}": {"budget": BUDGET, "sink": ENDS, "window": ENDS}}
METHODS |= {f"fier {BUDGET}": {"budget": BUDGET, "sink": ENDS, "window": ENDS, "offload": True}, "offload": {}}


def answers(tasks: str, limit: int) -> list[dict[str, Any]]:
    """Run `kvcli eval` with all of them; a row for each dtype, method and task."""
    with TemporaryDirectory() as folder:
        profiles = []
        for method, settings in METHODS.items():
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


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=30, help="documents of each task")
    parser.add_argument("--tasks", default=TASKS)
    add_output(parser, "kv_dtype")
    given = parser.parse_args()
    rows = answers(given.tasks, given.limit)
    for row in rows:
        print(*(row.get(key, "") for key in ("kv_dtype", "method", "task", "value", "stderr", "less", "less_stderr")))
    save(given.output, {"length": LENGTH, "budget": BUDGET, "sink": ENDS, "window": ENDS, "rows": rows})


if __name__ == "__main__":
    main()
