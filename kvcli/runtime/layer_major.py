"""Run a model layer by layer: each decoder layer over the whole input, part by part, before the next one begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.kernels.softmax import Softmax
from kvcli.memory.host_pool import PIECE_BYTES
from kvcli.memory.tiers import Tiers
from kvcli.models.auto import layers_of, rotary_of
from kvcli.models.geometry import ModelGeometry
from kvcli.models.rope import Rope
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.gpu.recorder import Point, Streams, streams_for
from kvcli.runtime.own_selection import cut, joined

# The hidden states of prompts between the layers: on the device, or in host memory beyond a size.

STREAMED_BYTES = 1 << 30
"""Bytes from which hidden states lie in host memory on a GPU: about 128K tokens of an 8B model."""

CHUNKS_ON_DEVICE = 4
"""Chunks of streamed hidden states on the device: one before and one after its layer, one arriving and one leaving."""


def streamed(geometry: ModelGeometry, tokens: int, itemsize: int, device: torch.device) -> bool:
    """Tell whether the hidden states of `tokens` pass through the device by chunks.

    They cannot if layers with a state read a prompt in one piece, if the model makes more of a token than its hidden
    state before the first layer, or if all tokens have to leave the last.
    """
    large = tokens * geometry.streams * geometry.hidden_size * itemsize >= STREAMED_BYTES
    apart = not (geometry.beside_hidden or geometry.reshapes) and all(state.resumes for state in geometry.states)
    return device.type == "cuda" and large and apart


class ResidentHiddenStates:
    """Hidden states [1, n, D] on the device, which layers overwrite part by part.

    A model may have several of a token: [s, 1, n, D] or [1, n, s, D].
    """

    def __init__(self, hidden: Tensor):
        self.hidden = hidden

    def read(self, part: slice) -> Tensor:
        """Return a view of a part [1, m, D]."""
        return self._at(part)

    def write(self, part: slice, out: Tensor) -> None:
        """Store a layer's output for a part."""
        self._at(part).copy_(out)

    def _at(self, part: slice) -> Tensor:
        return self.hidden.narrow(_token_axis(self.hidden), part.start, part.stop - part.start)


def _token_axis(hidden: Tensor) -> int:
    """Return the axis of tokens, which follows that of the single sequence."""
    return 1 if hidden.shape[0] == 1 else 2


