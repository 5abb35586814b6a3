"""What a method says of itself, read from its file without running it, so that a listing need not wait for torch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kvcli.methods import get_method, own_method_names

MEMORY_SYMBOLS = {
    "L": "tokens so far",
    "g": "generated ones of them",
    "k": "those kept of the prompt",
    "B": "budget",
    "W": "recent window",
    "p": "tokens in a page, block, chunk or group",
    "r": "rank of the keys",
    "w": "width of a layer's keys, KV heads times head_dim",
    "s": "part of the KV heads that keep everything",
    "n": "layers",
}
"""What the letters in `Method.device_memory` stand for."""

LEGEND = {
    "long generation": "generated tokens are treated like the prompt's, however many there are",
    "offload": "KV lies in host memory",
    "group-consistent": "as published, all query heads of a KV head read the same KV; pooled: kvcli sees to it by "
    "pooling their scores",
    "device memory": "KV on the device for each layer, in tokens: "
    + ", ".join(f"{letter} {meaning}" for letter, meaning in MEMORY_SYMBOLS.items()),
}
"""Heads of the capabilities in a table, and what they mean; all with default settings."""


@dataclass(frozen=True)
class Card:
    """The class attributes of the same names (see `Method`), as they are with the method's default settings."""

    title: str
    paper: str
    long_generation: bool
    offloads: bool
    group_consistent: bool
    device_memory: str

    @property
    def capabilities(self) -> tuple[str, str, str, str]:
        """Cells of a table under the heads of `LEGEND`."""
        pooled = "yes" if self.group_consistent else "pooled"
        return ("yes" if self.long_generation else "no", "yes" if self.offloads else "no", pooled, self.device_memory)


def read_card(name: str) -> Card:
    """Find what the method called `name` states; what it leaves out is that of the method that it derives from.

    A method of another package is imported for it.

    Raises:
        KvcliError: it cannot be imported.
    """
    if name in own_method_names():
        return Card(**_stated(name))
    method = get_method(name)
    return Card(**{field: getattr(method, field) for field in Card.__dataclass_fields__})


def _stated(module: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in ast.parse((resources.files("kvcli.methods") / f"{module}.py").read_bytes()).body:
        match node:
            case ast.ImportFrom(module=str(imported)) if imported.startswith("kvcli.methods."):
                found |= _stated(imported.rpartition(".")[2])
            case ast.ClassDef(body=body):
                for statement in body:
                    match statement:
                        case ast.Assign(targets=[ast.Name(id=attribute)], value=ast.Constant(value=value)):
                            if attribute in Card.__dataclass_fields__:
                                found[attribute] = value
    return found
