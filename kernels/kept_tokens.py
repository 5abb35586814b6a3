"""Which tokens an eviction leaves: the newest, and of those before them the ones that score best.

Shapes: scores [Hk, n] of the tokens before the `recent` newest, 1 <= k, recent <= k <= n + recent -> positions [Hk, k]
int64 among the n + recent, ascending. Ties go to the lower position, as in kernels/topk.py.
"""

from torch import Tensor
from torch.nn import functional

from kvcli.kernels.topk import topk_pages


def kept_tokens(scores: Tensor, recent: int, k: int) -> Tensor:
    """Select with the newest tokens beyond all scores."""
    return topk_pages(functional.pad(scores, (0, recent), value=float("inf")), k).sort(-1).values
