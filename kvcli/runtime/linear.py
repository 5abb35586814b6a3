"""The linear layers of a model on the CPU, run at the memory's speed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcli.compat import onednn_linear, onednn_suits
from kvcli.kernels import gemv
from kvcli.kernels._numba import serves
from kvcli.kernels.gemv import row_products
from kvcli.kernels.packed_linear import PackedWeight, packed_linear, products_with, suits_loops
from kvcli.models.weights import is_plain

Forward = Callable[[Tensor], Tensor]


@contextmanager
def cpu_linears(model: nn.Module) -> Iterator[None]:
    """Run a few rows by loops over the weights and others through oneDNN, if possible, within this context.

    Layers whose forward is already replaced keep it.
    """
    plain = (linear for linear in model.modules() if isinstance(linear, nn.Linear) and is_plain(linear))
    served: Any = [*(linear for linear in plain if onednn_suits(linear.weight)), *filter(is_packed, model.modules())]
    own = [linear for linear in served if "forward" not in vars(linear)]
    for linear in own:
        linear.forward = by_memory(linear)
    try:
        yield
    finally:
        for linear in own:
            del linear.forward  # back to the method of the class


def few(x: Tensor) -> bool:
    """Tell whether loops over weights may replace other code for x [.., in]; compilers need to see the other code."""
    return x.dtype == torch.float32 and x.is_cpu and not x.requires_grad and not torch.compiler.is_compiling()


def rows_of(x: Tensor) -> Tensor | None:
    """View x [.., in] as rows [m, in], or return None if there are too many."""
    size = x.shape[-1]
    return x.reshape(-1, size) if x.numel() <= gemv.MOST_ROWS * size else None


def is_packed(module: object) -> bool:
    """Tell whether a module is a linear layer on a CPU whose weight is packed."""
    return isinstance(module, nn.Linear) and isinstance(module.weight, PackedWeight) and module.weight.is_cpu


def suits_gemv(linear: nn.Linear) -> bool:
    """Tell whether there is a loop for the weight of a layer."""
    if isinstance(linear.weight, PackedWeight):
        return suits_loops(linear.weight)
    return serves(linear.weight.detach()) and linear.weight.is_contiguous()


def by_memory(linear: nn.Linear) -> Forward:
    """Make the forward of a layer, by a loop for a few rows, else through oneDNN."""
    if isinstance(linear.weight, PackedWeight):
        return _packed(linear)
    loops = suits_gemv(linear)
    arrays = (linear.weight.detach().numpy(),) if loops else ()

    def forward(x: Tensor) -> Tensor:
        if x.requires_grad:  # neither the loops nor oneDNN pass gradients on
            return functional.linear(x, linear.weight, linear.bias)
        if loops and few(x) and (rows := rows_of(x)) is not None:
            out = row_products(rows, arrays).view(*x.shape[:-1], -1)
            return out if linear.bias is None else out.add_(linear.bias)
        return onednn_linear(x, linear.weight, linear.bias)

    return forward


def _packed(linear: nn.Linear) -> Forward:
    """Make the forward of a layer whose weight is packed; torch's own would dispatch to it by a detour."""
    weight: Any = linear.weight
    multiply = products_with([weight]) if suits_gemv(linear) else None

    def forward(x: Tensor) -> Tensor:
        if multiply is not None and few(x) and (rows := rows_of(x)) is not None:
            out = multiply(rows).view(*x.shape[:-1], -1)
            return out if linear.bias is None else out.add_(linear.bias)
        return packed_linear(x, weight, linear.bias)

    return forward
