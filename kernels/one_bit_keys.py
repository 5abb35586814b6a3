"""Keys as one bit a channel, and scores from these bits (FIER, sections 3.1 and 3.3).

Per channel and group of g consecutive tokens:

    z = (max + min) / 2      s = (max - min) / 2      code = +1 where k >= z, else -1      k~ = code * s + z

so that a score needs the codes alone, with the query scaled once a group instead of the keys once a token:

    q . k~_t = sum_c (q_c s_c) code_tc + q . z
             = 2 * sum of q_c s_c over the channels whose bit is set + q . (z - s)

Shapes: keys [Hk, n, g, d] -> codes [Hk, n, g, ceil(d / 8)] uint8, ranges [Hk, n, 2, d] in the dtype of the keys: s, z.
Bit b of byte j is set where the code of channel 8 * j + b is +1; the bits that stand for no channel are not set.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def quantise_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise and pack full groups: keys [Hk, n, g, d] -> codes, ranges.

    The codes are taken about the z that is stored, so that each is the nearer one of the two values it can mean.
    """
    low, high = (bound.to(_accumulating(keys)) for bound in torch.aminmax(keys, dim=2))  # [Hk, n, d]
    ranges = torch.stack(((high - low) / 2, (high + low) / 2), 2).to(keys.dtype)
    positive = pad(keys >= ranges[:, :, None, 1], (0, -keys.shape[-1] % 8)).view(torch.uint8)  # [Hk, n, g, 8 * bytes]
    codes = positive[..., ::8].clone()
    for bit in range(1, 8):
        codes |= positive[..., bit::8] << bit
    return codes, ranges


def one_bit_scores(q: Tensor, codes: Tensor, ranges: Tensor) -> Tensor:
    """Score every token of every group: q [Hk, G, d] -> [Hk, G, n * g] in at least fp32, unscaled.

    Takes one plane of bits at a time, an eighth of what the quantised keys would be.
    """
    dtype = _accumulating(q)
    queries = q.to(dtype)[:, None]  # [Hk, 1, G, d]
    scale, zero = ranges.to(dtype)[:, :, :, None].unbind(2)  # [Hk, n, 1, d]
    scaled = pad(queries * scale, (0, -q.shape[-1] % 8))  # [Hk, n, G, 8 * bytes]
    scores = (queries * (zero - scale)).sum(-1)[..., None]  # [Hk, n, G, 1]
    for bit in range(8):
        plane = ((codes >> bit) & 1).to(dtype)  # [Hk, n, g, bytes]
        scores = scores + 2 * scaled[..., bit::8] @ plane.transpose(2, 3)
    return scores.transpose(1, 2).flatten(2)  # [Hk, n, G, g] before


def _accumulating(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)
