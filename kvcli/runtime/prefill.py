"""Exact prefill, layer-major in chunks.

Each decoder layer runs over the whole prompt in chunks before the next one begins, so that only the hidden states, one
layer's KV and the method's own store are ever as long as the prompt; MLP and projection intermediates are as long as a
chunk. A layer's KV is handed to the method when its last chunk is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvcli.kernels.prefill_attention import prefill_attention
from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import LayerGeometry
from kvcli.runtime.attention_hook import Hook
from kvcli.store.prefill_offloader import PrefillOffloader

# Tokens of a chunk: long enough for full-speed matrix products, short enough that the widest intermediate is small.
CHUNK = 1024


class PrefillConsumer(Protocol):
    """What a prompt's KV is handed to: a method, several at once, or something that only looks at it."""

    @property
    def query_rows(self) -> int:
        """How many of the prompt's last queries are wanted."""

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """See the next queries q [H, n, d] of a layer and all keys up to them, k [Hk, m, d]; not to be kept."""

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Take over a layer's k, v [Hk, s, d] and last queries q [H, query_rows or s, d]; not to be kept."""


class PrefillFanout:
    """Hands a layer's prompt KV to several methods, so that the prompt is read once."""

    def __init__(self, consumers: Sequence[PrefillConsumer]):
        self.consumers = consumers

    @property
    def query_rows(self) -> int:
        """The most of the prompt's last queries that a consumer wants."""
        return max(consumer.query_rows for consumer in self.consumers)

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Show every consumer how a layer reads the prompt."""
        for consumer in self.consumers:
            consumer.observe(layer, q, k, softmax)

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Give every consumer a layer's k, v [Hk, s, d], and those of the last queries q [H, r, d] that it wants."""
        for consumer in self.consumers:
            rows = min(consumer.query_rows, q.shape[1])
            consumer.prefill(layer, k, v, q[:, q.shape[1] - rows :], softmax)


class PrefillAttention:
    """The handler during prefill: collects a layer's KV chunk by chunk, attends, hands the whole over."""

    def __init__(self, consumer: PrefillConsumer, layers: Sequence[LayerGeometry], length: int, device: torch.device):
        self.consumer, self.layers, self.length = consumer, layers, length
        self.offloader = PrefillOffloader(device)
        self.done = 0  # tokens of the current layer
        self.kv = torch.empty(0)  # [2, Hk, length, d] of the current layer
        self.q = torch.empty(0)  # [H, rows, d], its last queries

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend with the next chunk: q [1, H, n, d], k and v [1, Hk, n, d] -> [1, n, H, d]."""
        if self.done == 0:
            self.kv = self.offloader.buffer((2, k.shape[1], self.length, k.shape[3]), k.dtype)
            self.q = q.new_empty(q.shape[1], 0, q.shape[3])
        stop = self.done + k.shape[2]
        self.kv[0, :, self.done : stop] = k[0]
        self.kv[1, :, self.done : stop] = v[0]
        seen_k, seen_v = self.kv[:, :, :stop]
        out = prefill_attention(q[0], seen_k, seen_v, softmax, self.layers[layer].window)
        self.consumer.observe(layer, q[0], seen_k, softmax)
        rows = self.consumer.query_rows
        self.q = torch.cat((self.q, q[0, :, -rows:]), 1)[:, -rows:] if rows else self.q
        self.done = stop % self.length
        if stop == self.length:
            k, v = self.kv
            self.offloader.start(self.kv, partial(self.consumer.prefill, layer, k, v, self.q, softmax))
        return out.transpose(0, 1)[None]


@torch.inference_mode()
def prefill(
    hook: Hook,
    ids: Sequence[int],
    consumer: PrefillConsumer,
    layers: Sequence[LayerGeometry],
    advance: Callable[[int], None],
    chunk: int = CHUNK,
) -> Tensor:
    """Read a prompt of s >= 1 tokens into `consumer`; returns the logits [vocab] of the token that follows.

    `advance` is called with the number of tokens that a layer has just done: s times the number of layers in all.
    """
    device, length = hook.model.device, len(ids)
    attention = PrefillAttention(consumer, layers, length, device)
    tokens = torch.tensor([ids], device=device)  # [1, s]
    positions = torch.arange(length, device=device)[None]  # [1, s]
    with _layer_major(hook.model.get_decoder().layers, length, chunk, advance):  # type: ignore[no-untyped-call]
        logits = hook.run(attention, tokens, positions)
    attention.offloader.finish()
    return logits[0, -1]


@contextmanager
def _layer_major(layers: nn.ModuleList, length: int, chunk: int, advance: Callable[[int], None]) -> Iterator[None]:
    """Make every decoder layer run over its input in chunks, in place; the last one keeps its last token only."""
    try:
        for layer in layers:
            layer.forward = _chunked(layer.forward, length, chunk, advance, layer is layers[-1])
        yield
    finally:
        for layer in layers:
            del layer.forward  # back to the method of the class


def _chunked(
    forward: Callable[..., Any], length: int, chunk: int, advance: Callable[[int], None], last: bool
) -> Callable[..., Tensor]:
    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # hidden_states [1, s, D]
        for start in range(0, length, chunk):
            part = slice(start, min(start + chunk, length))
            cut_args = [_cut(arg, part, length) for arg in args]
            cut_kwargs = {name: _cut(arg, part, length) for name, arg in kwargs.items()}
            out = forward(hidden_states[:, part], *cut_args, **cut_kwargs)
            hidden_states[:, part] = out[0] if isinstance(out, tuple) else out
            advance(part.stop - part.start)
        return hidden_states[:, -1:] if last else hidden_states

    return run


def _cut(arg: Any, part: slice, length: int) -> Any:
    """Slice what is as long as the sequence: position ids [1, s] and rotary tables ([1, s, d], [1, s, d])."""
    if isinstance(arg, Tensor) and arg.dim() > 1 and arg.shape[1] == length:
        return arg[:, part]
    if isinstance(arg, tuple):
        return tuple(_cut(item, part, length) for item in arg)
    return arg
