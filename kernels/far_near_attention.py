"""Causal attention to near tokens, and to far ones that stand elsewhere than positions tell (arXiv 2402.04617)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels import attention_rows, few_rows
from kvcli.kernels.attention_rows import TokenSet
from kvcli.kernels.block_attention import add_sinks, attention_scores, block_attention, merge_blocks
from kvcli.kernels.softmax import Softmax


class FarTokens(NamedTuple):
    """The far keys and values l, w [Hk, f, d], f >= 0, and the queries that see them, p [H, m, d].

    For `one_query` they may be those in `rows` [1, f], of l and w [Hk, n, d].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor | None = None


def far_near_attention(q: Tensor, k: Tensor, v: Tensor, far: FarTokens, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attend causally with the newest m tokens to near keys, and to far keys that all of them see.

        s_ij = f(scale * q_i . k_j), near, j <= n - m + i      t_ij = f(scale * p_i . l_j), far
        z_i = log(sum_j e^s_ij + sum_j e^t_ij + e^sink)
        out_i = sum_j e^(s_ij - z_i) v_j + sum_j e^(t_ij - z_i) w_j
        mass_j = sum over all heads, and over i with n - m + i > j, of e^(s_ij - z_i)

    f is the model's softcap. The far keys have a query of their own, p, for they may stand at another distance than
    their position tells. `mass` is the attention that a near token got from those that came after it; only the near
    weights are ever held as a matrix. q [H, m, d], k, v [Hk, n, d], m <= n -> out [H, m, d], mass [n] in at least fp32.
    """
    out, norm = windowed_attention(q, k, v, far, softmax)
    queries = _fold(q, k)
    weights = torch.exp(attention_scores(queries, k, softmax) - norm[..., None])
    later = _band(q.shape[1], k.shape[1], q, above=1).repeat(q.shape[0] // k.shape[0], 1)
    return out, weights.masked_fill(~later, 0.0).sum((0, 1))


def one_query_suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Tell whether `one_query` serves: on a CPU, a single query of each head."""
    return q.shape[1] == 1 and few_rows.suits(_fold(q, k), k, v)


def one_query(q: Tensor, k: Tensor, v: Tensor, far: Sequence[FarTokens], softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Do as `far_near_attention` for m = 1, several sets of far keys, each where it lies: out [H, 1, d], mass [n]."""
    parts = [FarTokens(q, k, v), *far]
    sets = [TokenSet(_fold(each.q, k), each.k, each.v, each.rows) for each in parts]
    attended = attention_rows.attend(sets, softmax)
    out, norm = attended.out, attended.lse
    if softmax.sinks is not None:
        sinks = softmax.sinks.view_as(norm)
        out, norm = add_sinks(out, norm, sinks), torch.logaddexp(norm, sinks)
    mass = attention_rows.mass(attended, norm)
    mass[-1] = 0  # its own
    return out.view_as(q), mass


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, far: FarTokens, softmax: Softmax, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attend so, to no more than the last `window` near keys up to a query's own -> out [H, m, d], z [Hk, G*m]."""
    (m, n), groups = (q.shape[1], k.shape[1]), q.shape[0] // k.shape[0]
    mask = _band(m, n, q, window).repeat(groups, 1) if m > 1 else None
    near = slice(0 if window is None or m > 1 else max(0, n - window), n)
    out, norm = block_attention(_fold(q, k), k[:, near], v[:, near], softmax, mask)  # queries [Hk, G*m, d]
    if far.k.shape[1]:
        out, norm = merge_blocks((out, norm), block_attention(_fold(far.q, k), far.k, far.v, softmax))
    if softmax.sinks is not None:
        sinks = softmax.sinks[:, None].expand(-1, m).reshape(norm.shape)  # [H] -> [Hk, G*m]
        out, norm = add_sinks(out, norm, sinks), torch.logaddexp(norm, sinks)
    return out.reshape(q.shape), norm


def _band(m: int, n: int, like: Tensor, window: int | None = None, above: int = 0) -> Tensor:
    """Keys [m, n] at least `above` tokens before each query, and fewer than `window`."""
    band = torch.ones(m, n, dtype=torch.bool, device=like.device).tril(n - m - above)
    return band if window is None else band.triu(n - m - window + 1)


def _fold(q: Tensor, k: Tensor) -> Tensor:
    return q.reshape(k.shape[0], -1, q.shape[-1])  # [H, m, d] -> [Hk, G*m, d]
