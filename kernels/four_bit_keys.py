"""Keys in four bits a channel, by each token's least and greatest channel (Twilight, section 4).

    z = min      s = (max - min) / 15      code = round((k - z) / s)      k ~ code * s + z
    q . k_t ~ s_t * sum_c q_c code_tc + z_t * sum_c q_c

Shapes: keys [Hk, n, d] -> codes [Hk, n, ceil(d / 2)] uint8, byte j of channel j in its low half and of channel
j + ceil(d / 2) in its high half; ranges [Hk, n, 2], s and z in the dtype of the keys, with which the codes were taken.
The function for a batch on the device has it in front.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kernels import four_bit_rows
from kvcli.kernels._numba import serves
from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.four_bit_rows import LEVELS

FEW = 64  # keys of all heads that one loop is the faster way for


def quantise_four_bit(keys: Tensor, among: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise keys [Hk, n, d]: codes and ranges. `among`: how many keys a KV head has altogether."""
    if keys.shape[0] * keys.shape[1] <= FEW and serves(keys, numbers=among * keys.shape[0] * keys.shape[2]):
        return four_bit_rows.quantise(keys)
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


def quantise_newest_ref(k: Tensor, lengths: Tensor, codes: Tensor, ranges: Tensor) -> None:
    """Quantise sequence by sequence."""
    for b, length in enumerate(lengths.tolist()):
        if length:
            own = quantise_four_bit(k[b][:, None])  # [Hk, 1, ...]
            codes[b, :, length - 1], ranges[b, :, length - 1] = (x[:, 0] for x in own)


@jit
def _newest_kernel(
    k: tl.tensor,
    lengths: tl.tensor,
    codes: tl.tensor,
    ranges: tl.tensor,
    k_batch: tl.tensor,
    k_head: tl.tensor,
    num_tokens: tl.tensor,
    HK: tl.constexpr,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK_Y: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    length = tl.load(lengths + pair // HK)
    if length == 0:
        return
    row = pair.to(tl.int64) * num_tokens + length - 1
    k += (pair // HK).to(tl.int64) * k_batch + (pair % HK).to(tl.int64) * k_head
    j = tl.arange(0, BLOCK_Y)
    first, second = j < BYTES, (j < BYTES) & (BYTES + j < D)
    one = tl.load(k + j, mask=first, other=0.0).to(tl.float32)
    other = tl.load(k + BYTES + j, mask=second, other=0.0).to(tl.float32)
    infinity = float("inf")
    least = tl.minimum(
        tl.min(tl.where(first, one, infinity), axis=0), tl.min(tl.where(second, other, infinity), axis=0)
    )
    most = tl.maximum(
        tl.max(tl.where(first, one, -infinity), axis=0), tl.max(tl.where(second, other, -infinity), axis=0)
    )
    step = ((most - least) / 15.0).to(ranges.dtype.element_ty)  # as it is kept
    zero = least.to(ranges.dtype.element_ty)
    tl.store(ranges + row * 2, step)
    tl.store(ranges + row * 2 + 1, zero)
    step, zero = tl.maximum(step.to(tl.float32), 1.1754943508222875e-38), zero.to(tl.float32)
    # Adding and taking away 1.5 * 2^23 rounds to whole numbers, half to even, as torch does.
    one = tl.minimum(tl.maximum(((one - zero) / step + 12582912.0) - 12582912.0, 0.0), 15.0).to(tl.int32)
    other = tl.minimum(tl.maximum(((other - zero) / step + 12582912.0) - 12582912.0, 0.0), 15.0).to(tl.int32)
    tl.store(codes + row * BYTES + j, (one | (tl.where(second, other, 0) << 4)).to(tl.uint8), mask=first)


def quantise_newest(k: Tensor, lengths: Tensor, codes: Tensor, ranges: Tensor) -> None:
    """Quantise the newest keys k [b, Hk, d] to their place in codes [b, Hk, n, bytes] and ranges [b, Hk, n, 2].

    lengths [b] int32 count them; a sequence of length 0 has none. May be captured in a CUDA graph. Raises ValueError
    for shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_kv_heads, d), (_, _, num_tokens, size) = k.shape, codes.shape
    require("k", k, k.shape)
    require_whole("lengths", lengths, (b,), torch.int32)
    require_whole("codes", codes, (b, num_kv_heads, num_tokens, -(-d // 2)), torch.uint8)
    require_whole("ranges", ranges, (b, num_kv_heads, num_tokens, 2), k.dtype)
    if not takes(k):
        return quantise_newest_ref(k, lengths, codes, ranges)
    launch(
        _newest_kernel,
        (b * num_kv_heads,),
        *(k, lengths, codes, ranges, *k.stride()[:2], num_tokens),
        HK=num_kv_heads,
        D=d,
        BYTES=size,
        BLOCK_Y=power_of_two(size),
        warps=1,
    )
    return None
