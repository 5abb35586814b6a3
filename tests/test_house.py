"""What keeps the code walkable: no import circle, a short way for a page, and what has one caller lies with it."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from house import importers, imports, modules, pages_way

ROOT = Path(__file__).parents[1]
MODULES = modules(ROOT)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {name: imports(path, MODULES, at_import=True) for name, path in MODULES.items()}


def test_no_imports_go_in_a_circle(graph):
    finished: set[str] = set()
    way: list[str] = []

    def enter(name: str) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in finished:
            way.append(name)
            for each in sorted(graph[name]):
                enter(each)
            finished.add(way.pop())

    for name in graph:
        enter(name)


def test_no_two_classes_share_a_name():
    homes = defaultdict(set)
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(path.resolve())
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_a_page_passes_few_files():
    way = pages_way(ROOT)
    assert way[0] == "kvcli/generate.py"
    assert way[-1] == "kernels/decode_attention.py"
    assert len(way) <= 15


def test_what_has_one_caller_lies_with_it():
    """Below 80 lines; packages, methods, commands, and model shapes found by their name are files of their own."""
    own = ("kvcli.methods.", "kvcli.cli.", "kvcli.models.shapes")
    by, modules = importers(ROOT), {name: path for name, path in MODULES.items() if path.name != "__init__.py"}
    small = {name for name, path in modules.items() if len(path.read_text().splitlines()) < 80}
    assert {name for name in small if len(by[name]) == 1 and not name.startswith(own)} == set()
