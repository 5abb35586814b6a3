"""Windowed prefill: window by window through all layers, each attending to a budget of the tokens before it.

Layer-major prefill (kvcli/runtime/prefill.py) is exact and costs O(s^2) attention. Here the method decides what a
window attends to, so that a prompt costs O(s), and only the method's own store is ever as long as the prompt.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcli.kernels.prefill_attention import prefill_attention
from kvcli.kernels.softmax import Softmax
from kvcli.methods.contract import AnyMethod
from kvcli.models.geometry import LayerGeometry, ModelGeometry
from kvcli.runtime.attention_hook import Handler, Hook
from kvcli.runtime.decode import BlockingPipeline
from kvcli.runtime.recurrent import BatchStates, States


@torch.inference_mode()
def windowed_prefill(
    hook: Hook,
    ids: Sequence[int],
    method: AnyMethod,
    layers: Sequence[LayerGeometry],
    advance: Callable[[int], None],
    window: int,
    start: int = 0,
) -> Tensor:
    """Read a prompt of s >= 1 tokens in windows; return the logits [vocab] of the next token.

    Reading begins at token `start`, a multiple of `window`; the method has read the tokens before it. `advance` is
    called with the number of tokens that a layer has just processed: s - start times the number of layers in all. The
    method's preview (`Method.preview`) is read first, after the prompt's first token: models rest their attention on
    that token, and its own query says nothing of the preview.
    """
    preview = list(method.preview)[-min(window, len(ids) - 1) :] if len(ids) > 1 and start == 0 else []
    if preview:
        _run(hook, PreviewAttention(method, layers), [ids[0], *preview], 0)
    attention = WindowAttention(method, hook.geometry, advance)
    for at in range(start, len(ids), window):
        logits = _read(hook, attention, ids[at : at + window], at)
        method.states.started = True
    return logits[0]


@torch.inference_mode()
def extend(hook: Hook, ids: Sequence[int], method: AnyMethod, keep: int = 1) -> Tensor:
    """Read n >= 1 more tokens as one window into a method -> logits of the last `keep` of them [keep, vocab].

    For methods that attend by windows: full attention, and those with a `prefill_window` of at least n. Where layers
    read the KV of others, which by then may have dropped what a window's first tokens attend to, tokens go one by one.
    """
    if hook.geometry.shares:
        states, handler = BatchStates(hook.geometry.states, [method.states]), BlockingPipeline([method])
        rows = [_run(hook, handler, [token], method.caches[0].length, 1, states) for token in ids]
        return torch.cat(rows)[-keep:]
    attention = WindowAttention(method, hook.geometry, lambda _: None)
    return _read(hook, attention, ids, method.caches[0].length, keep)


class WindowAttention:
    """The handler during windowed prefill: the method attends."""

    def __init__(self, method: AnyMethod, geometry: ModelGeometry, advance: Callable[[int], None]):
        self.method, self.strides, self.advance = method, geometry.strides, advance

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend with the next window: q [1, H, n, d], k and v [1, Hk, n, d] -> [1, n, H, d]."""
        out = self.method.attend_window(layer, q[0], k[0], v[0], softmax)  # [H, n, d]
        self.advance(q.shape[2] * self.strides[layer])
        return out.transpose(0, 1)[None]


class PreviewAttention:
    """The handler of a preview: attends exactly, and shows its input to the method."""

    def __init__(self, method: AnyMethod, layers: Sequence[LayerGeometry]):
        self.method, self.layers = method, layers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend with the whole preview: q [1, H, n, d], k and v [1, Hk, n, d] -> [1, n, H, d]."""
        self.method.take_preview(layer, q[0], k[0], v[0], softmax)
        geometry = self.layers[layer]
        out = prefill_attention(q[0], k[0], v[0], softmax, geometry.window, geometry.chunked)
        return out.transpose(0, 1)[None]


def _read(hook: Hook, attention: WindowAttention, ids: Sequence[int], start: int, keep: int = 1) -> Tensor:
    """Run a window's tokens from position `start` on -> logits of the last `keep` of them [keep, vocab].

    A method that wants logits gets those of all tokens: the model's head then runs over every token of the prompt.
    """
    method = attention.method
    states = BatchStates(hook.geometry.states, [method.states])
    logits = _run(hook, attention, ids, start, len(ids) if method.wants_logits else keep, states)
    if method.wants_logits:
        method.take_logits(start, ids, logits)
    return logits[-keep:]


def _run(
    hook: Hook, handler: Handler, ids: Sequence[int], start: int, keep: int = 1, states: States | None = None
) -> Tensor:
    """Run one sequence's tokens from position `start` on -> logits of the last `keep` of them [keep, vocab]."""
    device = hook.model.device
    tokens = torch.tensor([list(ids)], device=device)  # [1, n]
    positions = torch.arange(start, start + len(ids), device=device)[None]  # [1, n]
    return hook.run(handler, tokens, positions, keep, states)[0]
