"""TokenSelect: tokens by a vote of all heads, kept while the query stays similar (arXiv 2411.02886, section 4).

A step scores every token by its exact q.k. Each query head turns its scores into weights over the candidates, and the
vote is their sum over all heads of the layer: a head that is sure of a token counts for more than many that are not.
One set of tokens per layer serves all KV heads. Consecutive queries are similar, so the choice is kept for as long as
the layer's query, over all its heads, has a cosine of `theta` or more with the one that chose.

Decided: the scores are scaled as in attention before they become weights (the reference code leaves that out). The
prompt is read exactly, and tokens keep their positions: the paper's selection in prefill, and its queries placed right
after the window to read past a model's trained length, are not part of this. `theta` is the code's default, although
the code runs without keeping choices; one leading layer is dense. All KV stays on the device. In the counters one token
of one KV head is a page of size 1.

On a CPU `kv_dtype` quantises the KV: tokens are scored by their rounded keys in place. A chosen token is dequantised
when it is chosen, and stays so until it leaves the choice. Sinks and window are as computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import products_quantised_cpu, quantised_loops_suit
from kvcli.kernels.query_similarity import query_similarity
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores
from kvcli.kernels.topk import Selection, topk_pages_device
from kvcli.kv.tokens import ChannelScoredCache, KeysInPlace, OffloadedTokenCache, TokenBudget
from kvcli.memory.host_pool import HostPagePool
from kvcli.memory.tiers import Traffic
from kvcli.methods.config import CountOrShare, TokenConfig, quantised, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.step import (
    RESIDENT,
    BatchSlots,
    Choice,
    Chosen,
    FromHost,
    KeyChannels,
    LayerStep,
    Picked,
    Rule,
    ScoredIndex,
    StepIndex,
    StepPlan,
)
from kvcli.methods.tokenselect.kernels import KeptQuery, turn_from_kept
from kvcli.models.geometry import LayerGeometry


class TokenSelectConfig(TokenConfig):
    """Settings of TokenSelect; defaults: section 5, 2048 tokens with 128 first and 512 recent ones."""

    budget: CountOrShare = setting(2688, "tokens attended per layer and KV head, all included", "tokens", ge=1)
    sink: int = setting(128, "first tokens, always attended", "tokens", ge=0)
    window: int = setting(512, "most recent tokens, always attended", "tokens", ge=0)
    theta: float = setting(0.9, "choose again below this query cosine; 0 never, 1 always", "cosine", ge=0, le=1)
    kv_dtype: Literal["auto", "int8", "k8v4"] = setting(
        "auto", "on a CPU, KV of the layers that select: auto as computed, int8, or k8v4 (keys in 8 bits, values in 4)"
    )

    @property
    @override
    def cpu_only(self) -> str | None:
        return None if self.kv_dtype == "auto" else f"kv_dtype {self.kv_dtype}"

    @property
    @override
    def stays_in_place(self) -> bool:
        return self.kv_dtype == "auto" and super().stays_in_place


class TokenSelect(Method[TokenSelectConfig, ChannelScoredCache | OffloadedTokenCache["QuantisedKeys"]]):
    """Selects one set of tokens for all heads by their vote, and keeps it while queries stay similar."""

    Config = TokenSelectConfig
    title = "single tokens by a vote of all heads; reselected when the query changes"
    paper = "arXiv 2411.02886"
    long_generation = True
    offloads = False
    group_consistent = True
    device_memory = "O(L)"

    def __init__(self, config: TokenSelectConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.steps = self.choices = 0  # layer-steps that retrieved, and those of them that chose anew

    def new_cache(self, layer: LayerGeometry) -> ChannelScoredCache | OffloadedTokenCache[QuantisedKeys]:
        """Make a cache that keeps everything on the device, or everything quantised; whole keys score their tokens.

        Raises:
            KvcliError: a model with one latent per token is to be quantised (usage).
        """
        heads, d, capacity, budget = layer.num_kv_heads, layer.head_dim, self.context.capacity, self.config.tokens
        held, tiers = self.config.kv_dtype, self.context.tiers
        if held == "auto":
            return ChannelScoredCache(heads, d, capacity, budget, d, tiers)
        index = QuantisedKeys()
        cache = OffloadedTokenCache(heads, d, capacity, budget, index, quantised(tiers, held))
        index.pool = cache.pool
        return cache

    @property
    @override
    def step_plan(self) -> StepPlan:
        fetch = RESIDENT if self.config.kv_dtype == "auto" else FromHost()
        return StepPlan(KeyChannels(None, "mean_s", together=True), KeptVote(self.config.theta), fetch=fetch)

    @override
    def take_tally(self, layer: int, tally: Mapping[str, int]) -> None:
        self.steps += tally["layer_steps"]
        self.choices += tally["choices"]

    def statistics(self) -> dict[str, Any]:
        """Return how many layer-steps retrieved, and how many of them chose anew."""
        return {"layer_steps": self.steps, "choices": self.choices} if self.steps else {}


class QuantisedKeys(KeysInPlace):
    """Scores tokens by all channels of their quantised keys, where these lie, in the `pool` of a cache on a CPU."""

    pool: HostPagePool

    def scores(self, q: Tensor, tokens: range, scale: float) -> Tensor:
        """Score consecutive tokens with q [H, d] for every query head; return [Hk, G, len(tokens)] in fp32."""
        form, sizes = self.pool.format, self.pool.sizes
        assert form is not None
        assert sizes is not None
        (heads, d), found = sizes.shape, []
        queries = q.view(heads, -1, d).float() * sizes[:, None]
        for blocks in self.pool.held(tokens.start, tokens.stop):  # [n, Hk, bytes]
            if quantised_loops_suit(queries, blocks):
                found.append(products_quantised_cpu(queries, blocks, form).mul_(scale))
                continue
            numbers = queries.new_empty(blocks.shape[0] * heads, form.parts, 1, d)
            form.dequantise(blocks.flatten(0, 1), numbers)
            keys = numbers[:, 0].view(-1, heads, d).transpose(0, 1)
            found.append(token_scores(queries.flatten(0, 1), keys, scale))
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    @override
    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        form, candidates = self.pool.format, len(budget.candidates(length))
        assert form is not None
        token = self.pool.page_shape[0] * (form.widths[0] + 4 * form.scales[0])
        return Traffic(scored=candidates * token, scores=4 * self.pool.page_shape[0] * candidates)


@dataclass(frozen=True)
class KeptVote(Rule):
    """Chooses the best scores, and keeps the choice while the layer's query has a cosine of `theta` or more.

    The cosine is over all heads concatenated. Counts the `layer_steps` that retrieved, and the `choices` made anew.
    """

    theta: float

    @override
    def pick(self, step: LayerStep, q: Tensor) -> Picked:
        kept, anew = step.kept, self._turned(step, q)
        if kept.picked is None or anew:
            tokens = step.best(step.scores(q), step.cache.selected)  # [1, k]
            kept.query, kept.picked = q.clone(), Picked(tokens.expand(step.cache.k.shape[0], -1))
        step.tally(layer_steps=1, choices=int(anew))
        return kept.picked

    def _turned(self, step: LayerStep, q: Tensor) -> bool:
        last = step.kept.query
        if last is None:
            return True
        with step.span("score"):
            return bool(query_similarity(q.view(1, -1), last.view(1, -1), 1, "mean") < self.below)

    @property
    def below(self) -> float:
        """The cosine below which it chooses anew.

        0 and 1 map beyond the range of a cosine, so that rounding cannot change "never" and "always".
        """
        return {0.0: -2.0, 1.0: 2.0}.get(self.theta, self.theta)

    @override
    def over_slots(self, slots: BatchSlots) -> Choice:
        return KeptVoteOverSlots(slots, self.below)


class KeptVoteOverSlots(Choice):
    """`KeptVote` for a batch."""

    def __init__(self, slots: BatchSlots, below: float):
        self.below = below
        b, num_kv_heads, device = *slots.rows.k.shape[:2], slots.rows.k.device
        counts = torch.zeros(2, b, dtype=torch.int64, device=device)
        self.kept = KeptQuery(torch.empty(0), *counts)
        self.tally = {"layer_steps": counts[0], "choices": counts[1]}
        self.selected = torch.full((b, 1, slots.rows.layout.selected), -1, dtype=torch.int32, device=device)
        self.turned = torch.empty(b, num_kv_heads, dtype=torch.bool, device=device)
        self.anew = torch.empty(b, 1, dtype=torch.bool, device=device)
        self.arrived = torch.zeros(b, dtype=torch.int32, device=device)

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        assert isinstance(index, ScoredIndex)
        if self.kept.query.numel() == 0:
            self.kept = self.kept._replace(query=torch.zeros_like(q, memory_format=torch.contiguous_format))
        turn_from_kept(q, self.kept, heads, self.below, self.turned, self.anew)
        votes = index.scores(q, softmax, self.turned)  # [b, 1, n]
        topk_pages_device(votes, *index.scored, Selection(self.selected), self.anew, arrived=self.arrived)
        return Chosen(self.selected.repeat(1, heads.shape[1], 1))
