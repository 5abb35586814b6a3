"""Recurrent and convolutional state: fixed-size tensors on the device, for one sequence.

Such a state covers all tokens up to one, and cannot be taken back to an earlier one. Where KV is kept for later
prompts, saved or between the turns of a chat, states after some of its tokens (`state_marks`) are kept with it; another
prompt can go on only from there.
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
"""Tokens in a page of KV that is kept for later prompts; these go on from whole pages."""

STATE_PAGES = 256
"""Pages from one kept state to the next: 8,192 tokens."""

_BEFORE_END = 4  # pages: methods need the last queries of a prompt, even if all of it was kept


class RecurrentState:
    """The state of one sequence, each layer's on its device: `layers` has the tensors of each by name.

    `started` tells whether any token was read. While sequences step together, their tensors are rows of shared tensors
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
        """Numbers of prompt tokens after which states are wanted, besides the end."""
        return ()

    def take_state(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        """Copy a layer's state after all of a prompt's tokens."""
        for name, tensor in self.layers[layer].items():
            tensor.copy_(tensors[name])
        self.started = True

    def footprints(self) -> list[Footprint]:
        """Count the bytes held for each layer."""
        return [Footprint(device=nbytes(*tensors.values())) for tensors in self.layers]

    def __deepcopy__(self, memo: dict[int, Any]) -> RecurrentState:
        """Copy this sequence's rows only."""
        copied = copy.copy(self)
        copied.layers = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in self.layers]
        return copied


class KeptStates:
    """States in host memory after some of the tokens read: `kept` by number of tokens, layer and name.

    `tokens` is the length of the prompt. States after at most `shared` tokens are taken over from `before`.
    """

    def __init__(self, layers: Sequence[StateGeometry], tokens: int, before: KeptStates | None = None, shared: int = 0):
        self.layers, self.state_marks = layers, state_marks(layers, tokens)
        kept: Mapping[int, dict[int, dict[str, Tensor]]] = {} if before is None else before.kept
        regular = PAGE * STATE_PAGES  # the ends of earlier prompts are dropped
        self.kept: dict[int, dict[int, dict[str, Tensor]]] = {}
        self.kept |= {at: states for at, states in kept.items() if at == shared or (at < shared and at % regular == 0)}

    def take_state(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy a layer's state, if it is to be kept after so many tokens."""
        if tokens in self.state_marks:
            copied = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            self.kept.setdefault(tokens, {})[layer] = copied

    def fill(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy a layer's state after `tokens` tokens, a result of `cut`, to its tensors."""
        for name, tensor in self.kept[tokens][layer].items():
            tensors[name].copy_(tensor)

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Iterate over the kept states, layer by layer: layer, number of tokens, and tensors."""
        for layer in self.layers:
            for at, states in sorted(self.kept.items()):
                yield layer.index, at, states[layer.index]

    def cut(self, limit: int) -> int:
        """Return after how many tokens, at most `limit`, another prompt can go on: whole pages with all states kept."""
        return cut_at([*self.kept], limit) if self.layers else limit // PAGE * PAGE

    def footprint(self) -> Footprint:
        """Count the bytes held."""
        held = (tensors for states in self.kept.values() for tensors in states.values())
        return Footprint(host=sum(nbytes(*tensors.values()) for tensors in held))


def state_marks(layers: Sequence[StateGeometry], tokens: int) -> list[int]:
    """Return after how many prompt tokens states are kept: every `STATE_PAGES` pages, and four pages before the end.

    If a layer cannot process several tokens from a state, only the latter: it reads what follows token by token.
    """
    last = max(0, tokens // PAGE - _BEFORE_END) * PAGE
    if not layers or not last:
        return []
    step = PAGE * STATE_PAGES
    return [*(range(step, last, step) if all(layer.resumes for layer in layers) else ()), last]


def cut_at(marks: Sequence[int], limit: int) -> int:
    """Return the last of the marks that does not exceed `limit`; 0 without any."""
    return max((mark for mark in marks if mark <= limit), default=0)
