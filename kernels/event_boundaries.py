"""Where a text falls into events: where a token surprises, and where a graph of tokens is split best.

EM-LLM (arXiv 2407.09450, section 3):

    surprise_t = -log p(x_t | x_1 .. x_{t-1})                             boundary where
    surprise_t > mu + gamma * sigma                                       over the tokens before t

    modularity(t)  = 1 / 4m  sum_ij [A_ij - d_i d_j / 2m] delta_ij        2m = sum_ij A_ij, d_i = sum_j A_ij
    conductance(t) = cut(S, V - S) / min(vol(S), vol(V - S))              vol(S) = sum over i, j in S of A_ij

S are the tokens before t, V all of the graph, delta_ij is 1 where i and j are on the same side of t. A good split has
much modularity and little conductance.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Metric = Literal["modularity", "conductance"]

_ROWS_AT_ONCE = 64  # of logits that are held in fp32


def surprise(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """How little each token ids [n] was expected, -log p in nats, by the logits [n, vocab] of it -> [n] in fp64."""
    tokens = torch.tensor(list(ids), dtype=torch.int64, device=logits.device)
    parts = zip(*(torch.split(each, _ROWS_AT_ONCE) for each in (logits, tokens)), strict=True)
    found = [cross_entropy(rows.float(), expected, reduction="none") for rows, expected in parts]
    return torch.cat(found).double()


def surprising(surprises: Tensor, new: int, over: int, gamma: float) -> Tensor:
    """Which of the last `new` of surprises [n] exceed mu + gamma * sigma of the `over` ones before each: bool [new].

    Of fewer where there are fewer; none while there are not two, for sigma divides by one less than their number.
    """
    padded = torch.nn.functional.pad(surprises, (1, 0))
    sums, squares = padded.cumsum(0), padded.square().cumsum(0)
    at = torch.arange(len(surprises) - new, len(surprises), device=surprises.device)
    start = (at - over).clamp(min=0)
    count = at - start
    mean = (sums[at] - sums[start]) / count
    variance = (squares[at] - squares[start] - count * mean.square()).clamp(min=0) / (count - 1)
    return (count > 1) & (surprises[at] > mean + gamma * variance.sqrt())


def split_scores(similarity: Tensor, metric: Metric) -> Tensor:
    """How good it is to split a graph of n tokens, similarity [n, n] symmetric, before token 1 .. n - 1: [n - 1].

    More is better: the modularity, or the conductance with its sign turned. Linear in the entries of the graph.
    """
    total, by_token = similarity.sum(), similarity.sum(0).cumsum(0)[:-1]
    before = similarity.cumsum(0).cumsum(1).diagonal()[:-1]  # within the tokens before the split
    cut = by_token - before
    behind = total - by_token - cut
    if metric == "conductance":
        return -cut / torch.minimum(before, behind)
    expected = (by_token.square() + (total - by_token).square()) / total
    return (before + behind - expected) / (2 * total)


def refined(similarity: Tensor, metric: Metric, first: int, shortest: int, start: int, boundary: int) -> int:
    """Move a boundary back to where its event, which begins at `start` and keeps `shortest` tokens, ends best.

    The graph, similarity [n, n], is that of tokens from position `first` on; the event and half as many on either side
    of it are looked at, as far as they are there.
    """
    half = (boundary - start) // 2
    begin, end = max(first, start - half), min(first + len(similarity), boundary + half)
    part = similarity[begin - first : end - first, begin - first : end - first]
    choices = range(start + shortest, min(boundary, end - 1) + 1)
    if not choices:
        return boundary
    scores = split_scores(part, metric)[choices.start - begin - 1 : choices.stop - begin - 1]
    return choices[int(scores.argmax())]
