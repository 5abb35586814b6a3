"""Restore the state that `kvcli.memory.state` captured into objects made afresh."""

import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from kvcli.kv.cache import Tiers
from kvcli.memory.state import StatePart, form_of, is_record, raw, view


class Restoring:
    """Fills an object `root`, made afresh, with the state that `tree` describes: `put` all bytes, then `finish`.

    Raises:
        ValueError: the object does not have the form that the state was captured from.
    """

    def __init__(self, root: Any, tree: Any, tiers: Tiers):
        self._tiers, self._blocks = tiers, tree["blocks"]
        self._objects: list[Any] = []
        self._memory: dict[str, torch.UntypedStorage] = {}
        self._lists: dict[str, list[Any]] = {}
        self._last: list[Callable[[], object]] = []
        with torch.inference_mode(False):  # tensors made here must be writable wherever decoding continues
            self._restore(root, tree["root"])

    def put(self, part: StatePart) -> None:
        """Take a part, in the order in which they were written."""
        name, start, values = part
        if name in self._lists:
            self._lists[name][start:] = values.tolist()
        elif "dim" in (block := self._blocks[name]):
            whole = view(self._memory[name], block["form"])
            whole.narrow(block["dim"], start, values.shape[block["dim"]]).copy_(values)
        else:
            raw(self._memory[name]).copy_(values)

    def finish(self) -> None:
        """Restore what had to wait for the bytes."""
        for call in self._last:
            call()

    def _restore(self, fresh: Any, node: Any) -> Any:
        """Make the value of a node, in place of the `fresh` one if there is one."""
        if not isinstance(node, dict):
            return node
        ((kind, value),) = node.items()
        return getattr(self, f"_{kind}")(fresh, value)

    def _constant(self, fresh: Any, value: None) -> Any:  # noqa: ARG002
        return fresh

    def _same(self, fresh: Any, number: int) -> Any:  # noqa: ARG002
        return self._objects[number]

    def _list(self, fresh: Any, values: list[Any]) -> list[Any]:
        old = fresh if isinstance(fresh, list) else []
        new = [self._restore(old[at] if at < len(old) else None, value) for at, value in enumerate(values)]
        if not isinstance(fresh, list):
            return new
        fresh[:] = new
        return fresh

    def _tuple(self, fresh: Any, values: list[Any]) -> tuple[Any, ...]:
        old = fresh if isinstance(fresh, tuple) and len(fresh) == len(values) else (None,) * len(values)
        return tuple(map(self._restore, old, values))

    def _named(self, fresh: Any, value: list[Any]) -> Any:
        module, name, values = value
        made = getattr(sys.modules.get(module), name, None)
        if not (isinstance(made, type) and (is_record(made) or (issubclass(made, tuple) and hasattr(made, "_fields")))):
            raise ValueError(f"no named tuple or frozen dataclass {module}.{name}")
        return made(*self._tuple(fresh, values))

    def _deque(self, fresh: Any, value: list[Any]) -> deque[Any]:  # noqa: ARG002
        most, values = value
        return deque((self._restore(None, each) for each in values), most)

    def _dict(self, fresh: Any, items: list[Any]) -> dict[Any, Any]:
        made = fresh if isinstance(fresh, dict) else {}
        new = {self._restore(None, key): value for key, value in items}
        for key in [key for key in made if key not in new]:
            del made[key]
        for key, value in new.items():
            made[key] = self._restore(made.get(key), value)
        return made

    def _object(self, fresh: Any, value: list[Any]) -> Any:
        name, attributes = value
        if type(fresh).__qualname__ != name:
            raise ValueError(f"a {type(fresh).__qualname__} in the place of a {name}")
        missing = vars(fresh).keys() - getattr(type(fresh), "not_state", ()) ^ attributes.keys()
        if any(attribute in vars(fresh) or not hasattr(fresh, attribute) for attribute in missing):
            raise ValueError(f"a {name} of other attributes: {', '.join(sorted(missing))}")
        self._objects.append(fresh)
        for attribute, node in attributes.items():
            setattr(fresh, attribute, self._restore(getattr(fresh, attribute, None), node))
        if hasattr(fresh, "restored"):
            self._last.append(fresh.restored)
        return fresh

    def _future(self, fresh: Any, node: Any) -> Future[Any]:
        old = fresh.result() if isinstance(fresh, Future) else None
        if (new := self._restore(old, node)) is old and isinstance(fresh, Future):
            return fresh
        future: Future[Any] = Future()
        future.set_result(new)
        return future

    def _generator(self, fresh: torch.Generator, node: Any) -> torch.Generator:
        state = self._restore(None, node)
        self._last.append(lambda: fresh.set_state(state))
        return fresh

    def _numbers(self, fresh: list[Any], name: str) -> list[Any]:
        self._lists[name] = fresh
        fresh.clear()
        return fresh

    def _tensor(self, fresh: Any, value: list[Any]) -> Tensor:
        name, form = value
        if isinstance(fresh, Tensor) and (form_of(fresh)[0], fresh.ndim) != (form[0], len(form[1])):
            raise ValueError(
                f"{form[0]} of {len(form[1])} dimensions in the place of {form_of(fresh)[0]} of {fresh.ndim}"
            )
        here = isinstance(fresh, Tensor) and fresh.device.type != "meta" and form_of(fresh) == form
        if name not in self._memory:
            block = self._blocks[name]
            if here and fresh.untyped_storage().nbytes() == block["bytes"]:
                self._memory[name] = fresh.untyped_storage()
            else:
                self._memory[name] = _allocate(block["bytes"], block["tier"], self._tiers)
        memory = self._memory[name]
        return fresh if here and fresh.untyped_storage().data_ptr() == memory.data_ptr() else view(memory, form)


def _allocate(size: int, tier: str, tiers: Tiers) -> torch.UntypedStorage:
    """Allocate bytes in a tier; host memory is allocated as for pages, pinned for CUDA."""
    if tier == "host" and tiers.pinned is not None:
        return tiers.pinned.allocate((size,), torch.uint8).result().untyped_storage()
    return torch.empty(size, dtype=torch.uint8, device="cpu" if tier == "host" else tiers.device).untyped_storage()
