"""Products on a CPU with tokens held in bytes (`kvcli.kernels.quant`), of which no buffer holds all in fp32.

    products  s_hgj = q_hg . (z_hj + s_hj code_hj)        every key, for the query rows that share a KV head
    mixtures  o_hg = sum_j w_hgj (z_hj + s_hj code_hj)    every value, weighted

Bytes are read from memory, and a few tokens at a time are numbers, in the processor's nearest cache.

Shapes: q [Hk, G, d] fp32, blocks [n, Hk, bytes] uint8 without gaps, one token each, w [Hk, G, n].
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels import gemv as few_rows
from kvcli.kernels._numba import compiled, prange, run, serves
from kvcli.kernels.quant import BlockFormat, PartLayout, numbers_of_halves, read_token
from kvcli.kernels.softmax import Softmax

PIECE = 512  # tokens that a thread takes at once; their number does not depend on the threads


@cache
def _loops(d: int, part: PartLayout, bits: int) -> tuple[Any, Any]:
    """Make the loops over rows of d numbers: with sizes that are known a processor takes sixteen numbers at a time."""
    mask, form = (1 << bits) - 1, part.of_token(d, bits)
    columns = form[3]

    @compiled
    def products(q: Any, blocks: Any, halves: Any, floats: Any, out: Any) -> None:
        heads, group, n = out.shape
        for piece in prange((n + PIECE - 1) // PIECE):
            key, its = np.empty((1, d), np.float32), np.empty((2, columns), np.float32)
            for j in range(piece * PIECE, min(n, (piece + 1) * PIECE)):
                for h in range(heads):
                    read_token(blocks, halves, j * heads + h, floats, form, mask, its, key, 0)
                    for g in range(group):
                        total = np.float32(0)
                        for c in range(d):
                            total += q[np.uint64(h), np.uint64(g), np.uint64(c)] * key[0, np.uint64(c)]
                        out[h, g, j] = total

    @compiled
    def mixtures(w: Any, blocks: Any, halves: Any, floats: Any, parts: Any) -> None:
        heads, group, n = w.shape
        for piece in prange(len(parts)):
            begin, end = piece * PIECE, min(n, (piece + 1) * PIECE)
            values, its = np.zeros((4, d), np.float32), np.empty((2, columns), np.float32)
            parts[piece] = 0
            for j in range(begin, end, 4):
                some = min(4, end - j)
                values[some:] = 0
                for h in range(heads):
                    for i in range(some):
                        read_token(blocks, halves, (j + i) * heads + h, floats, form, mask, its, values, i)
                    for g in range(group):
                        w0 = w[h, g, j]
                        w1 = w[h, g, j + 1] if some > 1 else np.float32(0)
                        w2 = w[h, g, j + 2] if some > 2 else np.float32(0)
                        w3 = w[h, g, j + 3] if some > 3 else np.float32(0)
                        for c in range(d):
                            u = np.uint64(c)
                            parts[np.uint64(piece), np.uint64(h), np.uint64(g), u] += (
                                w0 * values[0, u] + w1 * values[1, u] + w2 * values[2, u] + w3 * values[3, u]
                            )

    return products, mixtures


def suits(q: Tensor, blocks: Tensor) -> bool:
    """Tell whether these loops can take the queries [Hk, G, d] with the blocks."""
    return (
        q.shape[1] <= few_rows.MOST_ROWS
        and serves(blocks, dtype=torch.uint8)
        and q.device.type == "cpu"
        and blocks.is_contiguous()
        and blocks.data_ptr() % 2 == 0
    )


def products(q: Tensor, blocks: Tensor, form: BlockFormat) -> Tensor:
    """Score every token: [Hk, G, n]."""
    out = q.new_empty(*q.shape[:2], len(blocks))
    loop, held = _loop(0, blocks, form)
    run(loop, out[:, 0].numel() * form.d, q.contiguous(), *held, out)
    return out


def mixtures(w: Tensor, blocks: Tensor, form: BlockFormat) -> Tensor:
    """Add values up by weights: [Hk, G, d]."""
    heads, group, n = w.shape
    parts = w.new_empty(-(-n // PIECE), heads, group, form.d)
    loop, held = _loop(1, blocks, form)
    run(loop, w[:, 0].numel() * form.d, w.contiguous(), *held, parts)
    return parts.sum(0)


def attend(
    q: Tensor, blocks: Tensor, form: BlockFormat, sizes: Tensor, k: Tensor, v: Tensor, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Attend to tokens in blocks and to others k, v [Hk, m, d] in fp32 behind them: out [Hk, G, d] and lse [Hk, G].

    The sizes [Hk, d] of keys in blocks multiply the queries instead.
    """
    far_scores = products(q * sizes[:, None], blocks, form)
    scores = softmax.scores(torch.cat((far_scores, q @ k.transpose(1, 2)), -1))
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    far, near = weights[..., : len(blocks)], weights[..., len(blocks) :]
    total = weights.sum(-1)
    return (mixtures(far, blocks, form) + near @ v) / total[..., None], top[..., 0] + torch.log(total)


def _loop(part: int, blocks: Tensor, form: BlockFormat) -> tuple[Any, tuple[Any, ...]]:
    """Choose the loop over keys, part 0, or values, and give it the blocks."""
    layout, rows = form.layouts[part], blocks.flatten(0, 1)
    return _loops(form.d, layout, form.bits)[part], (rows, rows.view(torch.uint16), numbers_of_halves())
