"""Which tokens hold a part of the attention of any query head, in loops on a CPU: `kvcli.kernels.nucleus` says what.

torch looks at all weights a dozen times for it, and sorts once more to bring those that are kept to the front.

    keep          weights [Hk, G, n] fp32, always [n] bool -> kept [Hk, n] bool
    kept_first    tokens [Hk, n] int64, kept -> the tokens kept, in order, and others behind them [Hk, m] for the m of
                  the head that keeps most; which of them are kept, bool [Hk, m]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels._numba import compiled, in_order, prange, run, serves
from kvcli.kernels.nucleus import nucleus


@compiled
def _others(weights: Any, always: Any, out: Any) -> None:
    heads, group, n = weights.shape
    for row in prange(heads * group):
        h, g, at = row // group, row % group, 0
        for j in range(n):
            if not always[j]:
                out[h, g, at] = weights[h, g, j]
                at += 1


@in_order
def _keep(weights: Any, always: Any, ranked: Any, p: Any, kept: Any) -> None:
    heads, group, n = weights.shape
    rest = ranked.shape[2]
    for h in prange(heads):
        kept[h] = always
        for g in range(group):
            own, others = weights[h, g], ranked[h, g]
            mass, count = np.float64(0), rest - n  # as torch sums up: in double precision, and rounded after each
            for j in range(n):
                if always[j]:
                    mass += np.float64(own[j])
                    count += np.float32(mass) - own[j] < p
            for i in range(rest - 1, -1, -1):
                mass += np.float64(others[i])
                count += np.float32(mass) - others[i] < p
            if count <= 0:
                continue
            least, room = others[rest - count], count  # the place left for those that equal the least
            for i in range(rest - 1, rest - count, -1):
                room -= others[i] > least
            for j in range(n):
                if not always[j]:
                    equal = own[j] == least
                    kept[h, j] |= (own[j] > least) | (equal & (room > 0))
                    room -= equal


@compiled
def _kept_first(tokens: Any, kept: Any, out: Any, valid: Any) -> None:
    heads, n = tokens.shape
    for h in prange(heads):
        at = 0
        for wanted in (True, False):
            for j in range(n):
                if kept[h, j] == wanted and at < out.shape[1]:
                    out[h, at], valid[h, at] = tokens[h, j], wanted
                    at += 1


def keep(weights: Tensor, always: Tensor, p: float) -> Tensor:
    """Flag what `nucleus` keeps for any query head of a KV head, by loops where they serve."""
    if p >= 1 or not serves(weights):
        return nucleus(weights, always, p).any(1)
    kept = torch.empty(weights.shape[0], weights.shape[2], dtype=torch.bool)
    ranked = weights.new_empty(*weights.shape[:2], len(always) - int(always.sum()))
    run(_others, weights.numel(), weights.contiguous(), always, ranked)
    ranked.numpy().sort(axis=-1)  # several numbers at once, which neither torch nor a loop does
    run(_keep, 4 * weights.numel(), weights.contiguous(), always, ranked, np.float32(p), kept)
    return kept


def kept_first(tokens: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """List the tokens that are kept, and as many others as make all rows alike."""
    most = int(kept.sum(1).max())
    if not serves(tokens, dtype=torch.int64, numbers=2 * tokens.numel()):
        first = kept.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        return tokens.gather(1, first), kept.gather(1, first)
    out, valid = (torch.empty(len(tokens), most, dtype=dtype) for dtype in (torch.int64, torch.bool))
    run(_kept_first, 2 * tokens.numel(), tokens, kept, out, valid)
    return out, valid
