"""What keeps the code walkable: no import circle, one class a name, and what has one caller lies with it."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = [ROOT / "kvcli/kernels", ROOT / "kvcli/profiles", ROOT / "kvcli/conformance"]


def modules() -> dict[str, Path]:
    """Find every module of the package by its dotted name; `kernels/` is `kvcli.kernels`."""
    found = {}
    for top, prefix in (("kvcli", ()), ("kernels", ("kvcli",))):
        for path in (ROOT / top).rglob("*.py"):
            if any(path.is_relative_to(link) for link in LINKS):
                continue
            parts = (*prefix, *path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(name: str) -> set[str]:
    """List what a module imports when it is imported itself: not within functions, not for type checkers alone."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.ImportFrom) and child.module:
                for each in child.names:
                    whole = f"{child.module}.{each.name}"
                    found.add(whole if whole in MODULES else child.module)
            visit(child)

    visit(ast.parse(MODULES[name].read_text()))
    return (found & MODULES.keys()) - {name}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {name: imported(name) for name in MODULES}


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
