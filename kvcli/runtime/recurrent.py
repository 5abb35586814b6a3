"""Layers that keep a state: transformers' own modules compute, on states that are ours.

Inside `stateful` each such module is given a cache of its state alone (`kvcli.models.layers`), by the `States` of
the current run: those of a batch that decodes, or those of prompts that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kvcli.kv.recurrent import RecurrentState
from kvcli.models.checkpoint import quiet
from kvcli.models.layers import StateCache, StateGeometry, cache_argument

Tensors = dict[str, Tensor]


class States(Protocol):
    """The states that a run of the model goes on from."""

    def cache(self, layer: int) -> StateCache:
        """Give a module its state, [b, ...] each; what it leaves there is the new one."""

    def done(self, layer: int, tokens: int) -> None:
        """Say that a module has read so many tokens."""


class BatchStates(States):
    """States of sequences that go on together: rows of one memory, in their order, at addresses that stay.

    From then on the sequences' own are views of it. A sequence may stand there several times; what counts for it is its
    first row.
    """

    def __init__(self, layers: Sequence[StateGeometry], rows: Sequence[RecurrentState]):
        self.rows, self.caches = list(rows), list[StateCache]()
        for layer in layers:
            parts = [row.layers[layer.index] for row in rows]
            whole = {name: _stacked([part[name] for part in parts]) for name in parts[0]}
            for at, row in reversed(list(enumerate(rows))):
                row.layers[layer.index] = {name: tensor[at] for name, tensor in whole.items()}
            self.caches.append(StateCache(layer.number, whole, rows[0].started))

    def of(self, rows: Sequence[RecurrentState]) -> bool:
        """Tell whether these are the states of exactly these sequences."""
        return len(rows) == len(self.rows) and all(a is b for a, b in zip(rows, self.rows, strict=True))

    def cache(self, layer: int) -> StateCache:
        """See `States.cache`."""
        return self.caches[layer]

    def done(self, layer: int, tokens: int) -> None:
        """See `States.done`."""

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Inside, steps can be tried out; afterwards the states are as they were."""
        held = [{name: tensor.clone() for name, tensor in cache.tensors().items()} for cache in self.caches]
        yield
        for cache, tensors in zip(self.caches, held, strict=True):
            for name, tensor in cache.tensors().items():
                tensor.copy_(tensors[name])


@runtime_checkable
class StateTaker(Protocol):
    """Who wants the states of a prompt that is read: those at its end, and after each of `state_marks` tokens."""

    @property
    def state_marks(self) -> Collection[int]:
        """After how many tokens."""

    def take_state(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Take a layer's state after so many tokens; not to be kept."""


def state_takers(consumer: Any) -> list[StateTaker]:
    """Who of those that a prompt is handed to wants states: `consumer` itself, its `states`, or its `consumers`."""
    if isinstance(consumer, StateTaker):
        return [consumer]
    inner = (*getattr(consumer, "consumers", ()), *filter(None, [getattr(consumer, "states", None)]))
    return [taker for each in inner for taker in state_takers(each)]


class PrefillStates(States):
    """States while prompts that begin alike are read: each prompt goes on from that of their common part.

    `devices` has that of each layer. A layer reads the common tokens from `skip` on, beginning with what `known` puts
    into the state, then each prompt's own, up to the `lengths`, and hands the states over to the prompt's takers.
    """

    def __init__(
        self,
        layers: Sequence[StateGeometry],
        devices: Sequence[torch.device],
        takers: Sequence[Sequence[StateTaker]],
        common: int,
        lengths: Sequence[int],
        skip: int = 0,
        known: Callable[[int, int, Tensors], None] | None = None,
    ):
        self.layers, self.devices, self.takers = layers, devices, takers
        self.common, self.lengths, self.skip, self.known = common, lengths, skip, known
        self.branch, self.at = 0, 0
        self.now: StateCache | None = None  # of the layer that reads
        self.parting: Tensors | None = None  # its state where the prompts part

    def cache(self, layer: int) -> StateCache:
        """See `States.cache`; a layer begins where the one before has read all."""
        if self.now is None:
            tensors = self._zeros(layer)
            if self.skip:
                assert self.known is not None
                self.known(layer, self.skip, {name: tensor[0] for name, tensor in tensors.items()})
            self.now = StateCache(self.layers[layer].number, tensors, started=self.skip > 0)
            self.at, self.branch = self.skip, 0
            self._part()
        return self.now

    def done(self, layer: int, tokens: int) -> None:
        """See `States.done`."""
        assert self.now is not None
        self.at += tokens
        ended = self.at == self.lengths[self.branch]
        takers = [each for row in self.takers for each in row] if self.at <= self.common else self.takers[self.branch]
        state = {name: tensor[0] for name, tensor in self.now.tensors().items()}
        for taker in takers:
            if ended or self.at in taker.state_marks:
                taker.take_state(layer, self.at, state)
        self._part()
        if not ended:
            return
        self.branch += 1
        if self.branch == len(self.lengths):
            self.now = self.parting = None
        else:
            self.at = self.common
            tensors = self._zeros(layer) if self.parting is None else _copied(self.parting)
            self.now = StateCache(self.layers[layer].number, tensors, started=self.parting is not None)

    def _part(self) -> None:
        """Keep the state where further prompts go on from it."""
        if self.now is not None and 0 < self.at == self.common and len(self.lengths) > 1:
            self.parting = _copied(self.now.tensors())

    def _zeros(self, layer: int) -> Tensors:
        return {
            part.name: torch.zeros(1, *part.shape, dtype=part.dtype, device=self.devices[layer])
            for part in self.layers[layer].tensors
        }


@contextmanager
def stateful(
    modules: Sequence[nn.Module], layers: Sequence[StateGeometry], current: Callable[[], States | None]
) -> Iterator[None]:
    """Inside, these modules go on from the `current` states; where there are none, they know of no tokens before."""
    for module, layer in zip(modules, layers, strict=True):
        module.forward = _stateful(module.forward, cache_argument(module), layer, current)
    try:
        with quiet() if modules else nullcontext():  # they say on stderr which packages would make them faster
            yield
    finally:
        for module in modules:
            del module.forward  # back to the method of the class


def _stateful(
    forward: Callable[..., Any], argument: str, layer: StateGeometry, current: Callable[[], States | None]
) -> Callable[..., Any]:
    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:  # hidden_states [b, n, D]
        states, tokens = current(), hidden_states.shape[1]
        if states is None:
            return forward(hidden_states, *args, **kwargs)
        kwargs[argument] = cache = states.cache(layer.index)
        if tokens == 1 or layer.resumes or not cache.started:
            out = forward(hidden_states, *args, **kwargs)
        else:
            out = torch.cat([_only(forward(each, *args, **kwargs)) for each in torch.split(hidden_states, 1, 1)], 1)
        cache.started = True
        states.done(layer.index, tokens)
        return out

    undisturbed: Callable[..., Any] = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return undisturbed


def _only(out: Any) -> Tensor:
    assert isinstance(out, Tensor), "a module that reads token by token gives its output alone"
    return out


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))


def _copied(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}
