"""Muon in float32, for CPUs without instructions for bfloat16.

Momentum is orthogonalised before it is applied (Jordan et al., "Muon: An optimizer for hidden layers in neural
networks", 2024), with the step scaled as in Liu et al. (arXiv 2502.16982), so that AdamW's learning rates serve.
`torch.optim.Muon` computes the same in bfloat16, which takes longer than the rest of a step on such CPUs.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the Newton-Schulz iteration
_ITERATIONS = 5


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return about U V^T of each of `matrices` [n, rows, columns] = U S V^T: singular values come out near 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon over matrices; those of one shape are orthogonalised together."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, weight_decay: float = 0.01, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Apply one step to every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                average = state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(average, group["momentum"])  # Nesterov's
                by_shape.setdefault(weight.shape, []).append((weight, update))
            for shape, pairs in by_shape.items():
                updates = orthogonalised(torch.stack([update for _, update in pairs]))
                for (weight, _), update in zip(pairs, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(shape)))
