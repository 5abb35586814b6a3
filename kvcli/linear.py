"""The linear layers of a model on the CPU, run at the memory's speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from kvcli.kernels import onednn


@contextmanager
def onednn_linears(model: nn.Module) -> Iterator[None]:
    """Run the linear layers of a model through oneDNN where that is possible; elsewhere change nothing."""
    linears = [module for module in model.modules() if type(module) is nn.Linear and onednn.suits(module.weight)]
    for module in linears:
        module.forward = _forward_of(module)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for module in linears:
            del module.forward  # back to the method of the class


def _forward_of(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return onednn.linear(x, module.weight, module.bias)

    return forward
