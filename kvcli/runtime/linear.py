"""The linear layers of a model on the CPU, run at the memory's speed."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcli.compat import onednn_linear, onednn_suits
from kvcli.kernels import few_rows, weight_rows
from kvcli.models.quantising import is_plain

Forward = Callable[[nn.Linear, Tensor], Tensor]


@contextmanager
def cpu_linears(model: nn.Module) -> Iterator[None]:
    """Run a few rows by loops over the weights and others through oneDNN, where that is possible."""
    with _run_by(_by_memory, (module for module in _linears(model) if onednn_suits(module.weight))):
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
def _run_by(forward: Forward, linears: Iterable[nn.Linear]) -> Iterator[None]:
    """Put a function in the place of the layers' forward; what was there before comes back."""
    before = [(module, vars(module).get("forward")) for module in linears]
    for module, _ in before:
        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, replaced in before:
            del module.forward  # back to the method of the class
            if replaced is not None:
                module.forward = replaced  # type: ignore[method-assign]


def _by_memory(module: nn.Linear, x: Tensor) -> Tensor:
    if x.requires_grad:  # which neither the loops nor oneDNN pass on
        return functional.linear(x, module.weight, module.bias)
    weight = module.weight.detach()
    if few_rows.suits(rows := x.reshape(-1, x.shape[-1]), weight) and weight.is_contiguous():
        out = weight_rows.row_products(rows, weight).view(*x.shape[:-1], -1)
        return out if module.bias is None else out.add_(module.bias)
    return onednn_linear(x, module.weight, module.bias)


def _one_row(module: nn.Linear, x: Tensor) -> Tensor:
    """x [..., in] -> [..., out]; sums are made in at least fp32."""
    if x.numel() != x.shape[-1]:
        return functional.linear(x, module.weight, module.bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    out = (module.weight.to(wide) * x.reshape(-1).to(wide)).sum(-1)
    if module.bias is not None:
        out = out + module.bias.to(wide)
    return out.to(x.dtype).view(*x.shape[:-1], -1)
