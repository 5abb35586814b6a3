"""The only hook into transformers: one registered attention function that hands queries, keys and values over.

No Cache object and no mask: the model is called with `use_cache=False`, so the function sees the new tokens alone, and
an attention name without a mask function makes transformers build no L*L mask. Causality is the handler's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import attention_modules

NAME = "kvcli"


class Handler(Protocol):
    """Attention of one layer for the new tokens of a batch: q [b, H, n, d], k and v [b, Hk, n, d] -> [b, n, H, d]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend."""


class Hook:
    """What every attention module of one model points at; whoever runs the model sets the handler."""

    handler: Handler

    def __init__(self, modules: Sequence[nn.Module]):
        self.modules = modules  # of every layer, in order


@contextmanager
def attached(model: PreTrainedModel) -> Iterator[Hook]:
    """Route the attention of `model` through the returned hook; leaves the model as it was.

    Two models can be attached at once: the hook hangs on their modules, not on the registered function.
    """
    modules = attention_modules(model)
    hook = Hook(modules)
    before = model.config._attn_implementation
    for module in modules:
        module.kvcli_hook = hook  # type: ignore[assignment]
    model.set_attn_implementation(NAME)
    try:
        yield hook
    finally:
        model.set_attn_implementation(before)
        for module in modules:
            del module.kvcli_hook


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        raise RuntimeError("transformers built an attention mask although the attention has no mask function")
    hook, layer = cast(Hook, module.kvcli_hook), cast(int, module.layer_idx)
    softmax = Softmax(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    return hook.handler(layer, query, key, value, softmax), None


AttentionInterface.register(NAME, _attention)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let torch.compile stop at the door of attention, instead of looking into whatever handler is behind it."""
    AttentionInterface.register(NAME, torch.compiler.disable(_attention))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        AttentionInterface.register(NAME, _attention)
