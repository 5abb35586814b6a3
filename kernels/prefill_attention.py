"""Prefill attention: the newest m tokens of a prompt attend causally to all n so far, without an m*n matrix.

Shapes: q [H, m, d], k [Hk, n, d], v [Hk, n, d], m <= n -> out [H, m, d]. Query i is at position n - m + i and sees keys
0 .. n - m + i, or the last `window` of them; if `chunked`, those of the query's own chunk, which begins at a multiple
of `window`.

All queries see the keys before the newest m, which need no mask; only the square on the diagonal is causal. The two
parts are merged by their log-sum-exp.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels import decode_attention as decode
from kvcli.kernels import gemv
from kvcli.kernels._numba import serves
from kvcli.kernels.block_attention import (
    add_sinks,
    attention_scores,
    block_attention,
    block_attention_ref,
    causal_attention,
    merge_blocks,
)
from kvcli.kernels.decode_attention import TokenSet
from kvcli.kernels.softmax import Softmax

# Queries of a sliding-window layer handled together: bounds its mask to ROWS * (ROWS + window).
SLIDING_ROWS = 256


def prefill_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | None = None, chunked: bool = False
) -> Tensor:
    """Reference of `prefill_attention` in plain torch with the whole m*n mask, in the precision of its input."""
    groups = q.shape[0] // k.shape[0]
    mask = _causal_mask(q.shape[1], k.shape[1], None if chunked else window, q.device)
    if chunked and window is not None:
        chunk = torch.arange(k.shape[1], device=q.device) // window
        mask &= chunk[-q.shape[1] :, None] == chunk
    mask = mask.repeat(groups, 1)
    out, lse = block_attention_ref(_fold(q, k), k, v, softmax, mask)
    return _finish(q, out, lse, softmax)


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | None = None, chunked: bool = False
) -> Tensor:
    """Attend in blocks; memory grows with m and with n, never with m*n."""
    m, n = q.shape[1], k.shape[1]
    if chunked and window is not None and n > window:
        borders = [n - m, *range((n - m) // window * window + window, n, window), n]
        pieces = [
            (slice(start - n + m, stop - n + m), slice(start // window * window, stop))
            for start, stop in pairwise(borders)
        ]
        return torch.cat([prefill_attention(q[:, new], k[:, seen], v[:, seen], softmax) for new, seen in pieces], 1)
    if window is not None and n > window:
        first = max(0, n - m - window + 1)
        fused = causal_attention(q, k[:, first:], v[:, first:], softmax, window)
        if fused is not None:
            return _finish(q, *fused, softmax)
        parts = []
        for start in range(0, m, SLIDING_ROWS):
            stop = min(start + SLIDING_ROWS, m)
            last = n - m + stop
            first = max(0, last - (stop - start) - window + 1)
            parts.append(_sliding_block(q[:, start:stop], k[:, first:last], v[:, first:last], softmax, window))
        return torch.cat(parts, 1)
    blocks = [_diagonal(q, k[:, n - m :], v[:, n - m :], softmax)]
    if n > m:
        far = _fold(q, k), k[:, : n - m], v[:, : n - m]
        found = _few(*far, softmax)
        blocks.append(block_attention(*far, softmax) if found is None else found)
    return _finish(q, *merge_blocks(*blocks), softmax)


FEW = 32
"""Queries of a KV head up to which the loops of decode attention read keys faster than matrix products."""


def _few(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor] | None:
    """Attend with few queries q [Hk, r, d] to keys that all of them see; None if no loop serves.

    Rows of zeros fill up a power of two, so that few loops are compiled.
    """
    few = q.shape[1]
    rows = 1 << (few - 1).bit_length()
    if rows > FEW or not serves(q, k, v):
        return None
    out, lse, *_ = decode.attend([TokenSet(functional.pad(q, (0, 0, 0, rows - few)), k, v)], softmax)
    return out[:, :few], lse[:, :few]


def _diagonal(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attend causally with q [H, m, d] to as many keys: out [Hk, G*m, d], lse [Hk, G*m]."""
    fused = causal_attention(q, k, v, softmax)
    if fused is not None:
        out, lse = fused
        return _fold(out, k), lse.reshape(k.shape[0], -1)
    # One query head of a group at a time: other causal kernels need as many rows as keys.
    heads = q.view(k.shape[0], -1, *q.shape[1:])  # [Hk, G, m, d]
    squares = [block_attention(heads[:, g], k, v, softmax, causal=True) for g in range(heads.shape[1])]
    out, lse = (torch.stack(parts, 1).flatten(1, 2) for parts in zip(*squares, strict=True))
    return out, lse


