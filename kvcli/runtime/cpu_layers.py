"""Run the work between the attention of two layers on a CPU in few loops, for a few rows at a time.

A step takes the time of reading the weights; one launch per linear layer and six torch functions per norm would add a
third. Prompts go through the model's own code, its linear layers through oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from kvcli.kernels.gemv import gated_products, row_products
from kvcli.kernels.norm_rope import Rotation, norm_cpu, rotate_cpu
from kvcli.kernels.packed_linear import gated_with, products_with
from kvcli.models.weights import is_plain
from kvcli.runtime.fused import Kernels, fused_by
from kvcli.runtime.linear import by_memory, cpu_linears, few, is_packed, rows_of, suits_gemv

MOST = 1 << 16
"""Numbers up to which a single-threaded loop is faster for a norm or a rotation."""


@contextmanager
def cpu_layers(model: PreTrainedModel) -> Iterator[None]:
    """Run a few rows by loops, and linear layers of more rows at the memory's speed, if possible."""
    linears: Any = (module for module in model.modules() if is_plain(module) or is_packed(module))
    loops = any(map(suits_gemv, linears))
    with fused_by(CpuKernels(), model) if loops else nullcontext(), cpu_linears(model):
        yield


class CpuKernels(Kernels):
    """Loops, for as many rows as they are faster for."""

    @override
    def serve(self, x: Tensor) -> bool:
        return x.numel() <= MOST and few(x)

    @override
    def knows(self, linear: object) -> bool:
        return is_plain(linear) or is_packed(linear)

    @override
    def alone(self, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        return by_memory(linear)

    @override
    def together(self, linears: Sequence[nn.Linear]) -> Callable[[Tensor], Sequence[Tensor]]:
        each, sizes = [by_memory(linear) for linear in linears], [linear.out_features for linear in linears]
        packed = [is_packed(linear) for linear in linears]
        if not all(map(suits_gemv, linears)) or any(packed) != all(packed):
            return lambda x: [product(x) for product in each]
        if all(packed):
            weights: Any = [linear.weight for linear in linears]
            multiply = products_with(weights)
        else:
            multiply = partial(row_products, weights=tuple(linear.weight.detach().numpy() for linear in linears))

        def products(x: Tensor) -> Sequence[Tensor]:
            if (rows := rows_of(x)) is None:
                return [product(x) for product in each]
            parts = torch.split(multiply(rows).view(*x.shape[:-1], -1), sizes, -1)
            for part, linear in zip(parts, linears, strict=True):
                if linear.bias is not None:
                    part.add_(linear.bias)
            return parts

        return products

    @override
    def gated(self, gate: nn.Linear, up: nn.Linear) -> Callable[[Tensor], Tensor]:
        by_gate, by_up = by_memory(gate), by_memory(up)
        packed = is_packed(gate)
        alike = packed == is_packed(up) and (not packed or gate.weight.packing == up.weight.packing)  # type: ignore[attr-defined]
        if gate.bias is not None or not alike or not (suits_gemv(gate) and suits_gemv(up)):
            return lambda x: functional.silu(by_gate(x)) * by_up(x)
        weights: Any = [linear.weight for linear in (gate, up)]
        if packed:
            multiply = gated_with(*weights)
        else:
            arrays = [weight.detach().numpy() for weight in weights]
            multiply = partial(gated_products, gate=arrays[0], up=arrays[1])

        def product(x: Tensor) -> Tensor:
            if (rows := rows_of(x)) is None:
                return functional.silu(by_gate(x)) * by_up(x)
            return multiply(rows).view(*x.shape[:-1], -1)

        return product

    @override
    def norm(self, x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
        return norm_cpu(x, weight.detach(), eps, shift)

    @override
    def rotate(self, q: Tensor, k: Tensor, rotation: Rotation) -> None:
        rotate_cpu(q, k, rotation)
