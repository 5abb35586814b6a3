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

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.key_bases import prompt_skew, strongest_columns
from kvcli.kernels.softmax import Softmax
from kvcli.kv.calibration_file import CalibrationMatrices
from kvcli.kv.tokens import OffloadedTokenCache, PartialKeyIndex
from kvcli.methods.config import CountOrShare, HostKVConfig, TokenConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.step import FromHost, NearBest, PartialKeys, Phases, StepPlan
from kvcli.models.geometry import LayerGeometry

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
        return StepPlan(PartialKeys("max_qk"), NearBest(self.config.alpha), "ahead", varies=True, fetch=FromHost())

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