def _sliding_block(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int) -> Tensor:
    groups = q.shape[0] // k.shape[0]
    mask = _causal_mask(q.shape[1], k.shape[1], window, q.device).repeat(groups, 1)
    return _finish(q, *block_attention(_fold(q, k), k, v, softmax, mask), softmax)


def _causal_mask(m: int, n: int, window: int | None, device: torch.device) -> Tensor:
    mask = torch.ones(m, n, dtype=torch.bool, device=device).tril(n - m)
    return mask if window is None else mask.triu(n - m - window + 1)


def _fold(q: Tensor, k: Tensor) -> Tensor:
    return q.reshape(k.shape[0], -1, q.shape[-1])  # [H, m, d] -> [Hk, G*m, d]


def _finish(q: Tensor, out: Tensor, lse: Tensor, softmax: Softmax) -> Tensor:
    out, lse = out.reshape(*q.shape[:2], -1), lse.reshape(q.shape[:2])  # [H, m, d], [H, m]
    if softmax.sinks is not None:
        out = add_sinks(out, lse, softmax.sinks[:, None])
    return out


class FarTokens(NamedTuple):
    """The far keys and values l, w [Hk, f, d], f >= 0, and the queries that see them, p [H, m, d].

    For `one_query` they may be the `rows` [1, f] of l and w [Hk, n, d].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor | None = None


def far_near_attention(q: Tensor, k: Tensor, v: Tensor, far: FarTokens, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attend causally with the newest m tokens to near keys, and to far keys that all of them see (arXiv 2402.04617).

        s_ij = f(scale * q_i . k_j), near, j <= n - m + i      t_ij = f(scale * p_i . l_j), far
        z_i = log(sum_j e^s_ij + sum_j e^t_ij + e^sink)
        out_i = sum_j e^(s_ij - z_i) v_j + sum_j e^(t_ij - z_i) w_j
        mass_j = sum over all heads, and over i with n - m + i > j, of e^(s_ij - z_i)

    f is the model's softcap. The far keys have queries of their own, p, because their distance may differ from their
    position. `mass` is the attention that a near token received from later tokens; only the near weights are ever held
    as a matrix. q [H, m, d], k, v [Hk, n, d], m <= n -> out [H, m, d], mass [n] in at least fp32.
    """
    out, norm = windowed_attention(q, k, v, far, softmax)
    queries = _fold_far_near_attention(q, k)
    weights = torch.exp(attention_scores(queries, k, softmax) - norm[..., None])
    later = _band(q.shape[1], k.shape[1], q, above=1).repeat(q.shape[0] // k.shape[0], 1)
    return out, weights.masked_fill(~later, 0.0).sum((0, 1))


def one_query_suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether `one_query` serves: on a CPU, a single query per head."""
    return q.shape[1] == 1 and gemv.suits(_fold_far_near_attention(q, k), k, v)


def one_query(q: Tensor, k: Tensor, v: Tensor, far: Sequence[FarTokens], softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Compute `far_near_attention` for m = 1, with several sets of far keys in place: out [H, 1, d], mass [n]."""
    parts = [FarTokens(q, k, v), *far]
    sets = [TokenSet(_fold_far_near_attention(each.q, k), each.k, each.v, each.rows) for each in parts]
    attended = decode.attend(sets, softmax)
    out, norm = attended.out, attended.lse
    if softmax.sinks is not None:
        sinks = softmax.sinks.view_as(norm)
        out, norm = add_sinks(out, norm, sinks), torch.logaddexp(norm, sinks)
    mass = decode.mass(attended, norm)
    mass[-1] = 0  # the token's attention to itself does not count
    return out.view_as(q), mass


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, far: FarTokens, softmax: Softmax, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to far keys and at most the last `window` near keys of each query; return out [H, m, d], z [Hk, G*m]."""
    (m, n), groups = (q.shape[1], k.shape[1]), q.shape[0] // k.shape[0]
    mask = _band(m, n, q, window).repeat(groups, 1) if m > 1 else None
    near = slice(0 if window is None or m > 1 else max(0, n - window), n)
    out, norm = block_attention(
        _fold_far_near_attention(q, k), k[:, near], v[:, near], softmax, mask
    )  # queries [Hk, G*m, d]
    if far.k.shape[1]:
        out, norm = merge_blocks(
            (out, norm), block_attention(_fold_far_near_attention(far.q, k), far.k, far.v, softmax)
        )
    if softmax.sinks is not None:
        sinks = softmax.sinks[:, None].expand(-1, m).reshape(norm.shape)  # [H] -> [Hk, G*m]
        out, norm = add_sinks(out, norm, sinks), torch.logaddexp(norm, sinks)
    return out.reshape(q.shape), norm


def _band(m: int, n: int, like: Tensor, window: int | None = None, above: int = 0) -> Tensor:
    """Mark keys [m, n] at least `above` tokens before each query, and fewer than `window`."""
    band = torch.ones(m, n, dtype=torch.bool, device=like.device).tril(n - m - above)
    return band if window is None else band.triu(n - m - window + 1)


def _fold_far_near_attention(q: Tensor, k: Tensor) -> Tensor:
    return q.reshape(k.shape[0], -1, q.shape[-1])  # [H, m, d] -> [Hk, G*m, d]


ROWS = 64
"""Queries per block; also the number of queries that patterns are estimated from."""

ALWAYS = 30
"""First columns and nearest diagonals that are always chosen, as in the reference code."""


class Pattern(Protocol):
    """A sparse pattern: which keys a block of queries sees."""

    def seen(self, start: int, stop: int) -> Tensor:
        """Mark which of the first `stop` keys queries at positions `start` to `stop` see: bool [H or 1, stop]."""


class AShape(NamedTuple):
    """A-shape: the first `sink` tokens and the newest `window` before each block."""

    sink: int
    window: int
    device: torch.device

    def seen(self, start: int, stop: int) -> Tensor:
        """See `Pattern.seen`."""
        position = torch.arange(stop, device=self.device)
        return ((position < self.sink) | (position > start - self.window))[None]


class VerticalSlash(NamedTuple):
    """Vertical-slash: columns of each head, bool [H, n], and its diagonals, distances [H, c]."""

    columns: Tensor
    diagonals: Tensor

    def seen(self, start: int, stop: int) -> Tensor:
        """See `Pattern.seen`: a diagonal spans a block from the key of its first query to that of its last."""
        first, last = start - self.diagonals, stop - self.diagonals  # [H, c], of keys
        edges = torch.zeros(len(self.columns), stop + 1, dtype=torch.int32, device=self.columns.device)
        there = (last > 0).to(torch.int32)
        edges.scatter_add_(1, first.clamp(min=0), there).scatter_add_(1, last.clamp(min=0), -there)
        return self.columns[:, :stop] | (edges.cumsum(1)[:, :stop] > 0)


def vertical_slash(q: Tensor, k: Tensor, softmax: Softmax, columns: int, diagonals: int) -> VerticalSlash:
    """Choose columns and diagonals of each head, as many as given and available, by the newest queries of q."""
    n = k.shape[1]
    found = [_sums(weights) for weights in last_rows_by_kv_head(q[:, -ROWS:], k, softmax)]
    by_column, by_distance = (torch.cat(parts) for parts in zip(*found, strict=True))  # [H, n]
    for scores in (by_column, by_distance):
        scores[:, :ALWAYS] = torch.inf
    chosen = by_column.topk(min(n, max(columns, ALWAYS)), dim=1).indices
    kept = torch.zeros_like(by_column, dtype=torch.bool).scatter_(1, chosen, True)
    return VerticalSlash(kept, by_distance.topk(min(n, max(diagonals, ALWAYS)), dim=1).indices)


def _sums(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sum weights [G, r, n] of the newest r queries along columns and along diagonals: [G, n] each."""
    groups, rows, n = weights.shape
    diagonals = weights.new_zeros(groups, n)
    for row in range(rows):
        own = n - rows + row + 1  # keys up to the query's own, at distance 0
        diagonals[:, :own] += weights[:, row, :own].flip(1)
    return weights.sum(1), diagonals


def sparse_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, pattern: Pattern, rows: int = ROWS
) -> tuple[Tensor, Tensor]:
    """Reference of `sparse_attention` in plain torch with the whole m*n mask of every head, in at least fp32."""
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
    """Attend block by block to the keys gathered for it, causally; return out and lse, without the model's sinks."""
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
    """Return positions that are True in seen [H, n], packed to the left, and which of them are valid: [H, most]."""
    counts = seen.sum(1)
    head, position = seen.nonzero(as_tuple=True)
    at = seen.new_zeros(len(seen), int(counts.max()), dtype=torch.long)
    at[head, (seen.cumsum(1) - 1)[head, position]] = position
    return at, torch.arange(at.shape[1], device=seen.device) < counts[:, None]


