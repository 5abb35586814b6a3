"""The linear layers of a model on the CPU, run at the memory's speed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcli.compat import onednn_linear, onednn_suits
from kvcli.kernels import gemv, packed_linear
from kvcli.kernels._numba import serves
from kvcli.kernels.chain import Chain, Matrix, Products
from kvcli.kernels.packed_linear import PackedWeight
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
    if linear.bias is not None and linear.bias.dtype != torch.float32:
        return False
    if isinstance(linear.weight, PackedWeight):
        return packed_linear.suits_loops(linear.weight)
    return serves(linear.weight.detach()) and linear.weight.is_contiguous()


def matrix_of(linear: nn.Linear) -> Matrix:
    """Describe a layer that suits to the loops."""
    bias = None if linear.bias is None else linear.bias.detach().contiguous().numpy()
    if isinstance(linear.weight, PackedWeight):
        return packed_linear.matrix_of(linear.weight, bias)
    return gemv.matrix_of(linear.weight.detach().numpy(), bias)


def by_memory(linear: nn.Linear) -> Forward:
    """Make the forward of a layer, by a loop for a few rows, else through oneDNN or by the packed weight's tiles."""
    weight: Any = linear.weight
    if isinstance(weight, PackedWeight):
        # torch's own would dispatch to it by a detour
        many: Forward = partial(packed_linear.packed_linear, weight=weight, bias=linear.bias)
    else:
        many = partial(_through_onednn, linear)
    if not suits_gemv(linear):
        return many
    multiply = Chain(["x"], [Products("x", "out", [matrix_of(linear)])], ["out"])

    def forward(x: Tensor) -> Tensor:
        if not few(x) or (rows := rows_of(x)) is None:
            return many(x)
        return multiply(rows)[0].view(*x.shape[:-1], -1)

    return forward


def _through_onednn(linear: nn.Linear, x: Tensor) -> Tensor:
    if x.requires_grad:  # oneDNN does not pass gradients on
        return functional.linear(x, linear.weight, linear.bias)
    return onednn_linear(x, linear.weight, linear.bias)
