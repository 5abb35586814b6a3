"""CAKE: layers share one budget by how their attention spreads and shifts (arXiv 2503.12491, section 4).

A layer whose attention is spread over many tokens (entropy H of the rows of the last `window` queries) or moves from
query to query (variance V of the columns) needs more of a prompt; its preference is P = H^(1/tau1) * V^(1/tau2). Within
a layer, tokens are kept by the mean and variance of the attention they received, so that tokens that matter only now
and then stay too.

The prompt is read layer by layer, and preferences become known one by one. So each layer, when it has been read, shares
the budget of all layers with those before it, which are cut once more (cascading). Shares only ever shrink, so the
result is that of a single cut at the end, but never more is held than then.

Decided where the paper is silent or its reference code differs: no layer is given more than the prompt has, and the
surplus goes to the others in proportion (the code's even split may take back what was evicted). The mean over the query
heads of a KV head chooses its tokens, as in the code. Generated tokens are kept: the algorithm ends with the prompt,
the code goes on evicting. A prompt of up to `budget` tokens is kept whole; of a longer one the `window` last tokens
stay in every layer, and only the rest of `budget` is shared. Both temperatures are 1, as in the code without a table
for the model; its experiments tune them for each model and budget (1.6 and 0.4 for Llama-3.1-8B with 1,024 tokens per
layer).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels.prefill_attention import last_rows_by_kv_head
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import kept_tokens
from kvcli.kv.pruned import PrunedCache
from kvcli.methods.config import CountOrShare, setting
from kvcli.methods.contract import SequenceContext
from kvcli.methods.snapkv import Odd, SnapKV, SnapKVConfig
from kvcli.models.geometry import LayerGeometry


class CAKEConfig(SnapKVConfig):
    """Settings of CAKE; defaults: section 5."""

    budget: CountOrShare = setting(
        2048, "tokens kept of the prompt per KV head, window included, mean of the layers", "tokens", ge=1
    )
    window: int = setting(32, "last tokens of the prompt, which stay and whose queries are looked at", "tokens", ge=2)
    kernel: Odd = setting(5, "neighbours over which a token's indicator is averaged, odd", "tokens")
    gamma: float = setting(200.0, "weight of the variance relative to the mean of a token's attention", ge=0)
    tau1: float = setting(1.0, "temperature of the entropy; the paper tunes both for each model", gt=0)
    tau2: float = setting(1.0, "temperature of the variance", gt=0)


class CAKE(SnapKV):
    """Cuts all layers read so far to their shares, whenever another has been read."""

    Config = CAKEConfig
    config: CAKEConfig
    title = "prompt tokens by attention, evicted once; more where it spreads and shifts"
    paper = "arXiv 2503.12491"
    group_consistent = True
    planned_is_bound = True
    budget_is_mean = True

    def __init__(self, config: CAKEConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.preferences: dict[int, float] = {}  # layer -> preference, in the order of reading
        self.indicators: dict[int, Tensor] = {}  # layer -> worth of the tokens it holds before the window [Hk, n]

    def take_prompt(self, layer: int, cache: PrunedCache, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Measure the layer's attention, share the budget anew, cut earlier layers to their shares; keep this one's."""
        length, config = k.shape[1], self.config
        if length <= config.budget:
            super().take_prompt(layer, cache, k, v, q, softmax)
            return
        with self.span("score", layer):
            entropy, variance, self.indicators[layer] = attention_dynamics(q, k, softmax, config.gamma, config.kernel)
            self.preferences[layer] = entropy ** (1 / config.tau1) * variance ** (1 / config.tau2)
        with self.span("prune", layer):
            total = len(self.retrieval) * (config.budget - config.window)
            shares = capped_shares(list(self.preferences.values()), total, length - config.window)
            for before, share in zip(list(self.preferences)[:-1], shares, strict=False):
                self.retrieval[before].prune(self._best(before, share))
            cache.load_subset(k, v, self._best(layer, shares[-1]))
        self.kept = {each: self.retrieval[each].held for each in self.preferences}
        if len(self.preferences) == len(self.retrieval):
            self.indicators.clear()

    def _best(self, layer: int, share: int) -> Tensor:
        """Return the layer's window and the `share` best tokens among those it holds: [Hk, share + window]."""
        indicator, window = self.indicators[layer], self.config.window
        best = kept_tokens(indicator, window, min(share, indicator.shape[1]) + window)
        self.indicators[layer] = indicator.take_along_dim(best[:, :-window], 1)
        return best


def capped_shares(preferences: Sequence[float], total: int, cap: int) -> list[int]:
    """Share `total` in proportion to preferences >= 0, none above `cap`; shares are rounded down.

    The surplus of a capped share goes to the others in proportion. Adding a preference makes no share larger.
    """
    order = sorted(range(len(preferences)), key=lambda index: preferences[index])
    shares, left = [0] * len(order), float(total)
    while order:  # the largest first: as soon as one is below the cap, all that follow are
        weight = sum(preferences[index] for index in order)
        part = preferences[order[-1]] / weight if weight else 1 / len(order)
        share = min(cap, left * part)
        shares[order.pop()] = int(share)
        left -= share
    return shares


class Dynamics(NamedTuple):
    """Spread (`dispersion` H) and movement (`shift` V) of a layer's attention, and worth of tokens I [Hk, s - r]."""

    dispersion: float
    shift: float
    indicator: Tensor


def attention_dynamics(q: Tensor, k: Tensor, softmax: Softmax, gamma: float, kernel: int) -> Dynamics:
    """Measure the attention weights w of the last r queries, q [H, r, d], on the tokens j before them (section 4.3).

        H = -sum_ij w_ij log w_ij      V = sum_j Var_i(w_ij)
        I_j = mean over the group of the mean, over |t - j| <= kernel // 2, of Mean_i(w_it) + gamma * Var_i(w_it)

    H and V are sums over all heads, Var is unbiased, nothing is renormalised, and the ends are padded with zeros.
    Shapes: k [Hk, s, d], 2 <= r < s, `kernel` odd. The weights of one KV head are held at a time.
    """
    before = k.shape[1] - q.shape[1]
    dispersion = shift = 0.0
    indicators = []
    for weights in last_rows_by_kv_head(q, k, softmax):  # [G, r, s]
        seen = weights[..., :before]
        variance, mean = torch.var_mean(seen, 1)  # [G, s - r]
        dispersion += float(torch.special.entr(seen).sum(dtype=torch.float64))
        shift += float(variance.sum(dtype=torch.float64))
        indicator = functional.avg_pool1d(mean + gamma * variance, kernel, stride=1, padding=kernel // 2)
        indicators.append(indicator.mean(0))
    return Dynamics(dispersion, shift, torch.stack(indicators))
