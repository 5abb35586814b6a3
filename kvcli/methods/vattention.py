"""vAttention: the best tokens, and a sample that stands for all the others (arXiv 2510.05688, section 4).

Where attention is spread over many tokens, the best few are a poor substitute for all of them. So beside sinks, window
and the best tokens a step reads a random sample of the rest, each weighted by the inverse of its chance. Numerator and
denominator of attention are then right on average, whatever is left out. With chance pi_j of token j (1 where it is
certain), score s_j and value v_j:

    a_j = e^(s_j) / pi_j / sum_i e^(s_i) / pi_i      out = sum_j a_j v_j
    variance = sum_j (1 - pi_j) a_j^2 |v_j - out|^2      bound = Phi^-1(1 - delta / 2) sqrt(variance) / |out|

The bound is on the relative error of the output of a query head. It holds with a probability of 1 - delta as far as the
central limit theorem goes and the sample shows the variance. The paper bounds numerator and denominator so, and makes
the sample as large as a given bound needs; here the budget is given, and the statistics tell the bound of the output.

All KV lies in host memory. The device has a budget of tokens, and keys of two bits per channel (`yakv`), which estimate
all scores: the paper takes any estimate.

A part `heavy` of the places that are left goes to the best tokens, the others are drawn evenly.

Ours: `draw` weighted (profile `vattention-weighted`) makes chances proportional to the estimated weights, the mean over
the query heads of a KV head, up to 1: the tokens that reach 1 are the best ones, and how many these are depends on how
spread attention is. A part `even` of the chances is the same for all tokens, so that no weight grows without bound
where an estimate is too small.
Decided: a sample is drawn systematically in the order of the text, for each KV head with one random number from `seed`,
layer and length; the paper draws independently for each query head. That spreads a sample over the text, and its
variance is no larger than the formula's as far as neighbours are alike. In the counters one token of one KV head is a
page of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvcli.kernels.block_attention import attention_scores
from kvcli.kernels.decode_attention import TokenSet, attend_sets
from kvcli.kernels.softmax import Softmax
from kvcli.kv.tokens import OffloadedTokenCache
from kvcli.methods.config import CountOrShare, HostKVConfig, TokenConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.yakv.method import TwoBitIndex
from kvcli.models.geometry import LayerGeometry

NEARLY = 1 - 1e-5
"""A chance above it is 1: added up, it could otherwise pass two points of a systematic draw."""


class VAttentionConfig(HostKVConfig, TokenConfig):
    """Settings of vAttention; defaults: sinks and window of the paper's experiments."""

    budget: CountOrShare = setting(2048, "tokens attended per layer and KV head, all included", "tokens", ge=1)
    sink: int = setting(128, "first tokens, always attended", "tokens", ge=0)
    window: int = setting(128, "most recent tokens, always attended", "tokens", ge=0)
    draw: Literal["uniform", "weighted"] = setting(
        "uniform", "chances of tokens: uniform beside the best, or weighted by their estimated attention"
    )
    even: float = setting(0.03, "part of the weighted chances that is the same for all tokens", gt=0, le=1)
    heavy: float = setting(0.5, "part of the places that the best tokens take where the draw is uniform", ge=0, lt=1)
    delta: float = setting(0.05, "probability that an error exceeds its bound", gt=0, lt=1)
    seed: int = setting(0, "what samples are drawn by, and the signs of the transform of the keys", ge=0)


