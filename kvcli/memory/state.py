"""The state of running objects as plain data and bytes, found by walking what they hold; nothing is pickled.

`capture` walks from an object through its attributes: numbers, text, tensors, random generators; lists, tuples, dicts
and deques of these; and further objects. `kvcli.runtime.checkpoint.restoring` walks the same way through an object that
was made afresh with the same settings, and gives it that state. What a fresh object has anyway is not state: functions,
types, frozen dataclasses of more than numbers and text, and classes with `stateless = True`. A class can say more about
its instances:

    not_state       names of attributes that are skipped
    restored()      called at the end, to rebuild what was skipped
    settled()       `Settled` parts of its tensors and lists, which never change again and are written only once

Tensors that share memory share it afterwards. A fresh tensor of the same form is filled in place, so that pinned memory
stays pinned; any other gets memory of the tier that it had.
"""

import copy
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_CONSTANT = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type, frozenset, range)
_CONSTANT += (torch.device, torch.dtype)  # type: ignore[assignment]


class Settled(NamedTuple):
    """The first `stop` entries of a tensor's dimension `dim` never change again; those from `used` on have no meaning.

    The tensor must span its whole memory; if several objects describe one memory, the first one counts. For a list of
    numbers, or of lists of numbers, `dim` is 0.
    """

    what: Tensor | list[Any]
    dim: int
    stop: int
    used: int | None = None
    """None: the same as `stop`."""


class StatePart(NamedTuple):
    """The entries from `start` on of what has this name; for memory without `Settled` parts, all of its bytes."""

    name: str
    start: int
    values: Tensor


@dataclass
class State:
    """The result of `capture`, named by the path from the first object; tensors are on any device, and not copied.

    `tree` is JSON. `added` is what has settled since the given counts, `settled` are the counts now; `changing` is
    everything that does not settle.
    """

    tree: Any
    added: list[StatePart] = field(default_factory=list)
    changing: list[StatePart] = field(default_factory=list)
    settled: dict[str, int] = field(default_factory=dict)


def capture(root: Any, written: Mapping[str, int] | None = None) -> State:
    """Capture the state of an object; of what settles, only the part beyond the counts `written`.

    Raises:
        TypeError: an object is held of which it is unknown whether it is state.
    """
    return _Capture(written or {}).state(root)


BRANCH = "branch"
"""The key in the memo of `copy.deepcopy` that says: of the copy and the original, only one goes on."""


def branched(root: T, kept: dict[Any, Any]) -> T:
    """Copy an object that the copy or the original continues, not both: tensors that settle entry by entry are shared.

    One writes its new entries over those that the other added, which have no meaning by then. `kept` names by identity
    what the copy has in place of an object, as the memo of `copy.deepcopy`.
    """
    memo = {BRANCH: True, **kept}
    tensors, grows = list[Tensor](), dict[int, bool]()  # by address
    for held in _held_by(root, set(kept)):
        if isinstance(held, Tensor):
            tensors.append(held)
            continue
        for what, _, stop, used in held.settled() if hasattr(held, "settled") else ():
            if isinstance(what, Tensor):
                address = what.untyped_storage().data_ptr()
                grows[address] = grows.get(address, True) and used in (None, stop)
    memo |= {id(each): each for each in tensors if grows.get(each.untyped_storage().data_ptr())}
    return copy.deepcopy(root, memo)


def _held_by(root: Any, passed: set[int]) -> Iterator[Any]:
    """Find all tensors and objects that an object holds, except those of these identities and constants."""
    left = [root]
    while left:
        value = left.pop()
        if id(value) in passed or isinstance(value, _CONSTANT):
            continue
        passed.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple | deque):
            left += value
        elif hasattr(value, "__dict__") and not getattr(type(value), "stateless", False):
            yield value
            left += vars(value).values()


