"""The linear layers of a model on the CPU, run at the memory's speed."""

from collections.abc import Callable, Iterable, Iterator
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
    """Run a few rows by loops over the weights and others through oneDNN, where that is possible.

    Layers that have another forward already keep it.
    """
    plain = (module for module in _linears(model) if onednn_suits(module.weight))
    own = (module for module in (*plain, *filter(is_packed, model.modules())) if "forward" not in vars(module))
    with _run_by(by_memory, own):  # type: ignore[arg-type]
        yield


@contextmanager
def fused_rows(model: nn.Module) -> Iterator[None]:
    """Write the product of a weight and a single row out, as a compiler wants it that makes one loop of it.

    Such a loop reads the weights at the rate of a sum over them, oneDNN at about half of that for small matrices; not
    compiled it would be slow. Several rows are left to torch.
    """
    with _run_by(_one_row, _linears(model)):
        yield


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear) and is_plain(module)]


@contextmanager
def _run_by(make: Callable[[nn.Linear], Forward], linears: Iterable[nn.Linear]) -> Iterator[None]:
    """Put a function in the place of the layers' forward; what was there before comes back."""
    before = [(module, vars(module).get("forward")) for module in linears]
    for module, _ in before:
        module.forward = make(module)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        for module, replaced in before:
            del module.forward  # back to the method of the class
            if replaced is not None:
                module.forward = replaced  # type: ignore[method-assign]


def few(x: Tensor) -> bool:
    """Tell whether loops over weights may take the place of other code for x [.., in]; compilers see that code."""
    return x.dtype == torch.float32 and x.is_cpu and not x.requires_grad and not torch.compiler.is_compiling()


def rows_of(x: Tensor) -> Tensor | None:
    """View x [.., in] as rows [m, in], if these are few."""
    size = x.shape[-1]
    return x.reshape(-1, size) if x.numel() <= gemv.MOST_ROWS * size else None


def is_packed(module: object) -> bool:
    """Tell whether a module is a linear layer whose weight is packed, on a CPU."""
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
        if x.requires_grad:  # which neither the loops nor oneDNN pass on
            return functional.linear(x, linear.weight, linear.bias)
        if loops and few(x) and (rows := rows_of(x)) is not None:
            out = row_products(rows, arrays).view(*x.shape[:-1], -1)
            return out if linear.bias is None else out.add_(linear.bias)
        return onednn_linear(x, linear.weight, linear.bias)

    return forward


def _packed(linear: nn.Linear) -> Forward:
    """Make the forward of a layer whose weight is packed; asked for as itself, torch would take a detour to it."""
    weight: Any = linear.weight
    multiply = products_with([weight]) if suits_gemv(linear) else None

    def forward(x: Tensor) -> Tensor:
        if multiply is not None and few(x) and (rows := rows_of(x)) is not None:
            out = multiply(rows).view(*x.shape[:-1], -1)
            return out if linear.bias is None else out.add_(linear.bias)
        return packed_linear(x, weight, linear.bias)

    return forward


def _one_row(linear: nn.Linear) -> Forward:
    """Make the forward of a layer; sums are made in at least fp32."""

    def forward(x: Tensor) -> Tensor:
        if x.numel() != x.shape[-1]:
            return functional.linear(x, linear.weight, linear.bias)
        wide = torch.promote_types(x.dtype, torch.float32)
        out = (linear.weight.to(wide) * x.reshape(-1).to(wide)).sum(-1)
        if linear.bias is not None:
            out = out + linear.bias.to(wide)
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    return forward