# Keys handled at once; bounds their copy in full precision.
KEYS_AT_ONCE = 1 << 13

# Weights held at once, which bounds the queries handled together: on a CPU they fit into its caches (4 MiB in fp32), on
# a GPU they keep it busy (256 MiB).
WEIGHTS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
LEAST_ROWS = 32


def last_rows(q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
    """Return the weights [H, r, s] of the newest r queries, in one pass over the keys."""
    (num_heads, rows, _), length = q.shape, k.shape[1]
    heads = q.reshape(k.shape[0], -1, q.shape[-1])  # [Hk, G * r, d]
    parts = [attention_scores(heads, some, softmax) for some in torch.split(k, KEYS_AT_ONCE, 1)]
    scores = (torch.cat(parts, -1) if len(parts) > 1 else parts[0]).view(num_heads, rows, length)
    later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    scores[..., length - rows :].masked_fill_(later, float("-inf"))  # causal
    weights = scores.softmax(-1)
    if softmax.sinks is not None:  # the part of the norm that is not the sink's
        weights *= torch.sigmoid(scores.logsumexp(-1) - softmax.sinks[:, None])[..., None]
    return weights


def last_rows_by_kv_head(q: Tensor, k: Tensor, softmax: Softmax) -> Iterator[Tensor]:
    """Iterate over the weights of each KV head's query heads, [G, r, s] each: all at once may be too many."""
    queries = q.unflatten(0, (k.shape[0], -1))  # type: ignore[no-untyped-call]  # [Hk, G, r, d]
    for head in range(k.shape[0]):
        sinks = None if softmax.sinks is None else softmax.sinks.view(k.shape[0], -1)[head]
        yield last_rows(queries[head], k[head : head + 1], softmax._replace(sinks=sinks))


def many_rows_by_kv_head(q: Tensor, k: Tensor, softmax: Softmax) -> Iterator[tuple[int, Tensor]]:
    """Iterate over the weights of n <= s newest queries, a bounded number of queries at a time.

    Yields a KV head and the weights [G, r, m] of some queries of its group for the keys up to the last of them.
    """
    (num_heads, n, _), (num_kv_heads, s, _) = q.shape, k.shape
    rows = max(LEAST_ROWS, WEIGHTS_AT_ONCE[q.device.type] // (num_heads // num_kv_heads * s))
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        yield from enumerate(last_rows_by_kv_head(q[:, start:stop], k[:, : s - n + stop], softmax))
