"""ActQKV: InfLLM with a probe of the window's unusual queries and a cut-off per layer (arXiv 2502.13542, section 4).

In prefill the query that looks for blocks is not the mean of the window's queries. Each query weighs as much as it
deviates from the mean of all queries so far, per channel in units of their variance (equations 7 to 9). Blocks are
ranked by cosine. Where the prompt is a document and a question, the question is read first, alone. Its queries make a
second probe, with moments of their own, whose cosine is added `question_weight` times, in prefill only.

In decode the query itself is the probe, and the layers share their budget by the entropies of their scores (below). The
share of a layer is clamped; the clamps are fractions of the budget, so that they scale with it. While the context fits
into the budget there is no cut-off.

Windows, blocks, representatives, positions and exactness are those of InfLLM. Keys have their KV heads repeated for the
query heads they serve. A question longer than a window counts by its last tokens.

The probe is one query that stands for a window, weighted by how unusual its tokens are (arXiv 2502.13542, 4.1):

    phi_j = (q_j - mean)^2 / (variance + eps)          probe = sum_j |phi_j|_1 / sum_i |phi_i|_1 * q_j

Mean and variance per channel are merged window by window (Chan, Golub and LeVeque, 1979), in at least fp32:

    n = n_a + n_b,  delta = mean_b - mean_a
    mean = mean_a + delta * n_b / n          M2 = M2_a + M2_b + delta^2 * n_a * n_b / n          variance = M2 / (n - 1)

The cut-off divides the budget of a decode step among the layers (arXiv 2502.13542, section 4.2).

A layer takes from the remaining budget the fraction that its entropy has in the sum of its own and the entropies of the
layers still to come (equation 12); for these the means of their last 100 steps are used. Until every layer has a mean,
the split is even. The rounded and clamped share of a layer is subtracted from the rest, so the layers' mean keeps to
the budget, unless a clamp binds.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.softmax import Softmax
from kvcli.kv.blocks import BlockCache, cosine_scores, density, dot_scores
from kvcli.methods.config import setting
from kvcli.methods.contract import SequenceContext
from kvcli.methods.infllm import InfLLM, InfLLMConfig
from kvcli.models.geometry import LayerGeometry

EPS = 1e-6


class Moments(NamedTuple):
    """The number of observations, their mean [c] and their sum of squared deviations [c]."""

    seen: int
    mean: Tensor
    m2: Tensor

    @property
    def variance(self) -> Tensor:
        """Unbiased variance [c]; zero for a single observation."""
        return self.m2 / max(1, self.seen - 1)


def moments_of(x: Tensor) -> Moments:
    """Return the moments of one batch x [n, c], n >= 1."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = x.mean(0)
    return Moments(len(x), mean, (x - mean).square().sum(0))


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Return the moments of both sets together."""
    seen = a.seen + b.seen
    delta = b.mean - a.mean
    mean = a.mean + delta * (b.seen / seen)
    return Moments(seen, mean, a.m2 + b.m2 + delta.square() * (a.seen * b.seen / seen))


def activation_probe(queries: Tensor, moments: Moments, reverse: bool = False) -> Tensor:
    """Weigh queries [n, c], heads concatenated in c, by their activation bias; return [c] in at least fp32.

    Where no query differs from the mean, as for the very first, all weigh the same. With `reverse` usual queries weigh
    more, by the reciprocal of their bias (appendix D.3).
    """
    queries = queries.to(moments.mean.dtype)
    bias = ((queries - moments.mean).square() / (moments.variance + EPS)).sum(1)  # [n]
    if reverse:
        bias = 1 / (bias + EPS)
    total = bias.sum()
    weights = torch.where(total > 0, bias / total, torch.full_like(bias, 1 / len(bias)))
    return weights @ queries


RECENT_STEPS = 100  # steps over which a layer's entropies are averaged


class CutOff:
    """Divides `blocks` per layer among `layers` by their entropies, layer after layer within each step."""

    def __init__(self, layers: Sequence[int], blocks: int, least: int, most: int):
        self.layers, self.blocks, self.least, self.most = list(layers), blocks, least, most
        self.recent: dict[int, deque[float]] = {layer: deque(maxlen=RECENT_STEPS) for layer in layers}
        self.means: dict[int, float] = {}
        self.remaining = 0.0

    def allot(self, layer: int, entropy: float, candidates: int) -> int:
        """Return how many blocks `layer` gets at this step, at most `candidates`."""
        if layer == self.layers[0]:
            self.remaining = len(self.layers) * self.blocks
        rest = self.layers[self.layers.index(layer) + 1 :]
        if len(self.means) == len(self.layers):
            share = entropy / (entropy + sum(self.means[other] for other in rest))
        else:
            share = 1 / (1 + len(rest))
        given = min(candidates, max(self.least, min(self.most, round(share * self.remaining))))
        self.remaining -= given
        self.recent[layer].append(entropy)
        self.means[layer] = fmean(self.recent[layer])
        return given


class ActQKVConfig(InfLLMConfig):
    """Settings of ActQKV; the cut-off's bounds are 32 and 92 blocks at the paper's budget of 46 (section 5.1)."""

    question_weight: float = setting(
        4.0, "weight of the question's probe relative to the window's; 0 leaves it out", ge=0
    )
    probe: Literal["activation", "mean", "reverse"] = setting(
        "activation", "what weighs a window's queries: activation, mean (without APQ), reverse (table 9)"
    )
    similarity: Literal["cosine", "dot"] = setting("cosine", "how a probe and a block's key are compared")
    cutoff: Literal["density", "even", "reverse"] = setting(
        "density", "how layers share the budget in decode: density, even (without DCM), reverse (table 9)"
    )
    cutoff_least: float = setting(0.7, "fewest pages of a layer in decode, of those the budget selects", ge=0, le=1)
    cutoff_most: float = setting(2.0, "most pages of a layer in decode, of those the budget selects", ge=1)

    @property
    def least(self) -> int:
        """Fewest blocks of a layer in decode."""
        return max(1, round(self.cutoff_least * self.pages.selected))

    @property
    def slots(self) -> int:
        """Retrieved blocks that the device has room for, per layer: the most that the cut-off allots."""
        return round(self.cutoff_most * self.pages.selected)


class ActQKV(InfLLM):
    """Searches with an activation-aware probe, by cosine; a layer gets as many blocks as its entropy deserves."""

    Config = ActQKVConfig
    title = "blocks retrieved by each window's unusual queries; layers share the budget"
    paper = "arXiv 2502.13542"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(B + L/p)"
    budget_is_mean = True

    config: ActQKVConfig
    ablation: ClassVar[dict[str, dict[str, Any]]] = {
        "mean probe": {"probe": "mean"},  # table 3, without APQ
        "even cut-off": {"cutoff": "even"},  # without DCM
        "mean probe, even cut-off": {"probe": "mean", "cutoff": "even"},
        "reversed": {"probe": "reverse", "cutoff": "reverse"},  # table 9
        "inner product": {"similarity": "dot"},
    }

    def __init__(self, config: ActQKVConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.moments: dict[int, Moments] = {}  # layer -> moments of all the prompt's queries so far [H * d]
        self.question: dict[int, Tensor] = {}  # layer -> the question's probe [H, d]
        self.cutoff = CutOff(list(self.retrieval), config.pages.selected, config.least, config.slots)

    @property
    @override
    def preview(self) -> Sequence[int]:
        """The question, if there is one and it has a weight."""
        return self.context.question if self.config.question_weight else ()

    @override
    def take_preview(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> None:
        """Make the question's probe; the prompt's first token, which comes with it, is left out."""
        if layer in self.retrieval:
            queries = self.retrieval[layer].unrotate(q[:, 1:], 1)
            self.question[layer] = self._probe(queries, moments_of(_by_token(queries)))

    @override
    def window_scores(self, layer: int, cache: BlockCache, queries: Tensor) -> Tensor:
        """Score every block for a window; its queries join the moments before they are weighed by them."""
        moments = moments_of(_by_token(queries))
        if layer in self.moments:
            moments = merge_moments(self.moments[layer], moments)
        self.moments[layer] = moments
        scores = self.step_scores(layer, cache, self._probe(queries, moments))
        if layer in self.question:
            scores = scores + self.config.question_weight * self.step_scores(layer, cache, self.question[layer])
        return scores

    @override
    def step_scores(self, layer: int, cache: BlockCache, query: Tensor) -> Tensor:
        compare = cosine_scores if self.config.similarity == "cosine" else dot_scores
        return compare(query, cache.block_keys)

    @override
    def allot(self, layer: int, scores: Tensor) -> int:
        entropy = float(density(scores))
        self.usage[layer].decode.add_entropy(entropy)
        if self.config.cutoff == "even":
            return self.config.pages.selected
        share = entropy if self.config.cutoff == "density" else 1 / max(entropy, EPS)
        return self.cutoff.allot(layer, share, len(scores))

    def _probe(self, queries: Tensor, moments: Moments) -> Tensor:
        """Make one query [H, d] from a window's queries [H, n, d]."""
        if self.config.probe == "mean":
            return queries.mean(1)
        probe = activation_probe(_by_token(queries), moments, self.config.probe == "reverse")
        return probe.view(queries.shape[0], -1)


def _by_token(queries: Tensor) -> Tensor:
    return queries.transpose(0, 1).flatten(1)  # [H, n, d] -> [n, H * d]
