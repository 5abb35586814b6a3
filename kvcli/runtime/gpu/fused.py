"""GPU kernels for the work between the attention of two layers.

Combined projections keep their weights adjacent from then on, each a view of its part: no weight is on the device
twice, except those of one layer while they are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from kvcli.kernels.norm_rope import Rotation, add_rms_norm, rms_norm, rotate, silu_mul
from kvcli.models.auto import layers_of
from kvcli.runtime.fused import Kernels, Norm, Parts, fused_by, norm_of, parts_of, replaced

# Decoder layers that add the attention output within the kernel that normalises the sum for the MLP.


@contextmanager
def sums_in_norms(model: PreTrainedModel) -> Iterator[None]:
    """Save a kernel in each suitable layer of a model within this context."""
    with ExitStack() as left:
        for layer in layers_of(model):
            parts = parts_of(layer)
            norm = None if parts is None else norm_of(parts.before_mlp)
            if parts is not None and norm is not None:
                left.enter_context(replaced(layer, "forward", _forward(layer.forward, parts, norm)))
        yield


def _forward(before: Callable[..., Tensor], parts: Parts, norm: Norm) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
        if args:  # only the layer itself knows which arguments these are
            return before(hidden_states, *args, **given)
        found: Tensor = parts.attention(hidden_states=parts.before_attention(hidden_states), **given)[0]
        total, normed = add_rms_norm(hidden_states, found, *norm)
        out: Tensor = total + parts.mlp(normed)
        return out

    return forward


@contextmanager
def fused_layers(model: PreTrainedModel) -> Iterator[None]:
    """Run the layers of a model as few kernels within this context; results are the same within rounding."""
    with sums_in_norms(model), fused_by(GpuKernels(), model):
        yield


class GpuKernels(Kernels):
    """One product for several layers, one kernel for the operation that follows it."""

    @override
    def serve(self, x: Tensor) -> bool:
        return True

    @override
    def alone(self, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        return lambda x: functional.linear(x, linear.weight, linear.bias)

    @override
    def together(self, linears: Sequence[nn.Linear]) -> Callable[[Tensor], Sequence[Tensor]]:
        side_by_side(linears)
        whole, sizes = _whole(linears), [len(linear.weight) for linear in linears]
        return lambda x: torch.split(functional.linear(x, *whole), sizes, -1)

    @override
    def gated(self, gate: nn.Linear, up: nn.Linear) -> Callable[[Tensor], Tensor]:
        side_by_side([gate, up])
        whole = _whole([gate, up])
        return lambda x: silu_mul(functional.linear(x, *whole))

    @override
    def norm(self, x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
        return rms_norm(x, weight, eps, shift)

    @override
    def rotate(self, q: Tensor, k: Tensor, rotation: Rotation) -> None:
        rotate(q, k, rotation)


@torch.no_grad()
def side_by_side(linears: Sequence[nn.Linear]) -> None:
    """Make the weights of linear layers adjacent in memory, if they are not; each becomes a view."""
    for parts in ([x.weight for x in linears], [x.bias for x in linears if x.bias is not None]):
        if not parts or _adjacent(parts):
            continue
        whole = torch.cat([part.data for part in parts])
        for part, own in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
            part.data = own


def _adjacent(parts: Sequence[Tensor]) -> bool:
    return all(
        b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        and b.storage_offset() == a.storage_offset() + a.numel()
        and a.is_contiguous()
        for a, b in pairwise(parts)
    )


def _whole(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of adjacent layers as those of one layer."""
    first, rows = linears[0], sum(x.out_features for x in linears)
    weight = first.weight.data.as_strided((rows, first.in_features), (first.in_features, 1))
    return weight, None if first.bias is None else first.bias.data.as_strided((rows,), (1,))
