"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), computed on the cached latents themselves.

A token's keys and values come from one latent c of r channels that all heads share, and a rotary part k_R of every key.
Head h makes of them its key (U_h c, k_R) and its value V_h c. Its score is

    q_h . (U_h c, k_R) = (U_h^T q_C, q_R) . (c, k_R)       and its output       sum_j a_j V_h c_j = V_h sum_j a_j c_j

So with U absorbed into the query and V applied to the output, attention reads only (k_R, c): one KV head that is both
key and value. The first channels of the output, the rotary ones, are cut off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Latent(NamedTuple):
    """An attention module's projection from latents to keys and values: up [H * (n + v), r], as in transformers.

    Of every head's rows the first n make the non-rotary part of the key, the other v the value.
    """

    up: Tensor
    heads: int
    value_dim: int

    @classmethod
    def of(cls, module: Any) -> Latent | None:
        """Find the projection in a module that makes keys and values of latents (`expand_kv`) by one linear layer."""
        up = getattr(module, "kv_b_proj", None)
        if not hasattr(module, "expand_kv") or type(up) is not nn.Linear or up.bias is not None:
            return None
        return cls(up.weight, module.num_heads, module.v_head_dim)

    @property
    def rank(self) -> int:
        """Channels of a latent."""
        return self.up.shape[1]

    def query(self, q: Tensor) -> Tensor:
        """Absorb the keys' projection: q [b, H, m, n + rotary] -> [b, H, m, rotary + r]."""
        keys = self._by_head[:, : -self.value_dim]  # [H, n, r]
        content, rotary = q[..., : keys.shape[1]], q[..., keys.shape[1] :]
        return torch.cat((rotary, _by_heads(content.transpose(0, 1), keys).transpose(0, 1)), -1)

    def value(self, out: Tensor) -> Tensor:
        """Apply the values' projection to the attention output: [b, m, H, rotary + r] -> [b, m, H, v]."""
        values = self._by_head[:, -self.value_dim :].transpose(1, 2)  # [H, r, v]
        return _by_heads(out[..., -self.rank :].permute(2, 0, 1, 3), values).permute(1, 2, 0, 3)

    @property
    def _by_head(self) -> Tensor:
        return self.up.view(self.heads, -1, self.rank)


def _by_heads(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply x [H, ..., i] by weights [H, i, o] -> [H, ..., o]."""
    return torch.bmm(x.flatten(1, -2), weights).view(*x.shape[:-1], weights.shape[-1])


@contextmanager
def compressed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules with latents pass these to attention, as key and as value, without expanding them."""
    latent: list[Any] = [module for module in modules if Latent.of(module) is not None]
    for module in latent:
        module.expand_kv = _together
    try:
        yield
    finally:
        for module in latent:
            del module.expand_kv  # back to the method of the class


def _together(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Append latents [b, 1, n, r] to the rotary parts [b, 1, n, rotary] of their keys: one tensor is key and value."""
    kept = torch.cat((rotary, latents), -1)
    return kept, kept


# Attention that gets sharper as a text gets longer (Llama 4): queries are scaled by their position.


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
    """Let attention modules leave their queries unscaled."""
    before = [(module, module.attn_temperature_tuning) for module in modules if Temperature.of(module) is not None]
    for module, _ in before:
        module.attn_temperature_tuning = False
    try:
        yield
    finally:
        for module, tuning in before:
            module.attn_temperature_tuning = tuning
