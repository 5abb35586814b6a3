"""What lies between the attention of two layers on a CPU, in few loops while a few rows go through it.

A step's time is that of reading the weights; a launch for each linear layer and six functions of torch for a norm add a
third to it. Prompts go through the model's own code, its linear layers through oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from kvcli.kernels.gemv import gated_products, row_products
from kvcli.kernels.norm_rope import Rotation, norm_cpu, rotate_cpu
from kvcli.models.weights import is_plain
from kvcli.runtime.fused import Kernels, fused_by
from kvcli.runtime.linear import by_memory, cpu_linears, few, rows_of, suits_gemv

MOST = 1 << 16
"""Numbers for which a loop of one thread is the faster way for a norm or a rotation."""


@contextmanager
def cpu_layers(model: PreTrainedModel) -> Iterator[None]:
    """Run a few rows by loops, and the linear layers for more of them at the memory's speed, where that is possible."""
    loops = any(suits_gemv(module) for module in model.modules() if is_plain(module))  # type: ignore[arg-type]
    with fused_by(CpuKernels(), model) if loops else nullcontext(), cpu_linears(model):
        yield


class CpuKernels(Kernels):
    """Loops, for as many rows as they are the faster way for."""

    @override
    def serve(self, x: Tensor) -> bool:
        return x.numel() <= MOST and few(x)

    @override
    def alone(self, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        return by_memory(linear)

    @override
    def together(self, linears: Sequence[nn.Linear]) -> Callable[[Tensor], Sequence[Tensor]]:
        each, sizes = [by_memory(linear) for linear in linears], [linear.out_features for linear in linears]
        if not all(map(suits_gemv, linears)):
            return lambda x: [product(x) for product in each]
        arrays = tuple(linear.weight.detach().numpy() for linear in linears)

        def products(x: Tensor) -> Sequence[Tensor]:
            if (rows := rows_of(x)) is None:
                return [product(x) for product in each]
            parts = torch.split(row_products(rows, arrays).view(*x.shape[:-1], -1), sizes, -1)
            for part, linear in zip(parts, linears, strict=True):
                if linear.bias is not None:
                    part.add_(linear.bias)
            return parts

        return products

    @override
    def gated(self, gate: nn.Linear, up: nn.Linear) -> Callable[[Tensor], Tensor]:
        by_gate, by_up = by_memory(gate), by_memory(up)
        if gate.bias is not None or not (suits_gemv(gate) and suits_gemv(up)):
            return lambda x: functional.silu(by_gate(x)) * by_up(x)
        arrays = gate.weight.detach().numpy(), up.weight.detach().numpy()

        def product(x: Tensor) -> Tensor:
            if (rows := rows_of(x)) is None:
                return functional.silu(by_gate(x)) * by_up(x)
            return gated_products(rows, *arrays).view(*x.shape[:-1], -1)

        return product

    @override
    def norm(self, x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
        return norm_cpu(x, weight.detach(), eps, shift)

    @override
    def rotate(self, q: Tensor, k: Tensor, rotation: Rotation) -> None:
        rotate_cpu(q, k, rotation)
