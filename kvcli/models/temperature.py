"""Attention that gets sharper as a text gets longer (Llama 4): queries are scaled by their position.

The module counts positions by its cache, of which there is none here, so the scaling is taken out of it and done apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Temperature(NamedTuple):
    """Scales the query at position t by 1 + scale * log(1 + (t + 1) // floor) (arXiv 2501.19399)."""

    scale: float
    floor: float

    @classmethod
    def of(cls, module: Any) -> Temperature | None:
        """Read it from an attention module of transformers; only layers without rotary positions have one."""
        if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
            return None
        return cls(module.attn_scale, module.floor_scale)

    def __call__(self, q: Tensor, positions: Tensor) -> Tensor:
        """Scale queries q [b, H, n, d] of tokens at positions [b, n]."""
        factors = torch.log1p(torch.floor((positions.float() + 1) / self.floor)) * self.scale + 1
        return (q * factors[:, None, :, None]).to(q.dtype)


@contextmanager
def taken_out(modules: Sequence[Any]) -> Iterator[None]:
    """Within, attention modules leave their queries as they are."""
    before = [(module, module.attn_temperature_tuning) for module in modules if Temperature.of(module) is not None]
    for module, _ in before:
        module.attn_temperature_tuning = False
    try:
        yield
    finally:
        for module, tuning in before:
            module.attn_temperature_tuning = tuning
