"""The kernels of a GPU for what lies between the attention of two layers.

Projections that were made one keep their weights side by side from then on, each a view of its part: nothing is on the
device twice, but for one layer's while it is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from kvcli.kernels.rebuild_keys import Rotation
from kvcli.kernels.rms_norm import rms_norm
from kvcli.kernels.rotate import rotate
from kvcli.kernels.silu_mul import silu_mul
from kvcli.runtime.fused import Kernels, fused_by
from kvcli.runtime.gpu.residual import sums_in_norms


@contextmanager
def fused_layers(model: PreTrainedModel) -> Iterator[None]:
    """Run the layers of a model as few kernels; what they compute is the same within rounding."""
    with sums_in_norms(model), fused_by(GpuKernels(), model):
        yield


class GpuKernels(Kernels):
    """One product for several layers, one kernel for what follows it."""

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
    """Put the weights of linear layers one behind the other in memory, where they are not; each becomes a view."""
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
    """Give weight and bias of layers that lie side by side as those of one."""
    first, rows = linears[0], sum(x.out_features for x in linears)
    weight = first.weight.data.as_strided((rows, first.in_features), (first.in_features, 1))
    return weight, None if first.bias is None else first.bias.data.as_strided((rows,), (1,))
