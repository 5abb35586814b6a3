"""YAKV: single tokens chosen by keys of two bits per channel, KV in host memory (arXiv 2604.08426).

A task that needs much of its context at once shows what summaries of several tokens miss, and what keys of low rank
lose. So every token has a code of its own: its key after a Hadamard transform, two bits per channel and one size. A
step scores all tokens by their codes, which stay on the device, and recalls keys and values of the best from host
memory.

Decided: a channel has a code of its own, with the levels that are best for a normal variable; the reference code gives
four channels one of 256 vectors, which takes as many bits and is about as close. The transform is that of the channels
of a KV head, the code's that of a token's KV heads together. Ours: codes are those of keys less their mean over the
prompt (`centred`), as MagicPIG hashes them. Adding one vector to all keys changes no attention, and without it two bits
tell more. As in the code, scores are turned into weights and each KV head takes the largest of its query heads; the
code chooses for the prompt alone, and keeps generated tokens on the device. Host memory holds keys and values as
computed, where the paper's have four bits: `kv_dtype` quantises them. The paper's budget is 3 % of the context, with 64
recent tokens. In the counters one token of one KV head is a page of size 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.group_pooling import Pooling, pool_queries, pool_scores
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import Tiers
from kvcli.kv.tokens import OffloadedTokenCache, TokenBudget, TokenIndex
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Traffic, nbytes
from kvcli.methods.config import CountOrShare, HostKVConfig, TokenConfig, setting
from kvcli.methods.contract import Method
from kvcli.methods.pariskv.kernels import rotation
from kvcli.methods.step import FromHost, Index, StepPlan
from kvcli.methods.yakv.kernels import PER_BYTE, encode_two_bits, two_bit_products
from kvcli.models.geometry import LayerGeometry
from kvcli.sizes import slices

PIECE = 4096
"""Tokens whose keys are encoded at once; bounds the fp32 copies."""


class TwoBitIndex(TokenIndex):
    """Codes of all keys on the device: `codes` [Hk, capacity, w / 4] uint8 and `sizes` [Hk, capacity] fp32.

    `centre` [Hk, d] fp32 is subtracted from keys before they are encoded.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, centred: bool, seed: int, tiers: Tiers):
        self.centred, self.seed, self.filled = centred, seed, 0
        width = rotation(head_dim, seed, torch.device("cpu")).shape[1]
        self.codes = tiers.on_device(num_kv_heads, capacity, width // PER_BYTE, dtype=torch.uint8)
        self.sizes = tiers.on_device(num_kv_heads, capacity, dtype=torch.float32)
        self.centre = tiers.on_device(num_kv_heads, head_dim, dtype=torch.float32).zero_()

    @override
    def fill(self, first: int, keys: Tensor) -> None:
        """Encode keys [Hk, n, d] from token `first` on; those of the prompt, from 0 on, also set the centre."""
        if first == 0 and self.centred and keys.shape[1]:
            self.centre[:] = keys.mean(1, dtype=torch.float32)
        turn = rotation(keys.shape[-1], self.seed, keys.device)
        for part in slices(keys.shape[1], PIECE):
            self.filled = first + part.stop
            new = slice(first + part.start, self.filled)
            rotated = (keys[:, part].float() - self.centre[:, None]) @ turn
            self.codes[:, new], self.sizes[:, new] = encode_two_bits(rotated)

    def products(self, heads: Tensor, tokens: range) -> Tensor:
        """Estimate the products of queries [Hk, G, d] with consecutive tokens: [Hk, G, len(tokens)] in fp32."""
        heads = heads.float()
        found = two_bit_products(heads @ rotation(heads.shape[-1], self.seed, heads.device), *self._held, tokens)
        return found + heads @ self.centre[..., None]

    @property
    def _held(self) -> tuple[Tensor, Tensor]:
        return self.codes, self.sizes

    def tensors(self) -> dict[str, Tensor]:
        """Return the indexed tensors by name."""
        return {"codes": self.codes, "sizes": self.sizes, "centre": self.centre}

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold these tensors instead of the present ones."""
        self.codes, self.sizes, self.centre = tensors["codes"], tensors["sizes"], tensors["centre"]

    @override
    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        tokens = budget.candidates(length)
        held = nbytes(*(each[:, tokens.start : tokens.stop] for each in self._held))
        return Traffic(scored=held, scores=4 * len(self.codes) * len(tokens))

    def settled(self) -> list[Settled]:
        """Return the codes, which do not change."""
        return [Settled(each, 1, self.filled) for each in self._held]

    @override
    def nbytes(self) -> int:
        return nbytes(*self.tensors().values())


class YAKVConfig(HostKVConfig, TokenConfig):
    """Settings of YAKV; defaults: 3 % of 64K tokens, and 64 recent ones, as in the paper's evaluation."""

    budget: CountOrShare = setting(2048, "tokens attended per layer and KV head, all included", "tokens", ge=1)
    window: int = setting(64, "most recent tokens, always attended", "tokens", ge=0)
    pooling: Pooling = setting("max_s", "how token scores are pooled over the query heads of a KV head")
    centred: bool = setting(True, "encode keys less their mean over the prompt")
    seed: int = setting(0, "what the signs of the transform are drawn by", ge=0)


class YAKV(Method[YAKVConfig, OffloadedTokenCache[TwoBitIndex]]):
    """Selects single tokens anew at every step."""

    Config = YAKVConfig
    title = "single tokens scored by keys of two bits per channel"
    paper = "arXiv 2604.08426"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(B + 0.07·L)"
    ablation: ClassVar[dict[str, dict[str, Any]]] = {"without centring": {"centred": False}}

    def new_cache(self, layer: LayerGeometry) -> OffloadedTokenCache[TwoBitIndex]:
        """Make a cache with everything in host memory; on the device a budget of tokens and the codes of all keys."""
        heads, d, capacity = layer.num_kv_heads, layer.head_dim, self.context.capacity
        config, tiers = self.config, self.config.tiers(self.context.tiers)
        index = TwoBitIndex(heads, d, capacity, config.centred, config.seed, tiers)
        return OffloadedTokenCache(heads, d, capacity, config.tokens, index, tiers)

    @cached_property
    @override
    def plan(self) -> StepPlan:
        """Like a `step_plan`, but no CUDA graph can run it: the codes have no kernel over slots."""
        return StepPlan(TwoBits(self.config.pooling), fetch=FromHost())


@dataclass(frozen=True)
class TwoBits(Index):
    """Scores by the codes of a `TwoBitIndex`, pooled over the query heads of a KV head."""

    pooling: Pooling

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        heads = pool_queries(q.view(len(cache.index.codes), -1, q.shape[-1]), self.pooling)
        return pool_scores(softmax.scale * cache.index.products(heads, candidates), self.pooling)
