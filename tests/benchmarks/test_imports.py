"""Benchmarks run rarely; that they still fit the package shows when they are imported."""

from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_benchmark_can_be_imported(warm, tmp_path):
    names = ", ".join(sorted(path.stem for path in BENCHMARKS.glob("*.py")))
    (tmp_path / "all.py").write_text(f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import {names}")
    ended = warm(program=tmp_path / "all.py", cwd="/")
    assert ended.returncode == 0, ended.stderr
