"""Studies run rarely; that they still fit the package shows when they are imported, and in what they override."""

import importlib
import inspect
import runpy
import sys
from pathlib import Path

import pytest

CLAIMS = Path(__file__).parents[2] / "research" / "paper_claims"
sys.path.append(str(CLAIMS))


def test_every_study_has_a_command():
    commands = runpy.run_path(str(CLAIMS / "__main__.py"))
    studies = {path.stem.replace("_", "-") for path in CLAIMS.glob("[a-z]*.py")} - {"subject"}
    assert studies == {*commands["STUDIES"], *commands["COMPARISONS"]}


@pytest.mark.parametrize("name", sorted(path.stem for path in CLAIMS.glob("[a-z]*.py")))
def test_a_study_overrides_methods_as_they_are(name):
    module = importlib.import_module(name)
    own = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    for kind in own:
        for method, function in vars(kind).items():
            base = getattr(super(kind, kind), method, None)
            if inspect.isfunction(function) and inspect.isfunction(base) and method != "__init__":
                taken, given = (list(inspect.signature(each).parameters) for each in (function, base))
                assert taken == given, f"{kind.__name__}.{method}"
