"""How much there is to read: lines, modules, files behind a method, files on a page's way: `python tests/house.py`.

A file is counted for a method if the method's files import it, directly or through others, within methods and caches;
with memory and kernels, as a second number. The page's way is the list of `docs/architecture.md`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

METHODS = ("quest", "freekv", "fier", "shadowkv", "retroinfer")
CLOSE = ("kvcli.methods", "kvcli.kv", "kvcli.store")
FAR = (*CLOSE, "kvcli.memory", "kvcli.kernels")


def modules(root: Path) -> dict[str, Path]:
    """Find every module of the package by its dotted name; `kernels/` is `kvcli.kernels`."""
    links = [root / "kvcli" / name for name in ("kernels", "profiles", "conformance")]
    found = {}
    for top, prefix in (("kvcli", ()), ("kernels", ("kvcli",))):
        for path in (root / top).rglob("*.py"):
            if not any(path.is_relative_to(link) for link in links):
                parts = (*prefix, *path.relative_to(root).with_suffix("").parts)
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path], at_import: bool = False) -> set[str]:
    """List the modules that a file imports; `at_import`: not within functions, not for type checkers alone."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if at_import and isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.ImportFrom) and child.module:
                for each in child.names:
                    whole = f"{child.module}.{each.name}"
                    found.add(whole if whole in known else child.module)
            visit(child)

    visit(ast.parse(path.read_text()))
    return (found & known.keys()) - {name for name, place in known.items() if place == path}


def importers(root: Path) -> dict[str, set[str]]:
    """Name the modules that import each module, within functions too."""
    known = modules(root)
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        for each in imports(path, known):
            found[each].add(name)
    return found


def reached(root: Path, method: str, within: tuple[str, ...]) -> set[str]:
    """Follow the imports of a method's files within some packages."""
    known = modules(root)
    first = f"kvcli.methods.{method}"
    left = [name for name in known if name == first or name.startswith(f"{first}.")]
    seen: set[str] = set()
    while left:
        name = left.pop()
        if name not in seen and name.startswith(within):
            seen.add(name)
            left += imports(known[name], known, at_import=True)
    return {name for name in seen if len(known[name].read_text().splitlines()) > 1}


def pages_way(root: Path) -> list[str]:
    """List the files that `docs/architecture.md` names from `generate` to a page attended, in order."""
    text = (root / "docs" / "architecture.md").read_text()
    _, _, rest = text.partition("## A page's way")
    way, _, _ = rest.partition("\n## ")
    steps = "\n".join(line for line in way.splitlines() if re.match(r"\d\. |   ", line))
    return list(dict.fromkeys(re.findall(r"`((?:kvcli|kernels)/[\w/]+\.py)`", steps)))


def main(root: Path) -> None:
    """Print all of it."""
    known, by = modules(root), importers(root)
    lines = {name: len(path.read_text().splitlines()) for name, path in known.items()}
    single = [name for name in known if len(by[name]) == 1 and lines[name] > 1]
    print(f"lines {sum(lines.values())}, modules {len(known)}")
    print(f"imported once {len(single)}, of these below 80 lines {sum(lines[name] < 80 for name in single)}")
    for method in METHODS:
        close, far = (len(reached(root, method, within)) for within in (CLOSE, FAR))
        print(f"{method}: {close} files of methods and caches, {far} with memory and kernels")
    print(f"from generate to a page attended: {len(pages_way(root))} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
