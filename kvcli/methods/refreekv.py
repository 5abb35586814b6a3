"""ReFreeKV: pruning after prefill by a threshold that suits every input (arXiv 2502.16886, section 3).

A layer is pruned once, when its prompt has been read. Its tokens are ranked by position: the sinks first, then from the
newest to the oldest. The shortest prefix that holds all but a part `threshold` of the norm of the last attention row
(A' below) is kept: one cut per layer. How much that is depends on the prompt; there is no budget. Kept keys keep their
positions, and generated tokens are never dropped.

Decided where paper and reference code differ: the sinks are kept unconditionally and stay out of the norm. With them
inside, a heavy sink alone makes up the norm and nothing else is kept.

Memory is planned for a prompt that is kept whole, because the cut is not known before; the footprint after prefill is
that of the tokens kept, with room for those to come.

A' is the mean of the last rows of a head, for each token over the rows that see it; the norm ||A'|| is the mean over
the heads.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.prefill_attention import last_rows
from kvcli.kernels.softmax import Softmax
from kvcli.kv.pruned import PrunedCache
from kvcli.memory.tiers import nbytes
from kvcli.methods.config import CountOrShare, HostKVConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.step import StepPlan
from kvcli.models.geometry import LayerGeometry
from kvcli.sizes import slices
from kvcli.telemetry.counters import Count

ROWS_AT_ONCE = 64  # attention rows held at a time


def mean_row(q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
    """Return A' [H, s]: the mean weight of each token of k [Hk, s, d] over the last rows, q [H, r, d], that see it."""
    rows, length = q.shape[1], k.shape[1]
    total = torch.zeros(q.shape[0], length, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for part in slices(rows, ROWS_AT_ONCE):
        seen = length - rows + part.stop
        total[:, :seen] += last_rows(q[:, part], k[:, :seen], softmax).sum(1)  # of [H, r, s]
    seen_by = (length - torch.arange(length, device=q.device)).clamp(max=rows)
    return total / seen_by


def norm_cut(weights: Tensor, threshold: float) -> int:
    """Count the newest tokens that hold nearly all of an attention row's norm.

        N_j = mean over heads of sqrt(sum of a_t^2 over the newest j tokens)      least j with 1 - N_j / N_s < T

    `weights` a [H, s], s >= 1, oldest token first. Returns s where no smaller j is enough, as with T = 0. All norms
    come from one cumulative sum, in float64 because rows can be long.
    """
    norms = weights.flip(-1).to(torch.float64).square_().cumsum(-1).sqrt_().mean(0)  # [s]
    short = norms[-1] - norms >= threshold * norms[-1]
    return min(int(short.sum()) + 1, len(norms))


class ReFreeKVConfig(HostKVConfig):
    """Settings of ReFreeKV; defaults: section 4."""

    threshold: float = setting(0.01, "part of the attention norm that may be lost; 0 keeps everything", ge=0, le=1)
    sink: int = setting(4, "first tokens, always kept and left out of the norm", "tokens", ge=0)
    rows: CountOrShare = setting(
        1, 'last attention rows that are averaged; or a share of the prompt: "1%"', "rows", ge=1
    )
    ranking: Literal["position", "attention"] = setting(
        "position", "order in which tokens are kept: newest first, or most attended first (table 5)"
    )
    dense_layers: int = setting(2, "leading layers that keep everything", "layers", ge=0)
    offload: bool = setting(False, "keep the KV in host memory and bring it layer by layer at each step")

    @property
    @override
    def stays_in_place(self) -> bool:
        return not self.offload


class ReFreeKV(Method[ReFreeKVConfig, PrunedCache]):
    """Drops what the last row does not attend to; the prompt decides how much."""

    Config = ReFreeKVConfig
    title = "sinks and newest prompt tokens up to a threshold; evicted once, no budget"
    paper = "arXiv 2502.16886"
    long_generation = False
    offloads = False
    group_consistent = True
    device_memory = "O(k + g)"
    attends_to_rows = True
    ablation: ClassVar[dict[str, dict[str, Any]]] = {  # table 5
        "k 1%": {"rows": "1%"},
        "k 5%": {"rows": "5%"},
        "k 10%": {"rows": "10%"},
        "by attention": {"ranking": "attention"},
    }
    exact: ClassVar[dict[str, Any]] = {"threshold": 0.0}
    planned_is_bound = True

    def __init__(self, config: ReFreeKVConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.prompt_tokens = 0
        self.kept: dict[int, int] = {}  # layer -> tokens of the prompt

    def new_cache(self, layer: LayerGeometry) -> PrunedCache:
        """Make a cache with room for everything until the prompt is known."""
        context, config = self.context, self.config
        heads, d, capacity = layer.num_kv_heads, layer.head_dim, context.capacity
        return PrunedCache(heads, d, capacity, capacity, config.tiers(context.tiers), offload=config.offload)

    @property
    @override
    def query_rows(self) -> int:
        return self.config.rows

    def take_prompt(self, layer: int, cache: PrunedCache, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Keep the sinks and as many of the newest tokens as the last rows ask for."""
        self.prompt_tokens = length = k.shape[1]
        sink = min(self.config.sink, length)
        chosen = torch.arange(sink, length, device=k.device)
        if layer >= self.config.dense_layers and length > sink:
            with self.span("prune", layer):
                weights = mean_row(q, k, softmax)[:, sink:]  # [H, s - sink]
                if self.config.ranking == "attention":  # the most attended take the place of the newest
                    chosen = chosen[weights.mean(0).argsort(stable=True)]
                    weights = weights[:, chosen - sink]
                last = norm_cut(weights, self.config.threshold)
                chosen = chosen[len(chosen) - last :].sort().values
        self.kept[layer] = sink + len(chosen)
        tokens = torch.cat((torch.arange(sink, device=k.device), chosen))
        kept = tokens.expand(k.shape[0], -1)  # [Hk, sink + last]
        self.count(layer, Count.BYTES_TO_HOST, cache.load_subset(k, v, kept))

    def retrieve(self, layer: int, cache: PrunedCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Bring the layer to the device if necessary and attend to all of it; a CPU reads quantised bytes in place."""
        if cache.reads_in_place(q):
            moved = nbytes(cache.kv[:, : cache.held])
            self.count(layer, Count.BYTES_TO_DEVICE, moved)
            self.count(layer, Count.BYTES_EXPOSED, moved)
            with self.span("attention", layer):
                return cache.attend_in_place(q, softmax)
        with self.span("recall", layer):
            k, v, moved = cache.fetch()
        self.count(layer, Count.BYTES_TO_DEVICE, moved)
        self.count(layer, Count.BYTES_EXPOSED, moved)
        with self.span("attention", layer):
            return decode_attention(q, k, v, softmax)

    @property
    @override
    def step_plan(self) -> StepPlan:
        return StepPlan()

    def statistics(self) -> dict[str, Any]:
        """Return the realised budget, the mean over layers of kept / prompt, and the tokens that each layer kept.

        Layers kept whole count as 1; sliding-window layers, from which nothing is pruned, do not count.
        """
        if not self.kept:
            return {}
        kept = [self.kept[layer] for layer in sorted(self.kept)]
        return {"realised_budget": sum(kept) / len(kept) / self.prompt_tokens, "kept_tokens": kept}
