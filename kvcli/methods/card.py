"""Cards of methods: what a method states, read from its file without running it, so that listings need no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from kvcli.methods import get_method, home_of, own_method_names

if TYPE_CHECKING:
    from kvcli.methods.config import MethodConfig
    from kvcli.methods.contract import AnyMethod


MEMORY_SYMBOLS = {
    "L": "tokens so far",
    "g": "generated ones of them",
    "k": "those kept of the prompt",
    "B": "budget",
    "W": "recent window",
    "p": "tokens in a page, block, chunk, group, cluster or shortest event",
    "r": "rank of the keys",
    "w": "width of a layer's keys, KV heads times head_dim",
    "s": "part of the KV heads that keep everything",
    "n": "layers",
}
"""The letters in `Method.device_memory`."""

LEGEND = {
    "long generation": "generated tokens are treated like the prompt's, however many there are",
    "offload": "KV lies in host memory",
    "group-consistent": "as published, all query heads of a KV head read the same KV; pooled: kvcli sees to it by "
    "pooling their scores, or reads what any of them chose",
    "GPU step": "what runs a step on a GPU: graph, one CUDA graph of all of it; piecewise, graphs of what lies between "
    "the attention of two layers; blocking, phase after phase",
    "device memory": "KV on the device for each layer, in tokens: "
    + ", ".join(f"{letter} {meaning}" for letter, meaning in MEMORY_SYMBOLS.items()),
}
"""Column heads of the table of capabilities, and their meaning; all with default settings."""


NEEDS = {
    "A document larger than the device, short answers": "`retroinfer`; with less on the device `freekv`",
    "A short question, a long chain of thought": "`freekv`; `raas`",
    "A slow bus between host and device": "`shadowkv`",
    "KV fits the device, but a step should read less of it": "`quest`, `twilight`; `fier`, `loki`, `tokenselect`",
    "A prompt longer than the model was trained for": "`infllm`, `actqkv`, `q_llm`, `em_llm`",
    "The smallest memory": "`cake`, `snapkv`; for several questions `kvzip`",
    "A stream of which only the end matters": "`streaming`",
    "The exact reference": "`full`; `offload` where KV does not fit the device",
}
"""What somebody may need, with the methods that serve it; names as in Markdown."""


@dataclass(frozen=True)
class Card:
    """The class attributes of the same names (see `Method`), with the method's default settings.

    `gpu_step` is the result of `gpu_step_of`.
    """

    title: str
    paper: str
    long_generation: bool
    offloads: bool
    group_consistent: bool
    device_memory: str
    gpu_step: str

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Cells of a table row under the heads of `LEGEND`."""
        pooled = "yes" if self.group_consistent else "pooled"
        offloads = "yes" if self.offloads else "no"
        return "yes" if self.long_generation else "no", offloads, pooled, self.gpu_step, self.device_memory


STATED = [field for field in Card.__dataclass_fields__ if field != "gpu_step"]
"""What a method states by class attributes."""

GRAPH, PIECEWISE, BLOCKING = "graph", "piecewise", "blocking"
LAUNCHED = "launched"  # a graph or pieces that cannot be captured run kernel by kernel; no method states this


def gpu_step_of(method: type[AnyMethod], config: MethodConfig | AnyMethod) -> str:
    """Return what runs a step of a method with these settings on a GPU (see `LEGEND`); or of a sequence's method.

    A graph if the method has a `step_plan` of its own; phase after phase if it listens between the layers, or if the
    sequence's model looks at numbers to select.
    """
    from kvcli.methods.contract import Method

    if method.step_plan is not Method.step_plan and config.stays_in_place:
        return GRAPH
    looks = isinstance(config, Method) and config.selects_alone
    return BLOCKING if method.wants_next_query or looks else PIECEWISE


def read_card(name: str) -> Card:
    """Return what the method called `name` states; the rest comes from the method that it derives from.

    A method of another package is imported.

    Raises:
        KvcliError: it cannot be imported.
    """
    if name in own_method_names():
        found = _classes(home := home_of(name)).values()
        (names,) = [each.names for each in found if each.module == home and "title" in each.names]
        gpu_step = GRAPH if "step_plan" in names else BLOCKING if "wants_next_query" in names else PIECEWISE
        return Card(**{field: names[field] for field in STATED}, gpu_step=gpu_step)
    method = get_method(name)
    return Card(**{field: getattr(method, field) for field in STATED}, gpu_step=gpu_step_of(method, method.Config()))


def setting_names(name: str) -> list[str]:
    """List the settings of the method called `name`, shared ones first; imports it like `read_card`."""
    if name in own_method_names():
        return list(dict.fromkeys(_settings(home_of(name))))
    return list(get_method(name).Config.model_fields)


@dataclass(frozen=True)
class ClassSource:
    """The names that a class and its bases define, except the contract's: values of literals, otherwise None."""

    module: str
    names: dict[str, Any]


@cache
def _classes(module: str) -> dict[str, ClassSource]:
    """Return, by name, the classes that a module of `kvcli.methods` defines or imports from another one."""
    known: dict[str, ClassSource] = {}
    for node in _statements(module):
        match node:
            case ast.ImportFrom(module=str(imported), names=names) if (other := _of_a_method(imported)) is not None:
                there = _classes(other)
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


def _settings(module: str) -> Iterator[str]:
    """List the settings of the method that `module` holds, shared ones first."""
    for node in _statements(module):
        for statement in node.body if isinstance(node, ast.ClassDef) else ():
            match statement:
                case ast.Assign(targets=[ast.Name(id="Config")], value=ast.Name(id=config)):
                    yield from _declared(module, config)


def _declared(module: str, config: str) -> Iterator[str]:
    """List the settings of the class `config`, which `module` declares or imports."""
    for node in _statements(module):
        match node:
            case ast.ImportFrom(module=str(imported), names=names) if config in (each.name for each in names):
                if (other := _of_a_method(imported)) is not None:
                    yield from _declared(other, config)
            case ast.ClassDef(name=name, bases=bases, body=body) if name == config:
                for base in reversed(bases):  # the order in which fields are inherited
                    if isinstance(base, ast.Name):
                        yield from _declared(module, base.id)
                for statement in body:
                    match statement:
                        case ast.AnnAssign(target=ast.Name(id=setting), annotation=annotation):
                            if not ast.unparse(annotation).startswith("ClassVar"):
                                yield setting


def _of_a_method(module: str) -> str | None:
    """Strip `kvcli.methods.`; return None for folders, modules elsewhere, and the contract, which states nothing."""
    package, _, name = module.partition("kvcli.methods.")
    return None if package or name in ("", "contract", "step") or home_of(name) != name else name


@cache  # many methods derive from the same few files
def _statements(module: str) -> list[ast.stmt]:
    file = resources.files("kvcli.methods").joinpath(*f"{module.replace('.', '/')}.py".split("/"))
    return ast.parse(file.read_bytes()).body
