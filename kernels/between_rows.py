"""What stands between the linear layers of a model, for a few rows on a CPU: norms and rotations, a loop each.

They do what `kvcli.kernels.rms_norm` and `kvcli.kernels.rotate` describe, where torch takes six and twenty functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, prange, run, run_alone, serial
from kvcli.kernels.rebuild_keys import Rotation

Arrays = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Cosines and sines [positions, w]; partner, column and sign [d], as in `kvcli.kernels.rebuild_keys`."""


@serial
def _norms(x: Any, weight: Any, eps: Any, shift: Any, out: Any) -> None:
    for row in range(len(x)):
        total = np.float32(0)
        for c in range(x.shape[1]):
            total += x[row, c] * x[row, c]
        scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for c in range(x.shape[1]):
            out[row, c] = x[row, c] * scale * (weight[c] + shift)


@serial
def _rotations(q: Any, k: Any, steps: Any, angles: Any, channels: Any, turned: Any) -> None:
    (batch, heads, kv_heads, n, q_steps, k_steps), (cos, sin), (partner, column, sign) = steps, angles, channels
    for i in range(batch * n):
        b, token = i // n, i % n
        for h in range(heads + kv_heads):
            x, own, (of_batch, of_head, of_token) = (q, h, q_steps) if h < heads else (k, h - heads, k_steps)
            row = x[b * of_batch + own * of_head + token * of_token :]
            for c in range(len(partner)):
                at = column[c]
                straight = cos[i, at] if at >= 0 else np.float32(1)
                crossed = sin[i, at] * sign[c] if at >= 0 else np.float32(0)
                turned[c] = row[c] * straight + row[partner[c]] * crossed
            for c in range(len(partner)):
                row[c] = turned[c]


@compiled
def _turns(x: Any, positions: Any, angles: Any, channels: Any, forth: Any, scale: Any, out: Any) -> None:
    (cos, sin), (partner, column, sign) = angles, channels
    rows, n, d = x.shape
    for i in prange(rows * n):
        row, token = i // n, i % n
        at, own, turned = positions[row % len(positions), token], x[row, token], out[row, token]
        for c in range(d):
            if column[c] >= 0:
                crossed = own[partner[c]] * sin[at, column[c]] * sign[c]
                turned[c] = (own[c] * cos[at, column[c]] + forth * crossed) * scale
            else:
                turned[c] = own[c]


def norm_rows(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """Normalise every row of x [.., n] -> [.., n] without gaps."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty(x.shape)
    run_alone(_norms, rows, weight, np.float32(eps), np.float32(shift), out.view(rows.shape))
    return out


def rotate_rows(q: Tensor, k: Tensor, rotation: Rotation) -> None:
    """Turn q [b, H, n, d] and k [b, Hk, n, d] in place, by the cosines and sines [b, n, w] of their positions."""
    (b, heads, n, d), kv_heads = q.shape, k.shape[1]
    steps = b, heads, kv_heads, n, q.stride()[:3], k.stride()[:3]
    cos, sin = (angle.reshape(b * n, -1) for angle in (rotation.cos, rotation.sin))
    channels = rotation.partner, rotation.column, rotation.sign
    run_alone(_rotations, flat(q), flat(k), steps, (cos, sin), channels, q.new_empty(d))


def arrays_of(rotation: Rotation) -> Arrays:
    """Give the tables of a rotation as loops take them."""
    cos, sin, *channels = (table.numpy() for table in rotation)
    return (cos, sin), tuple(channels)


def turn_rows(x: Tensor, positions: Tensor, tables: Arrays, back: bool = False, scale: float = 1.0) -> Tensor:
    """Turn x [.., n, d] to positions [n], or [.., n], or `back` from them, the turned channels times a scale.

    The tables have the cosines and sines of all positions.
    """
    rows, each = x.reshape(-1, *x.shape[-2:]).contiguous(), positions.reshape(-1, x.shape[-2]).contiguous()
    out = torch.empty_like(rows)
    run(_turns, rows.numel(), rows, each, *tables, np.float32(-1 if back else 1), np.float32(scale), out)
    return out.view(x.shape)
