"""Layers that keep a state: transformers' own modules compute, on states that kvcli holds.

Within `stateful` each such module is given a cache of only its state (`kvcli.models.layers`), by the `States` of the
current run: those of a batch that decodes, or those of prompts that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kvcli.kv.recurrent import RecurrentState
from kvcli.models.checkpoint import quiet
from kvcli.models.layers import StateCache, StateGeometry, cache_argument

Tensors = dict[str, Tensor]


class States(Protocol):
    """The states that a run of the model continues from."""

    def cache(self, layer: int) -> StateCache:
        """Return a module's state, [b, ...] each; the module leaves the new state there."""

    def done(self, layer: int, tokens: int) -> None:
        """Record that a module has read this many tokens."""


class BatchStates(States):
    """States of sequences that are decoded together: rows of one memory, in order, at fixed addresses.

    From then on the sequences' own states are views of it. A sequence may occur several times; its first row counts.
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
        """Restore the states after this context, so that steps can be tried out in it."""
        held = [{name: tensor.clone() for name, tensor in cache.tensors().items()} for cache in self.caches]
        yield
        for cache, tensors in zip(self.caches, held, strict=True):
            for name, tensor in cache.tensors().items():
                tensor.copy_(tensors[name])


@runtime_checkable
class StateTaker(Protocol):
    """A consumer of the states of a prompt: those at its end, and after each of `state_marks` tokens."""

    @property
    def state_marks(self) -> Collection[int]:
        """Numbers of tokens after which it takes states."""

    def take_state(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Take a layer's state after `tokens`; do not keep the tensors."""


def state_takers(consumer: Any) -> list[StateTaker]:
    """Find the takers of states in a consumer: itself, its `states`, or its `consumers`."""
    if isinstance(consumer, StateTaker):
        return [consumer]
    inner = (*getattr(consumer, "consumers", ()), *filter(None, [getattr(consumer, "states", None)]))
    return [taker for each in inner for taker in state_takers(each)]


class PrefillStates(States):
    """States while prompts that begin alike are read: each prompt continues from that of their common part.

    `devices` has that of each layer. A layer reads the common tokens from `skip` on, starting from the state that
    `known` fills in, then each prompt's own, up to the `lengths`, and passes the states to the prompt's takers.
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
        self.parting: Tensors | None = None  # its state where the prompts diverge

    def cache(self, layer: int) -> StateCache:
        """See `States.cache`; a layer begins when the one before has read everything."""
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
        """Keep the state from which further prompts continue."""
        if self.now is not None and 0 < self.at == self.common and len(self.lengths) > 1:
            self.parting = _copied(self.now.tensors())

    def _zeros(self, layer: int) -> Tensors:
        return {
            part.name: torch.zeros(1, *part.shape, dtype=part.dtype, device=self.devices[layer])
            for part in self.layers[layer].tensors
        }


@contextmanager
def stateful(
    keeping: Sequence[tuple[nn.Module, StateGeometry]], current: Callable[[], States | None]
) -> Iterator[None]:
    """Let these modules continue from the `current` states within this context; without states, from nothing."""
    for module, layer in keeping:
        module.forward = _stateful(module.forward, cache_argument(module), layer, current)
    try:
        with quiet() if keeping else nullcontext():  # they say on stderr which packages would make them faster
            yield
    finally:
        for module, _ in keeping:
            del module.forward  # back to the method of the class


def _stateful(
    forward: Callable[..., Any], argument: str, layer: StateGeometry, current: Callable[[], States | None]
) -> Callable[..., Any]:
    taken = signature(forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        states, given = current(), taken.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if states is None:
            return forward(**given)
        given[argument] = cache = states.cache(layer.index)
        name, hidden_states = next(iter(given.items()))  # [b, n, D]
        tokens = hidden_states.shape[1]
        if tokens == 1 or layer.resumes or not cache.started:
            out = forward(**given)
        else:
            parts = torch.split(hidden_states, 1, 1)
            out = torch.cat([_only(forward(**{**given, name: part})) for part in parts], 1)
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
