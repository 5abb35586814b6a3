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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.query_similarity import query_similarity
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import Selection, topk_pages_device
from kvcli.kv.tokens import ChannelScoredCache
from kvcli.methods.config import CountOrShare, TokenConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.step import (
    BatchSlots,
    Choice,
    Chosen,
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


class TokenSelect(Method[TokenSelectConfig, ChannelScoredCache]):
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

    def new_cache(self, layer: LayerGeometry) -> ChannelScoredCache:
        """Make a cache that keeps everything on the device; tokens are scored by all channels of their keys."""
        heads, d, context = layer.num_kv_heads, layer.head_dim, self.context
        return ChannelScoredCache(heads, d, context.capacity, self.config.tokens, d, context.tiers)

    @property
    @override
    def step_plan(self) -> StepPlan:
        return StepPlan(KeyChannels(None, "mean_s", together=True), KeptVote(self.config.theta))

    @override
    def take_tally(self, layer: int, tally: Mapping[str, int]) -> None:
        self.steps += tally["layer_steps"]
        self.choices += tally["choices"]

    def statistics(self) -> dict[str, Any]:
        """Return how many layer-steps retrieved, and how many of them chose anew."""
        return {"layer_steps": self.steps, "choices": self.choices} if self.steps else {}


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
