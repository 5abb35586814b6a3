"""A cuboid that stands for the keys of a page (ArkVale, NeurIPS 2024).

    c = (max + min) / 2      r = mean_t |c - k_t|      bounds c + r, c - r

Narrower than the page's true bounds: a single outlier moves its centre, but hardly its width.
Shapes: keys [Hk, n, p, d] -> digest [Hk, n, 2, d]; [:, :, 0] is c + r, [:, :, 1] is c - r, as `page_summary` has them.
"""

import torch
from torch import Tensor


def cuboid_digest(keys: Tensor) -> Tensor:
    """Digest full pages, in the dtype of the keys."""
    low, high = (bound.to(torch.promote_types(keys.dtype, torch.float32)) for bound in torch.aminmax(keys, dim=2))
    centre = (high + low) / 2  # [Hk, n, d]
    radius = (keys - centre[:, :, None]).abs().mean(2)
    return torch.stack((centre + radius, centre - radius), 2).to(keys.dtype)