class SampledCache(OffloadedTokenCache[TwoBitIndex]):
    """Full KV in host memory, a budget of it and two-bit keys on the device; selected tokens have chances."""

    def attend_sample(self, q: Tensor, chances: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """Attend with q [H, d] to sinks, window and the recalled sample; chances [Hk, n] are those of the candidates.

        Returns the output [H, d] and the variance of each query head [H], relative to the square of its length.
        """
        heads = q.view(len(self.k), -1, q.shape[-1])  # [Hk, G, d]
        drawn, window = slice(self.budget.sink, self.first_rows), slice(self.first_rows, None)
        chance = chances.gather(1, self.resident - self.candidates.start)[:, None]  # [Hk, 1, drawn]
        sets = [TokenSet(heads, self.k[:, drawn], self.v[:, drawn], log_counts=-chance.log())]
        near = [slice(self.budget.sink), window] if self.budget.sink else [window]
        sets += [TokenSet(heads, self.k[:, part], self.v[:, part]) for part in near]
        out = attend_sets(q, sets, softmax)  # [H, d']
        scores = attention_scores(heads, self.k, softmax)
        scores[..., drawn] -= chance.log()
        total = scores.logsumexp(-1, keepdim=True)
        if softmax.sinks is not None:
            total = torch.logaddexp(total, softmax.sinks.to(total).view(total.shape))
        weights, values = torch.exp(scores - total)[..., drawn], self.v[:, drawn].to(total.dtype)
        found = out.view(*heads.shape[:2], -1).to(total.dtype)
        length = found.square().sum(-1)
        apart = values.square().sum(-1)[:, None] - 2 * (found @ values.transpose(1, 2)) + length[..., None]
        variance = ((1 - chance) * weights.square() * apart.clamp_min(0)).sum(-1)
        return out, (variance / length).flatten()


class VAttention(Method[VAttentionConfig, SampledCache]):
    """Reads what is certain to matter and a sample of the rest."""

    Config = VAttentionConfig
    title = "the best tokens and a random sample of the rest, with an error bound"
    paper = "arXiv 2510.05688"
    long_generation = True
    offloads = True
    group_consistent = False
    device_memory = "O(B + 0.07·L)"
    true_kv: ClassVar[dict[str, Any] | None] = None
    budget_is_bound = True  # all of it is read, but drawn tokens stand for several ones
    ablation: ClassVar[dict[str, dict[str, Any]]] = {
        "nothing but a sample": {"heavy": 0.0},
        "weighted": {"draw": "weighted"},
        "weighted, half even": {"draw": "weighted", "even": 0.5},
    }

    def __init__(self, config: VAttentionConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.attentions = 0  # of single query heads
        self.bounds = self.largest = 0.0  # their sum, and the largest of them
        self.certain = self.selections = 0  # tokens with chance 1, and selections of single KV heads

    def new_cache(self, layer: LayerGeometry) -> SampledCache:
        """Make a cache with everything in host memory; on the device a budget of tokens and the codes of all keys."""
        heads, d, capacity = layer.num_kv_heads, layer.head_dim, self.context.capacity
        tiers = self.config.tiers(self.context.tiers)
        index = TwoBitIndex(heads, d, capacity, True, self.config.seed, tiers)
        return SampledCache(heads, d, capacity, self.config.tokens, index, tiers)

    def retrieve(self, layer: int, cache: SampledCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Estimate all weights, draw, recall what is missing, attend by inverse chances."""
        if not cache.active:
            return super().retrieve(layer, cache, q, softmax)
        with self.span("score", layer):
            products = cache.index.products(q.view(len(cache.k), -1, q.shape[-1]), cache.candidates)
            weights = softmax.scores(products).softmax(-1).mean(1)  # [Hk, n]
        with self.span("select", layer):
            chances = self.chances(weights, cache.selected)
            seed = hash((self.config.seed, layer, cache.length))
            start = torch.rand(len(chances), generator=torch.Generator().manual_seed(seed))
            selected = drawn(chances, cache.selected, start.to(q.device)) + cache.candidates.start
        self.count_selected(layer, selected)
        with self.span("recall", layer):
            misses, moved = cache.recall(selected)
        self.count_recalled(layer, misses, moved)
        with self.span("attention", layer):
            cache.chosen = selected
            out, variance = cache.attend_sample(q, chances, softmax)
        bounds = NormalDist().inv_cdf(1 - self.config.delta / 2) * variance.sqrt()
        self.attentions += len(bounds)
        self.bounds += float(bounds.sum())
        self.largest = max(self.largest, float(bounds.max()))
        self.certain += int((chances == 1).sum())
        self.selections += len(chances)
        return out

    def chances(self, weights: Tensor, places: int) -> Tensor:
        """Give each of more than `places` tokens its chance by weights [Hk, n]; the sum is `places`."""
        n = weights.shape[1]
        if self.config.draw == "uniform":
            best = round(self.config.heavy * places)
            chances = torch.full_like(weights, (places - best) / (n - best))
            return chances.scatter(1, weights.topk(best).indices, 1.0)
        even = self.config.even
        return proportional(weights * ((1 - even) / weights.sum(1, keepdim=True)) + even / n, places)

    def statistics(self) -> dict[str, Any]:
        """Return the bounds on the relative errors of query heads, and how many tokens of a selection were certain."""
        if not self.attentions:
            return {}
        return {
            "error_bound_mean": self.bounds / self.attentions,
            "error_bound_max": self.largest,
            "tokens_certain_mean": self.certain / self.selections,
        }


def proportional(weights: Tensor, places: int) -> Tensor:
    """Return chances min(1, c w) [Hk, n] of positive weights w, with c such that the sum is `places` < n.

    The largest i weights are certain for the first i at which c = (places - i) / (sum of the others) times the next
    largest is no more than 1.
    """
    best, order = weights.topk(places)  # [Hk, places], descending
    left = weights.sum(1, dtype=torch.float64, keepdim=True) - best.double().cumsum(1) + best  # from each one on
    ranks = torch.arange(places, device=weights.device)
    factors = (places - ranks) / left
    certain = (factors * best > 1).sum(1, keepdim=True)  # those before the first that fits, as the products fall
    chances = (weights * factors.gather(1, certain)).to(weights.dtype)
    chances.scatter_(1, order, torch.where(ranks < certain, 1, chances.gather(1, order)))
    return chances.masked_fill_(chances > NEARLY, 1)


def drawn(chances: Tensor, places: int, start: Tensor) -> Tensor:
    """Draw `places` tokens by chances [Hk, n], whose sum that is, systematically: [Hk, places], ascending.

    Those with chance 1 are drawn. Of the others, in their order, it is those within whose chance, added up, one of the
    points start, start + 1, .. lies; start [Hk] is in [0, 1).
    """
    certain = chances == 1
    rest = chances.double().masked_fill(certain, 0).cumsum(1)
    wanted = places - certain.sum(1, keepdim=True)
    rest *= wanted / rest[:, -1:].clamp_min(torch.finfo(torch.float64).tiny)  # whole to the last bit
    passed = torch.ceil(rest - start[:, None].double())  # points passed so far
    hit = passed.diff(dim=1, prepend=torch.zeros_like(passed[:, :1])) > 0
    return (certain | hit).nonzero()[:, 1].view(len(chances), places)
