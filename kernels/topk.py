"""The k best pages of each KV head, ties to the lower page, so that every back end selects the same set.

Shapes: scores [Hk, n], 1 <= k <= n -> pages [Hk, k] int64, in no particular order.
"""

import torch
from torch import Tensor


def topk_pages(scores: Tensor, k: int) -> Tensor:
    """Select by threshold: everything above the k-th best, then the lowest pages that equal it.

    Where no page outside equals the k-th best, and that is the rule, the plain top-k is the answer.
    """
    if k == scores.shape[-1]:
        return torch.arange(k, device=scores.device).expand(scores.shape)
    best = scores.topk(k + 1, dim=-1)
    if torch.all(best.values[:, k - 1] > best.values[:, k]):
        return best.indices[:, :k]
    threshold = best.values[:, k - 1 : k]  # [Hk, 1]
    above, equal = scores > threshold, scores == threshold
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    return chosen.nonzero()[:, 1].view(scores.shape[0], k)
