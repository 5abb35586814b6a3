"""Per-channel bounds of the keys of a page (Quest, section 3.2; FreeKV, section 3.2).

Shapes: keys [Hk, n, p, d] -> summary [Hk, n, 2, d]; [:, :, 0] is the maximum, [:, :, 1] the minimum over the page.
"""

import torch
from torch import Tensor


def page_summary(keys: Tensor) -> Tensor:
    """Summarise full pages; a partly filled page has no summary."""
    low, high = torch.aminmax(keys, dim=2)
    return torch.stack((high, low), dim=2)
