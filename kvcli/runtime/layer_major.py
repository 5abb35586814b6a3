"""Runs a model layer by layer: each decoder layer over the whole input, part by part, before the next one begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.models.layers import decoder_of
from kvcli.models.rope import Rope
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.hidden_states import ResidentHiddenStates, StreamedHiddenStates


def chunk_length(device: torch.device) -> int:
    """Tokens of a chunk: enough for full-speed matrix products, and so few that the widest intermediate is small."""
    return 4096 if device.type == "cuda" else 1024


@contextmanager
def layer_major(
    hook: Hook,
    parts: Sequence[Sequence[slice]],
    last: Sequence[int],
    advance: Callable[[int], None],
    streamed: StreamedHiddenStates | None = None,
) -> Iterator[None]:
    """Make every decoder layer run over its input by its parts, in place; the last one keeps tokens `last` only.

    Where hidden states are `streamed`, what the model is given for them is looked at by no layer. Rotary angles are
    looked up part by part. During `advance` the layers are as they were, so that other sequences can take a step.
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
                module.forward = forward  # of those who take steps meanwhile

    decoder = decoder_of(hook.model)
    modules: list[nn.Module] = list(decoder.layers)  # type: ignore[arg-type]
    found: list[Callable[..., Any] | None] = []
    forwards = [
        _by_parts(hook, layer.forward, own, between, last if layer is modules[-1] else None, streamed)
        for layer, own in zip(modules, parts, strict=True)
    ]
    if isinstance(rope := getattr(decoder, "rotary_emb", None), Rope):
        modules.append(rope)
        forwards.append(_later(rope.forward))
    put_in()
    try:
        yield
    finally:
        take_out()
        forwards.clear()  # they refer to each other, and to tensors, which would wait for the garbage collector


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
        kept = []
        for part, positions in zip(parts, [hook.positions[:, part] for part in parts], strict=True):
            cut_args = [_cut(arg, part, length) for arg in args]
            cut_kwargs = {name: _cut(arg, part, length) for name, arg in kwargs.items()}
            with hook.at(positions):
                out = forward(states.read(part), *cut_args, **cut_kwargs)
            made = out[0] if isinstance(out, tuple) else out
            if last is None:
                states.write(part, made)
            else:  # copies, so that the rest of a part is let go of
                rows = (row - part.start for row in last if part.start <= row < part.stop)
                kept += [made[:, row : row + 1].clone() for row in rows]
            advance(part.stop - part.start)
        done = hidden_states if last is None else torch.cat(kept, 1)
        return (done,) if isinstance(out, tuple) else done

    return run


class _Later:
    """Rotary angles of positions [1, s] that are looked up when they are cut."""

    def __init__(self, look_up: Callable[[Tensor, Tensor], Any], like: Tensor, positions: Tensor):
        self.look_up, self.like, self.positions = look_up, like, positions

    def to(self, device: torch.device) -> _Later:
        """Look them up on another device."""
        return _Later(self.look_up, self.like.to(device), self.positions.to(device))

    def at(self, part: slice) -> Any:
        """Look up those of a part."""
        return self.look_up(self.like, self.positions[..., part])


def _later(look_up: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Tensor, position_ids: Tensor, *kind: Any, **named: Any) -> _Later:
        like = x[:0, :0]  # which tells no more than where it is
        return _Later(lambda like, positions: look_up(like, positions, *kind, **named), like, position_ids)

    return forward


def _cut(arg: Any, part: slice, length: int) -> Any:
    """Slice what is as long as the sequence: position ids [1, s] and rotary tables ([1, s, d], [1, s, d])."""
    if isinstance(arg, _Later):
        return arg.at(part)
    if isinstance(arg, Tensor) and arg.dim() > 1 and arg.shape[1] == length:
        return arg[:, part]
    if isinstance(arg, tuple):
        return tuple(_cut(item, part, length) for item in arg)
    return arg
