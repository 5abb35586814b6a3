"""Keys turned to their positions and put into their slots on a CPU: the end of a recall of ShadowKV in one loop.

    k_tc = x_tc * cos(t, c) + x_t,partner(c) * sign(c) * sin(t, c)

Shapes: x [m, c, d] un-rotated, misses as in `kvcli.kernels.resolve_pages`, rotation as in
`kvcli.kernels.rebuild_keys`, slots k [Hk, k, c, d] with any strides but the last; all fp32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kvcli.kernels._numba import compiled, flat, prange, run, serves
from kvcli.kernels.rebuild_keys import Rotation
from kvcli.kernels.resolve_pages import Misses


@compiled
def _turn_rows(
    x: Any,
    heads: Any,
    slots: Any,
    chunks: Any,
    cos: Any,
    sin: Any,
    partner: Any,
    column: Any,
    sign: Any,
    turned: int,
    k: Any,
    strides: Any,
) -> None:
    count, size, d = x.shape
    for i in prange(count):
        for t in range(size):
            key, position = x[i, t], chunks[i] * size + t
            cosine, sine = cos[position], sin[position]
            out = k[heads[i] * strides[0] + slots[i] * strides[1] + t * strides[2] :][:d]
            for c in range(turned):
                at, other = np.uint32(column[c]), key[np.uint32(partner[c])]
                out[c] = key[c] * cosine[at] + other * sign[c] * sine[at]
            for c in range(turned, d):
                out[c] = key[c]


def suits(x: Tensor, k: Tensor) -> bool:
    """Tell whether this can put these keys there."""
    return serves(x, k)


def turn_rows(x: Tensor, misses: Misses, rotation: Rotation, k: Tensor) -> None:
    """Turn the keys of the chunks that `misses` lists, and write each to its slot."""
    turned = int((rotation.column >= 0).sum())  # they come first
    run(_turn_rows, x.numel(), x, *misses, *rotation, turned, flat(k), np.array(k.stride()[:3]))
