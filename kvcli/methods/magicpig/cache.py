"""The cache of MagicPIG: tokens sampled from host memory by their hashes; sinks and recent tokens on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import TokenSet, attend_sets
from kvcli.kernels.page_table import EMPTY
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import Tiers, both
from kvcli.kv.tokens import TokensOnHost
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Traffic, nbytes
from kvcli.methods.magicpig.kernels import (
    BLOCK,
    TABLES,
    colliding,
    directions,
    key_codes,
    lay,
    log_counts,
    query_codes,
    sampling_chance,
)
from kvcli.sizes import slices

PIECE = 1024
"""Keys hashed at once: their projections take much memory."""

LEAST_CHANCE = 1e-4
"""Lower bound of a token's chance, so that its weight is bounded; the reference code adds as much to all chances."""


class Hashing(NamedTuple):
    """`tables` (L) of hashes of `bits` (K) each; whether keys are `centred` by the prompt's mean; and a seed."""

    bits: int
    tables: int
    centred: bool
    seed: int


class Sample(NamedTuple):
    """The sample of the KV heads: k, v [Hk, m, d]; each query head counts those marked in `own` [Hk, G, m].

    `counts` are the tokens of each KV head; entries beyond them are ignored. Where all tokens are in place, k and v are
    all of them, and the sample is in `rows` [Hk, m].
    """

    k: Tensor
    v: Tensor
    own: Tensor
    counts: list[int]
    rows: Tensor | None = None


class SampledTokenCache(TokensOnHost):
    """The cache of a layer: all KV, and `codes` [Hk, blocks, W, K, BLOCK] uint8 of far tokens, in host memory.

    Far tokens are those between sinks and window, which lie on the device. `centre` [Hk, d], also on the device, is the
    mean key of the prompt's far tokens (of all where there are none), in fp32. Keys are hashed as they will be read.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, capacity: int, near: tuple[int, int], hashing: Hashing, tiers: Tiers
    ):
        """Allocate; `near` are the numbers of sinks and of recent tokens."""
        sink, window = near
        super().__init__(num_kv_heads, head_dim, capacity, sink, window, tiers)
        self.hashing, self.hashed = hashing, 0
        far = max(0, capacity - sink - window)
        blocks, words = -(-far // BLOCK), -(-hashing.tables // TABLES)
        self.codes = tiers.on_host(num_kv_heads, blocks, words, hashing.bits, BLOCK, dtype=torch.uint8)
        self.centre = tiers.on_device(num_kv_heads, head_dim, dtype=torch.float32).zero_()

    @override
    def waiting(self) -> Sequence[Tensor]:
        return (self.near.kv,)

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        self.length = k.shape[1]
        self.near.load(k, v)
        written, self.taken = self.take(k, v), 0
        far = slice(self.near.sink, self.near.sink + self.near.dropped)
        if self.hashing.centred:
            self.centre[:] = (k[:, far] if self.near.dropped else k).mean(1, dtype=torch.float32)
        return written + self._hash(k[:, far])

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        """Store the current token, and hash the one that leaves the window."""
        written = self.pool.write(self.length, k[:, None, None], v[:, None, None])
        if self.length >= self.near.sink + self.near.window:
            row = self.near.row_of(self.length)
            written += self._hash(self.near.k[:, row : row + 1])
        self.length += 1
        return written + self.near.append(k, v)

    def sample(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """List the far tokens that the query heads of q [H, d] sample, in host memory.

        Returns the tokens that any query head of a KV head samples, [Hk, m], padded with EMPTY, and which query heads
        do, bool [Hk, G, m].
        """
        heads = q.view(len(self.codes), -1, q.shape[-1])
        codes = query_codes(heads, self._directions(q), self.hashing.tables).to(self.codes.device)
        return colliding(codes, self.codes[:, : -(-self.hashed // BLOCK)], self.hashed, self.near.sink)

    def recall(self, tokens: Tensor, own: Tensor) -> tuple[Sample, int]:
        """Bring a sample to the device; also returns the bytes moved.

        Tokens read in place count as if they had been moved.
        """
        device, there = self.centre.device, tokens != EMPTY
        self.chosen, counts = tokens.to(device), there.sum(1).tolist()
        moved = sum(counts) * self.pool.block_bytes
        if (held := self.in_place) is not None:
            return Sample(*held, own, counts, tokens.clamp_min(0)), moved
        heads, rows = there.nonzero(as_tuple=True)
        near = self.near.kv  # [t, Hk, .., d]
        kv = near.new_empty(*near.shape[:2], tokens.shape[1], near.shape[3])
        for head, count in enumerate(counts):
            kv[:, head, count:] = 0
        self.pool.bring(tokens[heads, rows].to(device), heads.to(device), kv[:, :, :, None], rows.to(device))
        return Sample(*both(kv), own.to(device), counts), moved

    def attend_sample(self, q: Tensor, sample: Sample, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to sinks and window, and to each sampled token 1 / chance times; return [H, d]."""
        heads = q.view(len(sample.k), -1, q.shape[-1])  # [Hk, G, d]
        chances = self.hashing.bits, self.hashing.tables, LEAST_CHANCE
        counts = log_counts(heads, sample.k, self.centre, sample.own, *chances, sample.rows)  # [Hk, G, m]
        near = TokenSet(heads, *self.near.resident())
        return attend_sets(q, [near, TokenSet(heads, sample.k, sample.v, sample.rows, log_counts=counts)], softmax)

    @override
    def attended(self) -> Tensor:
        return self.with_chosen(self.near.attended())

    @override
    def footprint(self) -> Footprint:
        beside = Footprint(device=nbytes(self.centre), host=nbytes(self.codes))
        return self.near.footprint() + self.pool.footprint() + beside

    @override
    def traffic(self, length: int) -> Traffic:
        """Estimate a step whose keys are all at right angles to every query; nearer keys are sampled more often.

        The hash codes count as scored, although the host reads them.
        """
        far = max(0, length - self.near.sink - self.near.window)
        sampled = math.ceil(far * float(sampling_chance(torch.zeros(()), self.hashing.bits, self.hashing.tables)))
        return Traffic(
            attended=self.near.traffic(length).attended + sampled * nbytes(self.near.kv[:, :, :1]),
            scored=far * self._code_bytes,
            scores=far * len(self.codes),
            recalled=0 if self.in_place is not None else sampled * self.pool.page_bytes,
        )

    def settled(self) -> list[Settled]:
        """Return the codes, which do not change."""
        return [Settled(self.codes, 1, self.hashed // BLOCK, -(-self.hashed // BLOCK))]

    def _hash(self, keys: Tensor) -> int:
        """Hash the next keys [Hk, n, d], as they will be read; return the bytes moved."""
        form, sizes = self.pool.format, self.pool.sizes
        for part in slices(keys.shape[1], PIECE):
            held = keys[:, part]
            if form is not None and sizes is not None:
                held = form.rounded(held[:, :, None], sizes=sizes[:, None, None])[:, :, 0]
            centred = held.float() - self.centre[:, None]
            codes = key_codes(centred, self._directions(keys))
            lay(codes, self.codes, self.hashed)
            self.hashed += codes.shape[1]
        return keys.shape[1] * self._code_bytes

    @property
    def _code_bytes(self) -> int:
        """Bytes of codes per token, for all KV heads."""
        heads, _, words, bits, _ = self.codes.shape
        return heads * words * bits

    def _directions(self, like: Tensor) -> Tensor:
        return directions(like.shape[-1], self.hashing.tables, self.hashing.bits, self.hashing.seed, like.device)
