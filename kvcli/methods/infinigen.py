"""InfiniGen: a layer's tokens are chosen and fetched while the previous layer computes (arXiv 2406.19707, section 4).

The attention input of layer l, put through the query projection of layer l+1, predicts the query of layer l+1. It
scores a few skewed columns of the keys: an orthogonal matrix rotates queries and keys so that few columns carry most of
their product, and each prompt keeps the part `columns` of them that is strongest in its own queries and keys. The
tokens within `alpha` of the best score are chosen, for every KV head as many as the heads want on average, and never
more than the budget holds. They are fetched token by token; all KV lies in host memory.

Decided: the skew comes from a calibration or, without one, from the prompt's own keys and last `rows` queries, which
also choose the columns. The query heads of a KV head share its skew, so that the columns of a key are kept once, and
the maximum of their scores counts. The first layer is dense; the paper also leaves the second whole, because the first
one's input predicts little (`dense_layers` = 2). 0.3 of the columns is what FreeKV compared with (arXiv 2505.13109);
the reference code's runs take 0.2, with an `alpha` of 4 for OPT and mostly 5 for Llama. Host memory is not bounded. A
layer without a prediction, the model's first where it is not dense, chooses with its own query. In the counters one
token of one KV head is a page of size 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append import NewToken, take_in_filled_page
from kvcli.kernels.group_pooling import pool_scores
from kvcli.kernels.key_bases import prompt_skew, strongest_columns
from kvcli.kernels.recall import HostPages
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import project_heads, project_newest, token_scores, token_scores_device
from kvcli.kv.cache import Tiers
from kvcli.kv.calibration_file import CalibrationMatrices
from kvcli.kv.tokens import OffloadedTokenCache, TokenBudget, TokenIndex
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Traffic, nbytes
from kvcli.methods.config import CountOrShare, HostKVConfig, TokenConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.step import BatchSlots, FromHost, Index, NearBest, Phases, ScoredIndex, StepPlan
from kvcli.models.geometry import LayerGeometry
from kvcli.sizes import slices

# Tokens whose keys are projected at once; bounds the fp32 copies.
PIECE = 4096


class PartialKeyIndex(TokenIndex):
    """The paper's partial key cache, on the device: `keys` [Hk, capacity, c], the full keys times `basis` [Hk, d, c].

    The method sets the basis before the first token is stored.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, columns: int, capacity: int, tiers: Tiers):
        self.basis = tiers.on_device(num_kv_heads, head_dim, columns, dtype=torch.float32)
        self.keys = tiers.on_device(num_kv_heads, capacity, columns)
        self.filled = 0  # tokens

    @override
    def fill(self, first: int, keys: Tensor) -> None:
        self.filled = first + keys.shape[1]
        for part in slices(keys.shape[1], PIECE):
            self.keys[:, first:][:, part] = keys[:, part].float() @ self.basis

    def tensors(self) -> dict[str, Tensor]:
        """Return the indexed tensors by name."""
        return {"basis": self.basis, "keys": self.keys}

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold these tensors instead of the present ones."""
        self.basis, self.keys = tensors["basis"], tensors["keys"]

    def scores(self, q: Tensor, tokens: range, scale: float) -> Tensor:
        """Score consecutive tokens with q [H, d] for every query head; return [Hk, G, len(tokens)] in fp32."""
        heads = q.float().view(self.keys.shape[0], -1, q.shape[-1]) @ self.basis  # [Hk, G, c]
        return token_scores(heads.flatten(0, 1), self.keys[:, tokens.start : tokens.stop], scale)

    @override
    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        candidates = budget.candidates(length)
        scored = nbytes(self.keys[:, candidates.start : candidates.stop])
        return Traffic(scored=scored, scores=4 * self.keys.shape[0] * len(candidates))

    def settled(self) -> list[Settled]:
        """Return the keys, which do not change."""
        return [Settled(self.keys, 1, self.filled)]

    @override
    def nbytes(self) -> int:
        return nbytes(self.basis, self.keys)


Cache = OffloadedTokenCache[PartialKeyIndex]


class InfiniGenConfig(HostKVConfig, TokenConfig):
    """Settings of InfiniGen; defaults: section 5; budget as in arXiv 2505.13109."""

    budget: CountOrShare = setting(2048, "tokens attended per layer and KV head, at most", "tokens", ge=1)
    alpha: float = setting(4.0, "choose tokens whose scaled q.k is within this of the best", ge=0)
    columns: float = setting(0.3, "part of the skewed columns that tokens are scored by", gt=0, le=1)
    rows: int = setting(2048, "last queries of the prompt that choose the columns", "tokens", ge=1)
    skew: str = setting("", "safetensors file with the skew of every layer; without it they are the prompt's own")


class InfiniGen(Method[InfiniGenConfig, Cache]):
    """Chooses and fetches a layer ahead."""

    Config = InfiniGenConfig
    title = "single tokens selected one layer ahead by a few columns of the keys"
    paper = "arXiv 2406.19707"
    long_generation = True
    offloads = True
    group_consistent = False
    device_memory = "O(B + 0.15·L)"
    no_latents = "the next layer's query is not made ahead of time for it"
    budget_is_bound = True
    wants_next_query = True

    def __init__(self, config: InfiniGenConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        shapes = {
            layer: (cache.k.shape[0], cache.k.shape[2], cache.k.shape[2]) for layer, cache in self.retrieval.items()
        }
        self.skew = CalibrationMatrices(config.skew, shapes, "skew") if config.skew else None
        self.scales: dict[int, float] = {}  # layer -> factor of its q.k
        self.predicted = self.chosen = self.choices = 0

    def new_cache(self, layer: LayerGeometry) -> Cache:
        """Make a cache with everything in host memory; on the device some tokens and a few columns of all keys."""
        heads, d, capacity = layer.num_kv_heads, layer.head_dim, self.context.capacity
        tiers = self.config.tiers(self.context.tiers)
        index = PartialKeyIndex(heads, d, max(1, int(self.config.columns * d)), capacity, tiers)
        return OffloadedTokenCache(heads, d, capacity, self.config.tokens, index, tiers)

    @property
    @override
    def query_rows(self) -> int:
        return self.config.rows

    def take_prompt(self, layer: int, cache: Cache, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Choose the columns by which this prompt's tokens are scored."""
        self.scales[layer] = softmax.scale
        skew = self.skew[layer].to(k.device) if self.skew else prompt_skew(q, k)
        cache.index.basis.copy_(strongest_columns(skew, q, k, cache.index.basis.shape[2]))
        super().take_prompt(layer, cache, k, v, q, softmax)

    def take_next_query(self, layer: int, q: Tensor) -> None:
        """Choose and fetch for a layer that has not stored the current token yet."""
        Phases(self, layer, Softmax(self.scales[layer])).choose_ahead(q)

    @property
    @override
    def step_plan(self) -> StepPlan:
        return StepPlan(PartialKeys(), NearBest(self.config.alpha), "ahead", varies=True, fetch=FromHost())

    @override
    def take_tally(self, layer: int, tally: Mapping[str, int]) -> None:
        self.chosen += tally["chosen"]
        self.choices += tally["choices"]
        self.predicted += tally["layer_steps"] if layer else 0

    def statistics(self) -> dict[str, Any]:
        """Return how many tokens a KV head chose on average, and how many layer-steps had a predicted query."""
        if not self.choices:
            return {}
        return {"tokens_chosen_mean": self.chosen / self.choices, "layer_steps_foretold": self.predicted}


class PartialKeys(Index):
    """Scores by a few columns of the keys in their head's basis; the maximum over the group counts."""

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        return pool_scores(cache.index.scores(q, candidates, softmax.scale), "max_qk")

    @override
    def over_slots(self, slots: BatchSlots) -> PartialKeysOverSlots:
        return PartialKeysOverSlots(slots)


class PartialKeysOverSlots(ScoredIndex):
    """`PartialKeys` for a batch, by `keys` and `basis`."""

    needs_newest = True

    def __init__(self, slots: BatchSlots):
        self.slots, self.keys, self.basis = slots, slots.tensors["keys"], slots.tensors["basis"]

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor) -> Tensor:
        b, num_kv_heads, tokens, columns = self.keys.shape
        queries = q.new_empty(b, q.shape[1], columns, dtype=torch.float32)
        project_heads(q, self.basis, queries)
        out = q.new_empty(b, num_kv_heads, tokens, dtype=torch.float32)
        token_scores_device(queries, self.keys, *self.scored, Softmax(softmax.scale), "max_qk", out, heads)
        return out

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        project_newest(new.k, self.basis, self.slots.rows.lengths, self.keys)
        if host is not None:
            take_in_filled_page(self.slots.rows, host=host)
