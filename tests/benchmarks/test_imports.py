"""Benchmarks run rarely; that they still fit the package shows when they are imported."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_benchmark_can_be_imported():
    programs = ", ".join(sorted(path.stem for path in BENCHMARKS.glob("*.py")))
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import {programs}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert ended.returncode == 0, ended.stderr
