"""Reads the files of this package's methods without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class ClassSource:
    """What a class and those that it derives from define, `base` left out: values of literals, None for all else."""

    module: str
    names: dict[str, Any]


@cache
def classes(module: str) -> dict[str, ClassSource]:
    """The classes that a file of this package knows, by their names."""
    known: dict[str, ClassSource] = {}
    for node in _statements(module):
        match node:
            case ast.ImportFrom(module=str(imported), names=names) if _lies_here(imported):
                there = {} if imported == "kvcli.methods.base" else classes(imported.rpartition(".")[2])
                known |= {each.name: there[each.name] for each in names if each.name in there}
            case ast.ClassDef(name=name, bases=bases, body=body):
                defined: dict[str, Any] = {}
                for base in bases:
                    named = base.value if isinstance(base, ast.Subscript) else base  # of a generic class
                    if isinstance(named, ast.Name) and named.id in known:
                        defined |= known[named.id].names
                for statement in body:
                    match statement:
                        case ast.Assign(targets=[ast.Name(id=attribute)], value=value):
                            defined[attribute] = value.value if isinstance(value, ast.Constant) else None
                        case ast.FunctionDef(name=function):
                            defined[function] = None
                known[name] = ClassSource(module, defined)
    return known


def settings(module: str) -> list[str]:
    """Names of the settings of the method whose file `module` is, those that it shares first."""
    configs = [
        config
        for node in _statements(module)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.Assign)
        for config in [statement.value]
        if isinstance(config, ast.Name) and ast.unparse(statement.targets[0]) == "Config"
    ]
    return list(dict.fromkeys(_declared(module, configs[0].id)))


def _declared(module: str, config: str) -> Iterator[str]:
    """Settings of the class `config`, of which `module` holds or imports the declaration."""
    for node in _statements(module):
        match node:
            case ast.ImportFrom(module=str(imported), names=names) if config in (each.name for each in names):
                if _lies_here(imported):
                    yield from _declared(imported.rpartition(".")[2], config)
            case ast.ClassDef(name=name, bases=bases, body=body) if name == config:
                for base in reversed(bases):  # as fields are inherited
                    if isinstance(base, ast.Name):
                        yield from _declared(module, base.id)
                for statement in body:
                    match statement:
                        case ast.AnnAssign(target=ast.Name(id=setting), annotation=annotation):
                            if not ast.unparse(annotation).startswith("ClassVar"):
                                yield setting


def _lies_here(module: str) -> bool:
    """Tell whether a module is one of this package's own files, not of a package within it."""
    return module.rpartition(".")[0] == "kvcli.methods"


@cache  # many methods derive from the same few files
def _statements(module: str) -> list[ast.stmt]:
    return ast.parse((resources.files("kvcli.methods") / f"{module}.py").read_bytes()).body
