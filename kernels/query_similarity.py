"""How far the query of a step turned since the step before (FreeKV, section 3.3).

Shapes: q, previous [H, d] (post-RoPE) -> similarity [Hk], the cosine of each query head pooled over its group.
"""

from typing import Literal

from torch import Tensor
from torch.nn.functional import cosine_similarity


def query_similarity(q: Tensor, previous: Tensor, num_kv_heads: int, pooling: Literal["mean", "max"]) -> Tensor:
    """Cosine in fp32."""
    cosines = cosine_similarity(q.float(), previous.float(), dim=-1).view(num_kv_heads, -1)  # [Hk, G]
    return cosines.mean(1) if pooling == "mean" else cosines.amax(1)