class _Capture:
    """One walk, with what is known of each object (by identity) and memory (by address)."""

    def __init__(self, written: Mapping[str, int]) -> None:
        self.written = written
        self.objects: dict[int, int] = {}
        self.settled: dict[int, Settled] = {}  # by address, or by identity of a list
        self.names: dict[int, str] = {}  # of memory, by address
        self.held: list[Any] = []  # keeps objects alive, so that no address is reused
        self.blocks: dict[str, dict[str, Any]] = {}
        self.found = State(None)

    def state(self, root: Any) -> State:
        node = self.node(root, "")
        self.found.tree = {"root": node, "blocks": self.blocks}
        return self.found

    def node(self, value: Any, way: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return {"constant": None} if value.device.type == "meta" else self.tensor(value, way)
        if isinstance(value, torch.Generator):
            return {"generator": self.tensor(value.get_state(), way)}
        if isinstance(value, Future):
            return {"future": self.node(value.result(), way)}
        if isinstance(value, list):
            return self.numbers(value, way) if id(value) in self.settled else {"list": self.nodes(value, way)}
        if isinstance(value, tuple):
            kind = type(value)
            nodes = self.nodes(value, way)
            return (
                {"named": [kind.__module__, kind.__qualname__, nodes]} if hasattr(kind, "_fields") else {"tuple": nodes}
            )
        if isinstance(value, deque):
            return {"deque": [value.maxlen, self.nodes(value, way)]}
        if isinstance(value, dict):
            return {"dict": [[self.node(key, way), self.node(each, f"{way}.{key}")] for key, each in value.items()]}
        return self.object(value, way)

    def nodes(self, values: Iterable[Any], way: str) -> list[Any]:
        return [self.node(value, f"{way}.{at}") for at, value in enumerate(values)]

    def numbers(self, values: list[Any], way: str) -> Any:
        name = way.lstrip(".")
        start = self.written.get(name, 0)
        if new := values[start:]:
            dtype = torch.float64 if isinstance(new[0], float) else torch.int64
            self.found.added.append(StatePart(name, start, torch.tensor(new, dtype=dtype)))
        self.found.settled[name] = len(values)
        return {"numbers": name}

    def object(self, value: Any, way: str) -> Any:
        kind = type(value)
        if is_record(kind):
            values = [getattr(value, each.name) for each in fields(kind)]
            if all(each is None or isinstance(each, bool | int | float | str) for each in values):
                return {"named": [kind.__module__, kind.__qualname__, values]}
            return {"constant": None}
        if isinstance(value, _CONSTANT) or getattr(kind, "stateless", False):
            return {"constant": None}
        if id(value) in self.objects:
            return {"same": self.objects[id(value)]}
        if not hasattr(value, "__dict__"):
            raise TypeError(f"{way.lstrip('.')}: is a {kind.__qualname__} state? If not, name it in `not_state`")
        self.objects[id(value)] = len(self.objects)
        for part in value.settled() if hasattr(value, "settled") else ():
            self.settle(part)
        left = getattr(kind, "not_state", ())
        nodes = {name: self.node(each, f"{way}.{name}") for name, each in vars(value).items() if name not in left}
        return {"object": [kind.__qualname__, nodes]}

    def settle(self, part: Settled) -> None:
        what = part.what
        self.settled.setdefault(what.untyped_storage().data_ptr() if isinstance(what, Tensor) else id(what), part)
        self.held.append(what)

    def tensor(self, value: Tensor, way: str) -> dict[str, Any]:
        memory = value.untyped_storage()
        address = memory.data_ptr() if memory.nbytes() else id(value)
        if address not in self.names:
            self.held.append(value)
            name = self.names[address] = way.lstrip(".")
            tier = "host" if value.device.type == "cpu" else "device"
            self.blocks[name] = {"bytes": memory.nbytes(), "tier": tier}
            if address in self.settled:
                self.part(name, self.settled[address])
            elif memory.nbytes():
                self.found.changing.append(StatePart(name, 0, raw(memory)))
        return {"tensor": [self.names[address], form_of(value)]}

    def part(self, name: str, settled: Settled) -> None:
        """Record memory that is partly settled."""
        what, dim, stop, used = settled
        assert isinstance(what, Tensor)
        assert what.nbytes == self.blocks[name]["bytes"], f"{name}: memory shared with what is not settled"
        self.blocks[name] |= {"dim": dim, "form": form_of(what)}
        self.found.settled[name] = stop
        end = stop if used is None else used
        for parts, first, last in (
            (self.found.added, self.written.get(name, 0), stop),
            (self.found.changing, stop, end),
        ):
            if last > first:
                parts.append(StatePart(name, first, what.narrow(dim, first, last - first)))


def raw(memory: torch.UntypedStorage) -> Tensor:
    """View memory as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def is_record(kind: type) -> bool:
    """Return whether a class is a frozen dataclass."""
    return is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def form_of(tensor: Tensor) -> list[Any]:
    """Return where a tensor lies in its memory: dtype, shape, strides, offset."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]


def view(memory: torch.UntypedStorage, form: list[Any]) -> Tensor:
    """View memory as a tensor of this form."""
    dtype, shape, strides, offset = form
    return torch.empty(0, dtype=getattr(torch, dtype), device=memory.device).set_(memory, offset, shape, strides)
