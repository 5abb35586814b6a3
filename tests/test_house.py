"""What keeps the code walkable: few loose modules, few layers, short modules, one class a name."""

import ast
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = [path for top in ("kvcli", "kernels") for path in (ROOT / top).rglob("*.py")]


def test_few_modules_lie_loose_in_the_package():
    loose = {path.name for path in (ROOT / "kvcli").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert len(loose) <= 6, sorted(loose)


def test_imports_have_few_layers():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert len(layers) <= 12


def test_no_module_is_long():
    assert [str(path) for path in MODULES if len(path.read_text().splitlines()) > 300] == []


def test_no_two_classes_share_a_name():
    homes = defaultdict(set)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(path.resolve())
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
