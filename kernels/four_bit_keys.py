"""Keys in four bits a channel, and scores from these (Twilight, arXiv 2502.02770).

Per token and KV head, with its least and greatest channel: z = min      s = (max - min) / 15

    code = round((k - z) / s)      k~ = code * s + z      q . k~_t = s_t * sum_c q_c code_tc + z_t * sum_c q_c

Shapes: keys [Hk, n, d] -> codes [Hk, n, ceil(d / 2)] uint8, ranges [Hk, n, 2] in the dtype of the keys: s, z.
The low half of byte j is channel j's code, the high half that of channel j + ceil(d / 2).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

LEVELS = 15


def quantise_four_bit(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise and pack: keys [Hk, n, d] -> codes, ranges. The codes are taken with the s and z that are stored."""
    low, high = (bound.to(_accumulating(keys)) for bound in torch.aminmax(keys, dim=-1))  # [Hk, n]
    ranges = torch.stack(((high - low) / LEVELS, low), -1).to(keys.dtype)
    scale, zero = ranges.to(low.dtype)[..., None].unbind(2)  # [Hk, n, 1]
    smallest = torch.finfo(low.dtype).tiny  # a token whose channels are all equal: every code is 0
    codes = ((keys - zero) / scale.clamp_min(smallest)).round().clamp(0, LEVELS).to(torch.uint8)
    first, second = pad(codes, (0, keys.shape[-1] % 2)).chunk(2, -1)
    return first | (second << 4), ranges


def four_bit_scores(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score tokens: q [Hk, G, d], codes [Hk, n, bytes], ranges [Hk, n, 2] -> [Hk, G, n] in at least fp32, unscaled."""
    q = q.to(_accumulating(q))
    first, second = pad(q, (0, q.shape[-1] % 2)).chunk(2, -1)  # [Hk, G, bytes]
    low, high = (half.to(q.dtype).transpose(1, 2) for half in (codes & LEVELS, codes >> 4))
    scale, zero = ranges.to(q.dtype)[:, None].unbind(-1)  # [Hk, 1, n]
    return (first @ low + second @ high) * scale + q.sum(-1, keepdim=True) * zero


def _accumulating(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)
