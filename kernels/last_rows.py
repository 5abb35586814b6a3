"""Attention weights of the last few queries over all keys, without an s*s matrix.

    w_ij = exp(f(scale * q_i . k_j) - z_i), j <= s - r + i      z_i = log(sum_j e^f(scale * q_i . k_j) + e^sink)

f is the model's softcap. Shapes: q [H, r, d], the queries of the newest r tokens, k [Hk, s, d] -> w [H, r, s] in at
least fp32, zero for the keys that a query does not see.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvcli.kernels.block_attention import attention_scores
from kvcli.kernels.softmax import Softmax

# Keys handled together: bounds their copy in full precision.
KEYS_AT_ONCE = 1 << 13

# Weights held at once, which bounds the queries handled together: on a CPU what its caches hold (4 MiB in fp32), on a
# GPU what keeps it busy (256 MiB).
WEIGHTS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
LEAST_ROWS = 32


def last_rows(q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
    """Weights of the newest queries, in one pass over the keys."""
    (num_heads, rows, _), length = q.shape, k.shape[1]
    heads = q.reshape(k.shape[0], -1, q.shape[-1])  # [Hk, G * r, d]
    parts = [attention_scores(heads, some, softmax) for some in torch.split(k, KEYS_AT_ONCE, 1)]
    scores = (torch.cat(parts, -1) if len(parts) > 1 else parts[0]).view(num_heads, rows, length)
    later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    scores[..., length - rows :].masked_fill_(later, float("-inf"))  # a query sees nothing that came after it
    weights = scores.softmax(-1)
    if softmax.sinks is not None:  # of the norm, what is not the sink's
        weights *= torch.sigmoid(scores.logsumexp(-1) - softmax.sinks[:, None])[..., None]
    return weights


def last_rows_by_kv_head(q: Tensor, k: Tensor, softmax: Softmax) -> Iterator[Tensor]:
    """Give the weights of one KV head's query heads after the other, [G, r, s] each: all at once may be too many."""
    queries = q.unflatten(0, (k.shape[0], -1))  # type: ignore[no-untyped-call]  # [Hk, G, r, d]
    for head in range(k.shape[0]):
        sinks = None if softmax.sinks is None else softmax.sinks.view(k.shape[0], -1)[head]
        yield last_rows(queries[head], k[head : head + 1], softmax._replace(sinks=sinks))


def many_rows_by_kv_head(q: Tensor, k: Tensor, softmax: Softmax) -> Iterator[tuple[int, Tensor]]:
    """Give the weights of any number n <= s of the newest queries, a bounded number of them at a time.

    Each time a KV head and what some of the queries of its group give the keys up to the last of them, [G, r, m].
    """
    (num_heads, n, _), (num_kv_heads, s, _) = q.shape, k.shape
    rows = max(LEAST_ROWS, WEIGHTS_AT_ONCE[q.device.type] // (num_heads // num_kv_heads * s))
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        yield from enumerate(last_rows_by_kv_head(q[:, start:stop], k[:, : s - n + stop], softmax))
