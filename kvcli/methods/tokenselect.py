"""TokenSelect: tokens by a vote of all heads, kept while the query stays (arXiv 2411.02886, section 4).

A step scores every token by its exact q.k. Each query head turns its scores to weights over the candidates, and the sum
over all heads of the layer is the vote: a head that is sure of a token counts for more than many that are not. One set
of tokens a layer serves all KV heads. Consecutive queries are much alike, so that the choice is kept for as long as the
layer's query has a cosine of `theta` or more, over all its heads, with the one that chose.

Decided: the scores are scaled as in attention before they become weights (the reference code leaves that out). The
prompt is read exactly, and tokens keep their positions: the paper's selection in prefill, and its queries placed right
behind the window to read past a model's trained length, are not part of this. `theta` is the code's, which runs
without keeping choices, though; one leading layer is dense. All KV stays on the device. In the counters one token of
one KV head is a page of size 1.

    cosine = sum_hc q_hc * p_hc / (|q| * |p|), over all heads in a row; a query of zeros has cosine 0 with everything

Shapes: q [b, H, d] and the query that chose, p [b, H, d] -> turned [b, Hk] bool, the same for all KV heads, and
once more as anew [b, 1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels._triton import jit, launch, power_of_two, require, require_whole, takes, tl
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
from kvcli.models.geometry import LayerGeometry

BLOCK_ELEMENTS = 4096  # of a query that a program looks at together


class KeptQuery(NamedTuple):
    """State of a layer: the query [b, H, d] that chose last, zeros before there is any; and of every sequence [b] int64
    how many steps retrieved, and how many of them chose anew.
    """

    query: Tensor
    layer_steps: Tensor
    choices: Tensor


def turn_from_kept_ref(q: Tensor, kept: KeptQuery, active: Tensor, theta: float, turned: Tensor, anew: Tensor) -> None:
    """All sequences at once, in at least fp32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    new, old = q.flatten(1).to(dtype), kept.query.flatten(1).to(dtype)  # [b, H * d]
    norms = new.square().sum(1) * old.square().sum(1)
    cosine = (new * old).sum(1) * norms.clamp_min(torch.finfo(norms.dtype).tiny).rsqrt()
    chooses = active[:, 0] & ((cosine < theta) | (kept.choices == 0))
    anew.copy_(chooses[:, None])
    turned.copy_(anew.expand_as(turned))
    kept.query.copy_(q.where(chooses[:, None, None], kept.query))
    kept.layer_steps.add_(active[:, 0])
    kept.choices.add_(chooses)


