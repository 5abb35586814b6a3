"""Causal attention of the newest m tokens of a prompt over a part of all n so far: A-shape and vertical-slash.

As in MInference (arXiv 2407.02490, section 3). Queries are taken in blocks of `ROWS`; all of a block see what any of
them does, up to their own position:

    A-shape         the first tokens and the newest ones before the block
    vertical-slash  columns, single keys that every query sees, and diagonals, distances i - j; a head has its own ones

Which these are the newest `ROWS` queries tell, whose weights w over all keys are summed up:

    column_j = sum_i w_ij      diagonal_o = sum_i w_i,i-o

Shapes: q [H, m, d], k [Hk, n, d], v [Hk, n, d], m <= n -> out [H, m, d], lse [H, m]; seen [H or 1, n], True: attend.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels.block_attention import block_attention, block_attention_ref
from kvcli.kernels.last_rows import last_rows_by_kv_head
from kvcli.kernels.softmax import Softmax

ROWS = 64
"""Queries of a block; as many tell what a head looks at."""

ALWAYS = 30
"""First columns and nearest diagonals that are always among those chosen, as in the reference code."""


class Pattern(Protocol):
    """Which keys a block of queries sees."""

    def seen(self, start: int, stop: int) -> Tensor:
        """Tell which of the first `stop` keys queries at positions `start` to `stop` see: bool [H or 1, stop]."""


class AShape(NamedTuple):
    """The first `sink` tokens and the newest `window` before each block."""

    sink: int
    window: int
    device: torch.device

    def seen(self, start: int, stop: int) -> Tensor:
        """See `Pattern.seen`."""
        position = torch.arange(stop, device=self.device)
        return ((position < self.sink) | (position > start - self.window))[None]


class VerticalSlash(NamedTuple):
    """Columns of each head, bool [H, n], and its diagonals, distances [H, c]."""

    columns: Tensor
    diagonals: Tensor

    def seen(self, start: int, stop: int) -> Tensor:
        """See `Pattern.seen`: a diagonal passes a block from the key of its first query to that of its last."""
        first, last = start - self.diagonals, stop - self.diagonals  # [H, c], of keys
        edges = torch.zeros(len(self.columns), stop + 1, dtype=torch.int32, device=self.columns.device)
        there = (last > 0).to(torch.int32)
        edges.scatter_add_(1, first.clamp(min=0), there).scatter_add_(1, last.clamp(min=0), -there)
        return self.columns[:, :stop] | (edges.cumsum(1)[:, :stop] > 0)


def vertical_slash(q: Tensor, k: Tensor, softmax: Softmax, columns: int, diagonals: int) -> VerticalSlash:
    """Choose columns and diagonals of each head, so many where there are as many keys, by the newest queries of q."""
    n = k.shape[1]
    found = [_sums(weights) for weights in last_rows_by_kv_head(q[:, -ROWS:], k, softmax)]
    by_column, by_distance = (torch.cat(parts) for parts in zip(*found, strict=True))  # [H, n]
    for scores in (by_column, by_distance):
        scores[:, :ALWAYS] = torch.inf
    chosen = by_column.topk(min(n, max(columns, ALWAYS)), dim=1).indices
    kept = torch.zeros_like(by_column, dtype=torch.bool).scatter_(1, chosen, True)
    return VerticalSlash(kept, by_distance.topk(min(n, max(diagonals, ALWAYS)), dim=1).indices)


def _sums(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of weights [G, r, n] of the newest r queries along columns and along diagonals: [G, n] each."""
    groups, rows, n = weights.shape
    diagonals = weights.new_zeros(groups, n)
    for row in range(rows):
        own = n - rows + row + 1  # keys up to the query's own, at distance 0
        diagonals[:, :own] += weights[:, row, :own].flip(1)
    return weights.sum(1), diagonals


def sparse_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, pattern: Pattern, rows: int = ROWS
) -> tuple[Tensor, Tensor]:
    """Plain torch with the whole m*n mask of every head, in at least fp32."""
    (num_heads, m, _), n = q.shape, k.shape[1]
    masks = []
    for start in range(n - m, n, rows):
        stop = min(start + rows, n)
        mask = functional.pad(pattern.seen(start, stop), (0, n - stop)).expand(num_heads, -1)
        masks.append(mask[:, None].expand(-1, stop - start, -1))
    causal = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m)
    keys, values = (x.repeat_interleave(num_heads // len(k), 0) for x in (k, v))
    return block_attention_ref(q, keys, values, softmax, torch.cat(masks, 1) & causal)


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, pattern: Pattern, rows: int = ROWS
) -> tuple[Tensor, Tensor]:
    """Attend block by block to the keys gathered for it; the model's sinks are left to the caller, who has the lse."""
    (num_heads, m, _), n = q.shape, k.shape[1]
    of_group = torch.arange(num_heads, device=q.device)[:, None] // (num_heads // len(k))
    parts = []
    for start in range(n - m, n, rows):
        stop = min(start + rows, n)
        seen = pattern.seen(start, stop).expand(num_heads, -1)  # [H, stop]
        at, there = _packed(seen)  # [H, c]
        position = torch.arange(start, stop, device=q.device)
        mask = there[:, None] & (at[:, None] <= position[:, None])  # [H, rows, c]
        queries = q[:, start - n + m : stop - n + m]
        parts.append(block_attention(queries, k[of_group, at], v[of_group, at], softmax, mask))
    out, lse = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    return out, lse


def _packed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Positions that are True in seen [H, n], packed to the left, and which of them are there: [H, most] each."""
    counts = seen.sum(1)
    head, position = seen.nonzero(as_tuple=True)
    at = seen.new_zeros(len(seen), int(counts.max()), dtype=torch.long)
    at[head, (seen.cumsum(1) - 1)[head, position]] = position
    return at, torch.arange(at.shape[1], device=seen.device) < counts[:, None]
