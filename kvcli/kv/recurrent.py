"""What layers with a recurrence or a convolution keep of one sequence: a state of fixed size, on the device.

Such a state is of all tokens up to one, and cannot be taken back to an earlier one. Where KV is kept for later prompts,
saved or between the turns of a chat, states are kept beside it after some of its tokens, `state_marks`; only there can
another prompt go on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from kvcli.kv.cache import Tiers
from kvcli.memory.tiers import Footprint, nbytes
from kvcli.models.layers import StateGeometry

PAGE = 32
"""Tokens of a page of KV that is kept for later prompts, which can go on from whole pages of it."""

STATE_PAGES = 256
"""Pages from one kept state to the next one: 8,192 tokens."""

_BEFORE_END = 4  # pages: methods want to see the last queries of a prompt that begins with what was kept


class RecurrentState:
    """The state of one sequence, each layer's in its memory: `layers` has the tensors of each by their names.

    `started` says whether any token was read. While sequences take steps together, their tensors are rows of one memory
    (`kvcli.runtime.recurrent`).
    """

    def __init__(self, layers: Sequence[StateGeometry], tiers: Sequence[Tiers]):
        self.layers = [
            {part.name: its.on_device(*part.shape, dtype=part.dtype).zero_() for part in layer.tensors}
            for layer, its in zip(layers, tiers, strict=True)
        ]
        self.started = False

    @property
    def state_marks(self) -> Sequence[int]:
        """After which tokens of a prompt states are wanted, beside those at its end."""
        return ()

    def take_state(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        """Copy a layer's state after all of a prompt's tokens."""
        for name, tensor in self.layers[layer].items():
            tensor.copy_(tensors[name])
        self.started = True

    def footprints(self) -> list[Footprint]:
        """Count the bytes held of each layer."""
        return [Footprint(device=nbytes(*tensors.values())) for tensors in self.layers]

    def __deepcopy__(self, memo: dict[int, Any]) -> RecurrentState:
        """A copy holds its own rows alone."""
        copied = copy.copy(self)
        copied.layers = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in self.layers]
        return copied


class KeptStates:
    """States after some of the tokens that are read, in host memory: by those, a layer's tensors by their names.

    `tokens` are those of the prompt. Those after `shared` tokens at most are the ones of `before`.
    """

    def __init__(self, layers: Sequence[StateGeometry], tokens: int, before: KeptStates | None = None, shared: int = 0):
        self.layers, self.state_marks = layers, state_marks(layers, tokens)
        kept: Mapping[int, dict[int, dict[str, Tensor]]] = {} if before is None else before.kept
        regular = PAGE * STATE_PAGES  # the ends of earlier prompts are not kept for ever
        self.kept: dict[int, dict[int, dict[str, Tensor]]] = {}
        self.kept |= {at: states for at, states in kept.items() if at == shared or (at < shared and at % regular == 0)}

    def take_state(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy a layer's state, if it is to be kept after so many tokens."""
        if tokens in self.state_marks:
            copied = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            self.kept.setdefault(tokens, {})[layer] = copied

    def fill(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Put a layer's state after so many tokens, one of those that `cut` gives, into its tensors."""
        for name, tensor in self.kept[tokens][layer].items():
            tensors[name].copy_(tensor)

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Give all that is kept, layer by layer: the layer, after how many tokens, and the tensors."""
        for layer in self.layers:
            for at, states in sorted(self.kept.items()):
                yield layer.index, at, states[layer.index]

    def cut(self, limit: int) -> int:
        """After how many tokens, `limit` at most, another prompt can go on: whole pages, where all states are kept."""
        return cut_at([*self.kept], limit) if self.layers else limit // PAGE * PAGE

    def footprint(self) -> Footprint:
        """Count the bytes held."""
        held = (tensors for states in self.kept.values() for tensors in states.values())
        return Footprint(host=sum(nbytes(*tensors.values()) for tensors in held))


def state_marks(layers: Sequence[StateGeometry], tokens: int) -> list[int]:
    """After how many of a prompt's tokens states are kept: after every `STATE_PAGES` pages, and four before the end.

    Where a layer cannot take several tokens on from a state, only there: it reads what follows token by token.
    """
    last = max(0, tokens // PAGE - _BEFORE_END) * PAGE
    if not layers or not last:
        return []
    step = PAGE * STATE_PAGES
    return [*(range(step, last, step) if all(layer.resumes for layer in layers) else ()), last]


def cut_at(marks: Sequence[int], limit: int) -> int:
    """The last of the marks that is not beyond a limit; 0 where there is none."""
    return max((mark for mark in marks if mark <= limit), default=0)