class StreamedHiddenStates:
    """Hidden states of n tokens in host memory, cut into `parts`, which each layer reads in turn, on its device.

    The first layer gets the result of `embed` for a part's tokens, [1, m, D]. `devices` has the device of every layer.

    Raises:
        KvcliError: on reading and writing, if the system does not pin that memory (will not fit).
    """

    def __init__(
        self,
        parts: Sequence[slice],
        embed: Callable[[slice], Tensor],
        devices: Sequence[torch.device],
        streams: Streams | None = None,
    ):
        self.parts, self.embed, self.devices = list(parts), embed, devices
        self.place = {part.start: at for at, part in enumerate(self.parts)}
        self.streams = {device: streams or streams_for(device) for device in dict.fromkeys(devices)}
        self.read_so_far = 0  # parts, of all layers
        self._written: dict[int, Point] = {}  # when each part of the latest layer is there
        self._host: list[tuple[Future[Tensor], slice]] = []  # memory of each part, and its rows there
        self._arriving: deque[tuple[int, Tensor, Point]] = deque()
        self._leaving: deque[tuple[Tensor, Streams, Point]] = deque()

    def read(self, part: slice) -> Tensor:
        """Return a part [1, m, D], and start to fetch the next one."""
        at, number = self.place[part.start], self.read_so_far
        self.read_so_far += 1
        if number < len(self.parts):
            return self.embed(part)
        if not self._arriving:
            self._fetch(number)
        found, hidden, arrived = self._arriving.popleft()
        assert found == at, f"part {at} is read after part {found - 1}"
        self._at(number)[1].wait(arrived)
        if len(self.parts) > 1:  # the next layer's first part follows this layer's last; a single part is not there yet
            self._fetch(number + 1)
        return hidden

    def write(self, part: slice, out: Tensor) -> None:
        """Send a layer's output for a part [1, m, D] to the host."""
        at, streams = self.place[part.start], self._at(self.read_so_far - 1)[1]
        host = self._memory(at, out)
        while self._leaving:  # frees device memory for work that comes after the copy
            _, theirs, left = self._leaving.popleft()
            theirs.wait(left)
        left = self._written[at] = streams.submit("hidden states", partial(_copy, host, out[0]), [streams.mark()])
        self._leaving.append((out, streams, left))

    def close(self) -> None:
        """Make the device wait for all copies, and release the memory."""
        for streams in self.streams.values():
            streams.join()
        for held in (self._host, self._arriving, self._leaving):
            held.clear()

    def _at(self, number: int) -> tuple[torch.device, Streams]:
        """Return the device of the layer that reads part `number`, counted from the first read, and its streams."""
        device = self.devices[min(number // len(self.parts), len(self.devices) - 1)]
        return device, self.streams[device]

    def _fetch(self, number: int) -> None:
        """Start to bring a part to its layer's device, once the work submitted so far is done."""
        at, (device, streams) = number % len(self.parts), self._at(number)
        pinned = self._rows(at)
        target = torch.empty_like(pinned, device=device)
        work = partial(_copy, target, pinned)
        arrived = streams.submit("hidden states", work, [streams.mark(), self._written[at]])
        self._arriving.append((at, target[None], arrived))

    def _memory(self, at: int, like: Tensor) -> Tensor:
        """Return a part's rows; the first layer allocates memory for all rows like those of `like` [1, m, ..]."""
        if not self._host:
            tiers, width = Tiers.for_device(like.device, like.dtype), like.shape[2:]
            most = max(1, PIECE_BYTES // (width.numel() * like.dtype.itemsize))
            for parts in _gathered(self.parts, most):
                begin, end = parts[0].start, parts[-1].stop
                memory = tiers.on_host_async(end - begin, *width, urgent=True)
                self._host += [(memory, slice(part.start - begin, part.stop - begin)) for part in parts]
        return self._rows(at)

    def _rows(self, at: int) -> Tensor:
        memory, rows = self._host[at]
        return memory.result()[rows]


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _gathered(parts: Sequence[slice], most: int) -> Iterator[list[slice]]:
    """Group consecutive parts of at most `most` tokens in all, or a single part."""
    some = [parts[0]]
    for part in parts[1:]:
        if part.stop - some[0].start > most:
            yield some
            some = []
        some.append(part)
    yield some


class _EmbeddedError(Exception):
    """Leaves a model before its first layer, with that layer's input."""

    def __init__(self, hidden: Tensor):
        super().__init__("not an error: the model is left here")
        self.hidden = hidden


def embedded_part(hook: Hook, tokens: Tensor, positions: Tensor, part: slice) -> Tensor:
    """Return the first decoder layer's input for a part of tokens [1, n] at positions [1, n]: [1, m, D]."""
    tokens, positions = tokens[:, part], positions[:, part]
    with _leaving_at(layers_of(hook.model)[0]):
        try:
            hook.run(_no_attention, tokens, positions)
        except _EmbeddedError as found:
            return found.hidden
    raise RuntimeError("the model never called its first layer")


def _no_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:  # noqa: ARG001
    raise RuntimeError(f"layer {layer} attended before the first one")


@contextmanager
def _leaving_at(layer: nn.Module) -> Iterator[None]:
    def leave(hidden_states: Tensor, *_: object, **__: object) -> None:
        raise _EmbeddedError(hidden_states)

    before = vars(layer).get("forward")
    layer.forward = leave
    try:
        yield
    finally:
        if before is None:
            del layer.forward  # back to the method of the class
        else:
            layer.forward = before


def chunk_length(device: torch.device) -> int:
    """Tokens of a chunk: enough for full-speed matrix products, few enough to keep the widest intermediate small."""
    return 4096 if device.type == "cuda" else 1024


@contextmanager
def layer_major(
    hook: Hook,
    parts: Sequence[Sequence[slice]],
    last: Sequence[int] | None,
    advance: Callable[[int], None],
    streamed: StreamedHiddenStates | None = None,
) -> Iterator[None]:
    """Make every decoder layer run over its input by its parts, in place.

    Only the tokens `last` leave the last layer that keeps something of the tokens; those after it run on these alone.
    With None all tokens leave.
    If hidden states are `streamed`, no layer reads the placeholder that the model is given for them. Rotary angles are
    looked up part by part. During `advance` the layers are restored, so that other sequences can take a step.
    """

    def between(tokens: int) -> None:
        take_out()
        try:
            advance(tokens)
        finally:
            put_in()

    def put_in() -> None:
        found[:] = [vars(module).get("forward") for module in modules]
        for module, forward in zip(modules, forwards, strict=True):
            module.forward = forward

    def take_out() -> None:
        for module, forward in zip(modules, found, strict=True):
            if forward is None:
                del module.forward  # back to the method of the class
            else:
                module.forward = forward  # the one that those who take steps meanwhile have set

    modules: list[nn.Module] = list(layers_of(hook.model))
    found: list[Callable[..., Any] | None] = []
    keeps = max(place for place, layer in enumerate(hook.geometry.decoder) if layer.keeps)
    forwards = [
        _by_parts(hook, layer.forward, own, between, last if place == keeps else None, streamed)
        if place <= keeps or last is None
        else _by_rows(hook, layer.forward, last, own[-1].stop, between)
        for place, (layer, own) in enumerate(zip(modules, parts, strict=True))
    ]
    if isinstance(rope := rotary_of(hook.model), Rope):
        modules.append(rope)
        forwards.append(_later(rope.forward))
    put_in()
    try:
        yield
    finally:
        take_out()
        forwards.clear()  # they refer to each other and to tensors, which would wait for the garbage collector


def _by_parts(
    hook: Hook,
    forward: Callable[..., Any],
    parts: Sequence[slice],
    advance: Callable[[int], None],
    last: Sequence[int] | None,
    streamed: StreamedHiddenStates | None,
) -> Callable[..., Any]:
    length = parts[-1].stop

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:  # hidden_states [1, s, D]
        states = streamed or ResidentHiddenStates(hidden_states)
        kept, beside = [], []  # what a layer passes on to the next one beside hidden states
        for part, positions in zip(parts, [hook.positions[:, part] for part in parts], strict=True):
            cut_args = [_cut(arg, part, length) for arg in args]
            cut_kwargs = {name: _cut(arg, part, length) for name, arg in kwargs.items()}
            with hook.at(positions):
                out = forward(states.read(part), *cut_args, **cut_kwargs)
            made = out[0] if isinstance(out, tuple) else out
            beside.append(out[1:] if isinstance(out, tuple) else ())
            if last is None:
                states.write(part, made)
            else:  # copies, so that the rest of a part is freed
                rows = (row - part.start for row in last if part.start <= row < part.stop)
                kept += [made.narrow(_token_axis(made), row, 1).clone() for row in rows]
            advance(part.stop - part.start)
        done = hidden_states if last is None else torch.cat(kept, _token_axis(kept[0]))
        return (done, *joined(beside)) if isinstance(out, tuple) else done

    return run


def _by_rows(
    hook: Hook, forward: Callable[..., Any], rows: Sequence[int], length: int, advance: Callable[[int], None]
) -> Callable[..., Any]:
    """Run a layer on some of `length` tokens: its hidden states [1, m, D] are of these `rows`, its arguments of all."""

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        some = [_cut(arg, rows, length) for arg in args]
        with hook.at(hook.positions[:, rows]):
            out = forward(hidden_states, *some, **{name: _cut(arg, rows, length) for name, arg in kwargs.items()})
        advance(length)
        return out

    return run


class _Later:
    """Rotary angles of positions [1, s] that are looked up when they are cut."""

    def __init__(self, look_up: Callable[[Tensor, Tensor], Any], like: Tensor, positions: Tensor):
        self.look_up, self.like, self.positions = look_up, like, positions

    def to(self, device: torch.device) -> _Later:
        """Look them up on another device."""
        return _Later(self.look_up, self.like.to(device), self.positions.to(device))

    def at(self, part: slice | Sequence[int]) -> Any:
        """Look up those of some tokens."""
        return self.look_up(self.like, self.positions[..., part])


def _later(look_up: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Tensor, position_ids: Tensor, *kind: Any, **named: Any) -> _Later:
        like = x[:0, :0]  # carries only its device and dtype
        return _Later(lambda like, positions: look_up(like, positions, *kind, **named), like, position_ids)

    return forward


def _cut(arg: Any, part: slice | Sequence[int], length: int) -> Any:
    """Cut an argument; look angles up, also those of several kinds (DeepSeek-V4)."""
    if isinstance(arg, dict):
        return {name: _cut(item, part, length) for name, item in arg.items()}
    return arg.at(part) if isinstance(arg, _Later) else cut(arg, part, length)
