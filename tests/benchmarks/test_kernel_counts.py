"""Kernels per layer: the committed counts and the table of the kernels' page say what a step launches today."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import kernel_counts  # noqa: E402
import pytest  # noqa: E402
import test_trace  # noqa: E402

COUNTS = json.loads((ROOT / "benchmarks/results/kernel_counts.json").read_text())["methods"]
ROW = re.compile(r"\| `([\w-]+)`(, prompt within its budget)? \| [^|]+ \| (\d+) \+ (\d+) \| [^|]+ \| ([^|]+) \|")


@pytest.mark.parametrize("label", kernel_counts.cases())
def test_the_file_says_what_is_launched_today(label):
    """`python benchmarks/kernel_counts.py -o benchmarks/results/kernel_counts.json` writes it."""
    assert kernel_counts.counted(*kernel_counts.cases()[label]) == COUNTS[label]


def test_every_step_that_is_traced_is_counted():
    assert {*COUNTS} == {case.id for case in test_trace.cases()} == {*kernel_counts.cases()}


def test_the_page_says_what_the_file_says():
    """A switch has a row of its own where its numbers differ."""
    found = {}
    for name, within, triton, torch, chain in ROW.findall((ROOT / "kernels/README.md").read_text()):
        numbers = [int(each) for each in re.findall(r"\d+", chain)]
        found["raas-contested" if within else name] = [int(triton), int(torch), numbers[0], numbers[-1]]
    assert found == {label: list(COUNTS[label].values()) for label in found}
    unlike = {label for label, numbers in COUNTS.items() if numbers != COUNTS.get(label.partition("-")[0])}
    assert {*found} == {label for label in COUNTS if "-" not in label} | unlike
