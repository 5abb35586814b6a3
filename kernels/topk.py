"""The k best pages of each KV head, ties to the lower page, so that every back end selects the same set.

Shapes: scores [Hk, n], 1 <= k <= n -> pages [Hk, k] int64, ascending.
"""

from torch import Tensor


def topk_pages(scores: Tensor, k: int) -> Tensor:
    """Select by threshold: everything above the k-th best, then the lowest pages that equal it."""
    threshold = scores.topk(k, dim=-1).values[:, -1:]  # [Hk, 1]
    above, equal = scores > threshold, scores == threshold
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    return chosen.nonzero()[:, 1].view(scores.shape[0], k)
