"""Answers of the demo model with KV in host memory as the model computes it, in 8 bits and in 4.

    python benchmarks/kv_dtype.py                    about ten minutes on one core
    python benchmarks/kv_dtype.py --limit 4          a look

The same documents for all three, through `freekv` with a small budget, which recalls what is rounded, and `offload`,
which attends to all of it.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from common import add_output, save

TASKS, LENGTH, BUDGET, ENDS = "niah_single,niah_multikey,vt,ppl", "4K", 512, 64
DTYPES = ("auto", "int8", "int4")


def answers(dtype: str, limit: int) -> dict[str, Any]:
    """Run `kvcli eval` with one of them."""
    command = [sys.executable, "-m", "kvcli", "eval", "--tasks", TASKS, "--length", LENGTH, "--limit", limit]
    command += ["--method", "freekv,offload", "--budget", BUDGET, "--set", f"sink={ENDS}", "--set", f"window={ENDS}"]
    command += ["--kv-dtype", dtype, "--json", "--quiet"]
    out = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout
    return json.loads(out)  # type: ignore[no-any-return]


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=30, help="documents of each task")
    add_output(parser, "kv_dtype")
    given = parser.parse_args()
    rows = []
    for dtype in DTYPES:
        for found in answers(dtype, given.limit)["results"]:
            rows.append({"kv_dtype": dtype, "method": found["variant"], "task": found["task"], **found["score"]})
            print(*(rows[-1][key] for key in ("kv_dtype", "method", "task", "value", "stderr")), flush=True)
    save(given.output, {"length": LENGTH, "budget": BUDGET, "sink": ENDS, "window": ENDS, "rows": rows})


if __name__ == "__main__":
    main()
