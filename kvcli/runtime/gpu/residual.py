"""Decoder layers that add what attention gave within the kernel that normalises the sum for the MLP.

The sum stands in the layer's own code, between its modules, so that the layer's forward is replaced; it is found by
what the layer does with modules that do something simple, and stays as it is where that is anything else: norms behind
attention or the MLP, factors, arguments that attention is not given. The second sum goes to the next layer through the
model's own loop, and stays a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import Parameter, signature
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcli.kernels.add_rms_norm import add_rms_norm
from kvcli.models.layers import decoder_of
from kvcli.runtime.fused import Norm, gated_of, norm_of, replaced


class Parts(NamedTuple):
    """The modules of a decoder layer, in the order in which they run."""

    before_attention: nn.Module
    attention: nn.Module
    before_mlp: nn.Module
    mlp: nn.Module


@contextmanager
def sums_in_norms(model: PreTrainedModel) -> Iterator[None]:
    """Inside, layers of a model that are of this kind take a kernel less."""
    with ExitStack() as left:
        for layer in decoder_of(model).layers:  # type: ignore[union-attr]
            parts = parts_of(layer)
            norm = None if parts is None else norm_of(parts.before_mlp)
            if parts is not None and norm is not None:
                left.enter_context(replaced(layer, "forward", _forward(layer.forward, parts, norm)))
        yield


def _forward(before: Callable[..., Tensor], parts: Parts, norm: Norm) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
        if args:  # which arguments they are is the layer's own affair
            return before(hidden_states, *args, **given)
        found = parts.attention(hidden_states=parts.before_attention(hidden_states), **given)[0]
        total, normed = add_rms_norm(hidden_states, found, *norm)
        out: Tensor = total + parts.mlp(normed)
        return out

    return forward


def parts_of(layer: nn.Module) -> Parts | None:
    """Give the parts of a layer that is h = x + attention(norm(x)), then h + mlp(norm(h)), with a gated MLP."""
    children = list(layer.children())
    norms = [child for child in children if norm_of(child) is not None]
    mlps = [child for child in children if gated_of(child) is not None]
    if len(children) != 4 or len(norms) != 2 or len(mlps) != 1 or "forward" in vars(layer):
        return None
    (attention,) = (child for child in children if child not in norms and child not in mlps)
    weight = norms[0].weight
    assert isinstance(weight, Tensor)
    x = torch.linspace(-1.0, 1.0, 3 * len(weight), device=weight.device, dtype=weight.dtype).view(1, 3, -1)
    for first, second in permutations(norms):
        parts = Parts(first, attention, second, mlps[0])
        if _runs(layer, parts, x):
            return parts
    return None


def _runs(layer: nn.Module, parts: Parts, x: Tensor) -> bool:
    """Try a layer out, with modules in place of its own; attention has to be given all that the layer is."""
    named = signature(layer.forward).parameters.values()
    given = {each.name: object() for each in named if each.kind == Parameter.POSITIONAL_OR_KEYWORD}
    given = {"something_else": object(), **given}
    given.pop("hidden_states", None)
    seen: dict[str, Any] = {}

    def attention(hidden_states: Tensor, **known: Any) -> tuple[Tensor, None]:
        seen.update(known)
        return 3 * hidden_states - 1, None

    with ExitStack() as stack:
        for part, does in zip(parts, (lambda x: 2 * x, attention, lambda x: x + 5, lambda x: 7 - x), strict=True):
            stack.enter_context(replaced(part, "forward", does))
        try:
            found = layer.forward(x, **given)  # not what hooks do before and after
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False
    total = x + (3 * (2 * x) - 1)
    return isinstance(found, Tensor) and torch.equal(found, total + (7 - (total + 5))) and seen == given
