"""Benchmarks run rarely; that they still fit the package shows when they are imported, and in what they override."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))


def test_every_benchmark_can_be_imported(warm, tmp_path):
    names = ", ".join(sorted(path.stem for path in BENCHMARKS.glob("*.py")))
    (tmp_path / "all.py").write_text(f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import {names}")
    ended = warm(program=tmp_path / "all.py", cwd="/")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", sorted(path.stem for path in (BENCHMARKS / "claims").glob("[a-z]*.py")))
def test_a_study_overrides_methods_as_they_are(name):
    module = importlib.import_module(f"claims.{name}")
    own = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    for kind in own:
        for method, function in vars(kind).items():
            base = getattr(super(kind, kind), method, None)
            if inspect.isfunction(function) and inspect.isfunction(base) and method != "__init__":
                taken, given = (list(inspect.signature(each).parameters) for each in (function, base))
                assert taken == given, f"{kind.__name__}.{method}"