@jit
def _kept_kernel(
    q: tl.tensor,
    query: tl.tensor,
    layer_steps: tl.tensor,
    choices: tl.tensor,
    active: tl.tensor,
    turned: tl.tensor,
    anew: tl.tensor,
    q_batch: tl.tensor,
    q_head: tl.tensor,
    theta: tl.tensor,
    HK: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    b = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_K)
    if tl.load(active + b * HK) == 0:
        tl.store(turned + b * HK + head, head < 0, mask=head < HK)
        tl.store(anew + b, False)
        return
    c = tl.arange(0, BLOCK_D)
    both, new, old = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        inside = (h < H)[:, None] & (c < D)[None, :]
        x = tl.load(q + b * q_batch + h[:, None] * q_head + c[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(query + (b * H + h)[:, None] * D + c[None, :], mask=inside, other=0.0).to(tl.float32)
        both += tl.sum(x * y, axis=0)
        new += tl.sum(x * x, axis=0)
        old += tl.sum(y * y, axis=0)
    norms = tl.maximum(tl.sum(new, axis=0) * tl.sum(old, axis=0), 1.1754943508222875e-38)  # the least normal number
    cosine = tl.sum(both, axis=0) * tl.rsqrt(norms)
    steps, before = tl.load(layer_steps + b), tl.load(choices + b)
    chooses = (cosine < theta) | (before == 0)
    tl.debug_barrier()  # all warps have read the state before one changes it
    tl.store(turned + b * HK + head, tl.where(chooses, head < HK, head < 0), mask=head < HK)
    tl.store(anew + b, chooses)
    tl.store(layer_steps + b, steps + 1)
    tl.store(choices + b, before + chooses.to(tl.int64))
    if chooses:
        for start in range(0, H, BLOCK_H):
            h = start + tl.arange(0, BLOCK_H)
            inside = (h < H)[:, None] & (c < D)[None, :]
            x = tl.load(q + b * q_batch + h[:, None] * q_head + c[None, :], mask=inside, other=0.0)
            tl.store(query + (b * H + h)[:, None] * D + c[None, :], x, mask=inside)


def turn_from_kept(q: Tensor, kept: KeptQuery, active: Tensor, theta: float, turned: Tensor, anew: Tensor) -> None:
    """Tell which sequences choose anew: those whose cosine is below `theta`, and those that have never chosen.

    active [b, Hk] bool, the same for all KV heads of a sequence: the others do nothing. The query of a sequence that
    chooses is kept, and both are counted. May be captured in a CUDA graph.

    Raises ValueError for shapes, dtypes or strides that the kernel cannot read.
    """
    (b, num_heads, d), num_kv_heads = q.shape, active.shape[1]
    require("q", q, (b, num_heads, d))
    require_whole("query", kept.query, q.shape, q.dtype)
    for name, x in (("layer_steps", kept.layer_steps), ("choices", kept.choices)):
        require_whole(name, x, (b,), torch.int64)
    for name, x in (("active", active), ("turned", turned)):
        require_whole(name, x, (b, num_kv_heads), torch.bool)
    require_whole("anew", anew, (b, 1), torch.bool)
    if not takes(q):
        return turn_from_kept_ref(q, kept, active, theta, turned, anew)
    block_d = power_of_two(d)
    launch(
        _kept_kernel,
        (b,),
        *(q, *kept, active, turned, anew, *q.stride()[:2], theta),
        HK=num_kv_heads,
        H=num_heads,
        D=d,
        BLOCK_K=power_of_two(num_kv_heads),
        BLOCK_H=max(1, min(power_of_two(num_heads), BLOCK_ELEMENTS // block_d)),
        BLOCK_D=block_d,
        warps=8,
    )
    return None


class TokenSelectConfig(TokenConfig):
    """Settings of TokenSelect."""

    budget: CountOrShare = setting(2688, "tokens attended per layer and KV head, all included", "tokens", ge=1)
    sink: int = setting(128, "first tokens, always attended", "tokens", ge=0)
    window: int = setting(512, "most recent tokens, always attended", "tokens", ge=0)
    theta: float = setting(0.9, "choose anew below this query cosine; 0 never, 1 always", "cosine", ge=0, le=1)


class TokenSelect(Method[TokenSelectConfig, ChannelScoredCache]):
    """One choice of tokens for all heads, by their vote, and for all steps that ask alike."""

    Config = TokenSelectConfig
    title = "single tokens by a vote of all heads, kept while the query stays"
    paper = "arXiv 2411.02886"
    long_generation = True
    offloads = False
    group_consistent = True
    device_memory = "O(L)"

    def __init__(self, config: TokenSelectConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.steps = self.choices = 0  # layer-steps that retrieved, and those of them that chose anew

    def new_cache(self, layer: LayerGeometry) -> ChannelScoredCache:
        """Keep everything on the device; tokens are scored by their whole keys."""
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
        """Say in how many of the layer-steps that retrieved the choice was made anew."""
        return {"layer_steps": self.steps, "choices": self.choices} if self.steps else {}


@dataclass(frozen=True)
class KeptVote(Rule):
    """The tokens that score best, kept while the layer's query, all heads in a row, has a cosine of `theta` or more.

    It counts the `layer_steps` that retrieved, and those of them whose choice was made anew.
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
        """The cosine below which it chooses anew; 0 and 1 are exact whatever a cosine rounds to."""
        return {0.0: -2.0, 1.0: 2.0}.get(self.theta, self.theta)

    @override
    def over_slots(self, slots: BatchSlots) -> Choice:
        return KeptVoteOverSlots(slots, self.below)


class KeptVoteOverSlots(Choice):
    """The same of a batch."""

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
