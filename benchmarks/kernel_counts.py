"""Kernels that every method launches a layer and step at 128K, counted on a fake CUDA device: no GPU is needed.

    python benchmarks/kernel_counts.py [--against COMMIT] [-o FILE]

Counted are Triton kernels and operations of torch of a layer's attention and all that goes with it, on a short prompt
beyond a shorter budget (`raas-contested`: within it), with the form that choosing pages has at 128K
(`kvcli.kernels.page_scores.ALONE`, `kvcli.kernels.group_pooling.MANY`). The chain is what the next layer waits for,
the model's own kernels of a llama layer among them (`LAYER` of `tests/runtime/gpu/test_fused.py`); where heads are
corrected it is longer. `--against` puts the budgets of the trace's test at a commit beside.
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/runtime/gpu")]

import test_fused  # noqa: E402
import test_trace  # noqa: E402
from common import arguments, save  # noqa: E402

from kvcli.kernels import group_pooling, page_scores  # noqa: E402
from kvcli.methods import get_method  # noqa: E402
from kvcli.runtime.gpu.recorder import SerialStreams  # noqa: E402

LENGTH = 131_072
BLOCK = 32  # pages or tokens that a program scores
TRACE = "tests/runtime/gpu/test_trace.py"


class CountedStreams(SerialStreams):
    """Notes how many kernels were submitted to each stream beside the main one."""

    def __init__(self) -> None:
        self.beside: Counter[str] = Counter()
        self.count: Any = lambda: 0

    def submit(self, name: str, work: Any, after: Any) -> None:  # noqa: ARG002
        """Count what the work launches."""
        before = self.count()
        work()
        self.beside[name.split()[0]] += self.count() - before


def counted(name: str, switch: dict[str, Any], lengths: tuple[int, ...]) -> dict[str, float]:
    """Count a layer's kernels after such prompts: all, of the chain, and of the chain through a corrected head."""
    fields = get_method(name).Config.model_fields
    scored = LENGTH // next((fields[size].default for size in ("page_size", "chunk") if size in fields), 1)
    streams = CountedStreams()
    with pytest.MonkeyPatch.context() as patch:
        if "page_size" in fields and scored >= page_scores.ALONE:
            patch.setattr(page_scores, "ALONE", 0)
        if scored > group_pooling.MANY * BLOCK:
            patch.setattr(group_pooling, "MANY", 0)
        triton, torch_, _ = test_trace.traced(name, switch, lengths, patch, streams)
    beside = streams.beside
    chain = triton + torch_ - sum(beside.values()) + test_fused.LAYER
    corrected = chain - 1 + beside["correction"] if "correction" in beside else chain
    return {"triton": triton, "torch": torch_, "chain": chain, "corrected": corrected}


def main() -> None:
    """Print the table, and write it."""
    parser = arguments(__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="a commit whose numbers stand beside")
    parser.add_argument("-o", "--output", type=Path, help="write JSON, too")
    asked = parser.parse_args()
    before = budgets(asked.against) if asked.against else {}
    found = {str(case.id): counted(*case.values) for case in test_trace.cases()}
    print("| method | Triton + torch | before | chain | through a corrected head |\n| --- | --- | --- | --- | --- |")
    for label, numbers in found.items():
        old = "{} + {}".format(*before[label]) if label in before else ""
        sums = "{triton:g} + {torch:g} | " + old + " | {chain:g} | {corrected:g}"
        print(f"| `{label}` | {sums.format(**numbers)} |")
    if asked.output:
        against = {"commit": asked.against, "methods": before}
        save(asked.output, {"length": LENGTH, "model": test_fused.LAYER, "methods": found, "against": against})


def budgets(commit: str) -> dict[str, list[int]]:
    """Read what the trace's test allowed at a commit: Triton kernels and operations of torch a layer."""
    text = subprocess.check_output(["git", "show", f"{commit}:{TRACE}"], cwd=ROOT, text=True)
    stated = text[text.index("BUDGET = ") + len("BUDGET = ") :]
    return {name: list(numbers) for name, numbers in ast.literal_eval(stated[: stated.index("}") + 1]).items()}


if __name__ == "__main__":
    main()
