"""Tokens in host memory that come to the device layer by layer; the newest token is stored there.

    bring_tokens   host, lengths               -> out[i, :, :n_i]         n_i = max(0, length_i - missing)
    store_newest   new token, lengths          -> host[i][:, length_i - 1]

The kernels access pinned memory directly, so that no call depends on a length: a step can be a CUDA graph. A few
programs share the transfer, one block each at a time, which keeps the bus busy and leaves the other multiprocessors to
the computation.

Shapes: host tokens of sequence i [t, capacity_i, Hk, d], where t is 2 for keys and values, 1 where both are the same;
lengths [b] int32, zero for a sequence that takes no part; out [b, t, rows, Hk, d], rows >= capacity_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl
from kvcli.kernels.append import NewToken
from kvcli.kernels.recall import ALIGNMENT

PROGRAMS = 32
"""Programs that share the transfer: with a block each, half a mebibyte of 16-bit numbers is in flight."""

BLOCK = 8192  # numbers held at once per program


@dataclass(frozen=True)
class HostTokens:
    """Tokens of every sequence, kept alive here, and the `addresses` [b, t] int64 of their parts on the device."""

    tokens: Sequence[Tensor]
    addresses: Tensor

    @classmethod
    def of(cls, tokens: Sequence[Tensor], device: torch.device) -> HostTokens:
        """Take the tokens of a layer, [t, capacity, Hk, d] for each sequence.

        Raises ValueError if they differ in more than their capacity, have gaps, or are not aligned to 16 bytes.
        """
        first = tokens[0]
        for each in tokens:
            alike = each.shape[::2] == first.shape[::2] and each.shape[3] == first.shape[3]
            if not alike or each.dtype != first.dtype or not each.is_contiguous():
                raise ValueError(f"tokens {tuple(each.shape)} of {each.dtype} do not go with the first ones")
        table = [[part.data_ptr() for part in each] for each in tokens]
        if any(address % ALIGNMENT for row in table for address in row):
            raise ValueError(f"tokens lie at an address that {ALIGNMENT} does not divide")
        return cls(tokens, torch.tensor(table, dtype=torch.int64, device=device))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sequences, parts of a token, KV heads, head dimension."""
        parts, _, num_kv_heads, d = self.tokens[0].shape
        return len(self.tokens), parts, num_kv_heads, d

    @property
    def longest(self) -> int:
        """The most tokens that a sequence has room for."""
        return max(each.shape[1] for each in self.tokens)


def bring_tokens_ref(host: HostTokens, lengths: Tensor, out: Tensor, missing: int = 0) -> None:
    """Reference of `bring_tokens`: sequence by sequence."""
    for tokens, length, rows in zip(host.tokens, lengths.tolist(), out, strict=True):
        there = max(0, length - missing)
        rows[:, :there] = tokens[:, :there]


def store_newest_ref(host: HostTokens, new: NewToken, lengths: Tensor) -> None:
    """Reference of `store_newest`: sequence by sequence."""
    for tokens, length, k, v in zip(host.tokens, lengths.tolist(), new.k, new.v, strict=True):
        if length:
            for part, x in zip(tokens, (k, v), strict=False):
                part[length - 1] = x


@jit
def _bring_kernel(
    addresses: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    out_batch: tl.tensor,
    out_part: tl.tensor,
    missing: tl.tensor,
    programs: tl.tensor,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.arange(0, BLOCK)
    for pair in range(B * PARTS):
        count = tl.maximum(tl.load(lengths + pair // PARTS) - missing, 0).to(tl.int64) * WIDTH
        # A hint on the pointer, as in `gather_pages`.
        source = tl.multiple_of(tl.load(addresses + pair).to(tl.pointer_type(out.dtype.element_ty)), 16)
        target = out + pair // PARTS * out_batch.to(tl.int64) + pair % PARTS * out_part.to(tl.int64)
        for block in range(tl.program_id(0), tl.cdiv(count, BLOCK).to(tl.int32), programs):
            at = tl.full([], block, tl.int64) * BLOCK + i
            tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


@jit
def _store_kernel(
    addresses: tl.tensor,
    lengths: tl.tensor,
    new_k: tl.tensor,
    new_v: tl.tensor,
    new_batch: tl.tensor,
    new_head: tl.tensor,
    HK: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    pair = tl.program_id(0)  # a KV head of a sequence
    b, h = pair // HK, pair % HK
    length = tl.load(lengths + b)
    if length == 0:
        return
    c = tl.arange(0, BLOCK_D)
    here = b.to(tl.int64) * new_batch + h * new_head + c
    there = (length - 1).to(tl.int64) * HK * D + h * D + c
    keys = tl.load(addresses + b * PARTS).to(tl.pointer_type(new_k.dtype.element_ty))
    tl.store(keys + there, tl.load(new_k + here, mask=c < D), mask=c < D)
    if PARTS == 2:
        values = tl.load(addresses + b * PARTS + 1).to(tl.pointer_type(new_k.dtype.element_ty))
        tl.store(values + there, tl.load(new_v + here, mask=c < D), mask=c < D)


def bring_tokens(host: HostTokens, lengths: Tensor, out: Tensor, missing: int = 0, programs: int = PROGRAMS) -> None:
    """Copy the first tokens of every sequence, `lengths` minus the newest `missing` ones, to `out`.

    Rows after them stay as they are. Can be captured in a CUDA graph.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (b, parts, num_kv_heads, d), rows = host.shape, out.shape[2]
    require("out", out, (b, parts, rows, num_kv_heads, d), host.tokens[0].dtype)
    require_whole("lengths", lengths, (b,), torch.int32)
    if rows < host.longest or out.stride()[2:] != (num_kv_heads * d, d, 1):
        raise ValueError(f"out {tuple(out.shape)} with strides {out.stride()} has no place for {host.longest} tokens")
    if not takes(out):
        return bring_tokens_ref(host, lengths, out, missing)
    launch(
        _bring_kernel,
        (programs,),
        *(host.addresses, lengths, out, *out.stride()[:2], missing, programs),
        B=b,
        PARTS=parts,
        WIDTH=num_kv_heads * d,
        BLOCK=BLOCK,
        warps=8,
    )
    return None


def store_newest(host: HostTokens, new: NewToken, lengths: Tensor) -> None:
    """Write the newest token of every sequence to host memory, at its length minus one; length 0 has none.

    Can be captured in a CUDA graph; the host's copy is valid once the kernel has finished.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    b, parts, num_kv_heads, d = host.shape
    for name, x in (("new k", new.k), ("new v", new.v)):
        require(name, x, (b, num_kv_heads, d), host.tokens[0].dtype)
    require_whole("lengths", lengths, (b,), torch.int32)
    if not takes(new.k):
        return store_newest_ref(host, new, lengths)
    launch(
        _store_kernel,
        (b * num_kv_heads,),
        *(host.addresses, lengths, new.k, new.v, *new.k.stride()[:2]),
        HK=num_kv_heads,
        PARTS=parts,
        D=d,
        BLOCK_D=power_of_two(d),
    )
    return None
