"""How far the query of a step turned since the step before (FreeKV, section 3.3).

Shapes: q, previous [H, d] (post-RoPE) -> similarity [Hk], the cosine of each query head pooled over its group.
"""

from typing import Literal

import torch
from torch import Tensor


def query_similarity(q: Tensor, previous: Tensor, num_kv_heads: int, pooling: Literal["mean", "max"]) -> Tensor:
    """Cosine in fp32; a query of zeros has cosine 0 with everything."""
    q, previous = q.float(), previous.float()
    norms = q.square().sum(-1) * previous.square().sum(-1)
    cosines = (q * previous).sum(-1) * norms.clamp_min(torch.finfo(norms.dtype).tiny).rsqrt()  # [H]
    cosines = cosines.view(num_kv_heads, -1)  # [Hk, G]
    return cosines.mean(1) if pooling == "mean" else cosines.amax(1)
