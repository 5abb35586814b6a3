"""How large the channels of a head's keys are, where keys are rounded one by one.

Some channels of keys are many times as large as others, in every token. Numbers that share a scale then have an error
as large as the largest of them allows, and where that scale is a token's own, the small channels are lost. So keys are
divided by the sizes of their channels first, which all tokens of a head share (as SmoothAttention does,
QServe, arXiv 2405.04532, which puts them into the weights), and multiplied by them when they are read; or the query is.

RoPE turns channels c and c + d/2 into one another, slowly in some pairs, so that one that is small in the first tokens
is large later: both have the size of the pair. Sizes are powers of two, and dividing by them rounds nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = 128
"""First tokens whose keys say how large channels are."""

LEAST = 1 / 32
"""No channel counts as smaller than this part of the head's mean: what is nearly nothing now may grow."""


def channel_sizes(k: Tensor) -> Tensor:
    """Measure channels by the first tokens of keys k [Hk, n, d]: [Hk, d] fp32."""
    low_half, high_half = k[:, :TOKENS].float().chunk(2, -1)
    pairs = torch.hypot(low_half, high_half).mean(1)  # [Hk, d / 2]
    least = (LEAST * pairs.mean(-1, keepdim=True)).clamp(min=torch.finfo(torch.float16).tiny)
    sizes = torch.exp2(torch.log2(torch.maximum(pairs, least)).round())
    return torch.cat((sizes, sizes), -1)
