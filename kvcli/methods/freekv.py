"""FreeKV: speculative retrieval with fine-grained correction (arXiv 2505.13109, sections 3 and 4).

The full KV cache lies in host memory by pages; the device holds sink, window and a selection per KV head. A step
attends to the pages that the query of the step before selected, so that selection and recall leave the critical path.
A KV head whose query turned too far (cosine below `tau`, pooled over its group) is corrected: it selects with its own
query and recalls before attending. The first retrieval of a sequence has nothing to reuse and is counted apart.

`BlockingPipeline` semantics: this file says what a step attends to, phase after phase. Anything that overlaps phases
must select the same pages and give the same output.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.host_pages import HostLayout
from kvcli.kernels.page_scores import page_scores
from kvcli.kernels.query_similarity import query_similarity
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import topk_pages
from kvcli.methods.base import Method, SequenceContext
from kvcli.methods.config import CosineByLayer, HostKVConfig, PagedConfig, by_layer, setting
from kvcli.methods.steps.page_bounds import PageBoundsIndex
from kvcli.methods.steps.plan import Correction, FromHost, RecallBy, StepPlan
from kvcli.models.geometry import LayerGeometry
from kvcli.store.offloaded_pages import OffloadedPageCache
from kvcli.telemetry.counters import Count


class FreeKVConfig(HostKVConfig, PagedConfig):
    """Settings of FreeKV."""

    tau: CosineByLayer = setting(0.9, "correct a head below this query cosine: 0 never, 1 always; or a list", "cosine")
    pooling: Pooling = setting("mean_s", "how page scores are pooled over the query heads of a KV head")
    correction_pooling: Literal["mean", "max"] = setting("mean", "how cosines are pooled over the group")
    score_scale: bool = setting(True, "scale page scores as attention does (the reference code leaves it out)")
    host_layout: HostLayout = setting("hnd", "a page in host memory: hnd by KV head, nhd by token (ablation)")
    recall: RecallBy = setting("gather", "how a GPU gets pages: gather by a kernel, copy one after another (ablation)")
    double_buffer: bool = setting(True, "copy into two staging buffers in turn, not one (ablation)")

    def correct_below(self, layers: int) -> tuple[float, ...]:
        """The cosine below which a head is corrected, layer by layer; raises KvcliError (usage) for too few numbers.

        The ends of the scale are exact whatever a cosine rounds to.
        """
        return tuple({0.0: -2.0, 1.0: 2.0}.get(tau, tau) for tau in by_layer("tau", self.tau, layers))


class StepSelection(NamedTuple):
    """What a step's attention read: of KV heads flagged in `corrected` [Hk] its own selection, else the last step's."""

    corrected: Tensor
    selected: Tensor  # [Hk, k] pages
    before: Tensor


class FreeKV(Method[FreeKVConfig, OffloadedPageCache]):
    """Reuses the last step's selection where the query allows, recalls only what is missing."""

    Config = FreeKVConfig
    title = "pages that the step before chose, corrected where the query turned"
    paper = "arXiv 2505.13109"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(B + L/p)"
    ablation: ClassVar[dict[str, dict[str, Any]]] = {  # figure 9
        "nhd, one buffer, no speculation": {"host_layout": "nhd", "recall": "copy", "double_buffer": False, "tau": 1.0},
        "hnd, one buffer, no speculation": {"recall": "copy", "double_buffer": False, "tau": 1.0},
        "hnd, two buffers, no speculation": {"recall": "copy", "tau": 1.0},
        "no speculation": {"tau": 1.0},
    }

    def __init__(self, config: FreeKVConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        super().__init__(config, layers, context)
        self.correct_below = config.correct_below(len(layers))
        self.previous_query: dict[int, Tensor] = {}  # layer -> [H, d], present once the layer has retrieved
        self.reads: dict[int, StepSelection] = {}  # layer -> what the last step's attention read

    def new_cache(self, layer: LayerGeometry) -> OffloadedPageCache:
        """Keep everything in host memory and a budget of pages on the device."""
        shape, pages = (layer.num_kv_heads, layer.head_dim, self.context.capacity), self.config.pages
        return OffloadedPageCache(*shape, pages, self.config.tiers(self.context.tiers), layout=self.config.host_layout)

    @property
    @override
    def step_plan(self) -> StepPlan:
        config = self.config
        return StepPlan(
            index=partial(PageBoundsIndex, pooling=config.pooling, score_scale=config.score_scale),
            when="after",
            fetch=FromHost(config.recall, config.double_buffer),
            correction=Correction(self.correct_below, config.correction_pooling),
        )

    def retrieve(self, layer: int, cache: OffloadedPageCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend to the last step's selection, corrected where the query turned; then prepare the next step."""
        if not cache.active:
            return super().retrieve(layer, cache, q, softmax)
        with self.span("correction", layer):
            corrected = self._corrected_heads(layer, cache, q)  # [Hk] bool
        selected = self._select(layer, cache, q, softmax)  # [Hk, k]
        before = self.reads[layer].selected if layer in self.reads else selected
        self.reads[layer] = StepSelection(corrected, selected, before)
        if corrected.any():
            with self.span("recall", layer):
                misses, moved = cache.recall(selected, corrected)
            self.count_recalled(layer, misses, moved)
        with self.span("attention", layer):
            out = cache.attend(q, softmax)
        if not corrected.all():
            with self.span("recall", layer):  # for the other heads: a corrected one misses nothing any more
                misses, moved = cache.recall(selected, later=True)
            self.count_recalled(layer, misses, moved, hidden=True)
        self.previous_query[layer] = q.clone()
        return out

    @override
    def attended(self, layer: int) -> Tensor:
        """Heads that were not corrected read what the step before had selected."""
        if layer not in self.reads:
            return super().attended(layer)
        corrected, selected, before = self.reads[layer]
        return self.retrieval[layer].attended_pages(selected.where(corrected[:, None], before))

    def _corrected_heads(self, layer: int, cache: OffloadedPageCache, q: Tensor) -> Tensor:
        """Flag the KV heads that must not reuse: all of them at the first retrieval."""
        num_kv_heads = cache.resident.shape[0]
        if layer not in self.previous_query:
            self.count(layer, Count.FIRST_RETRIEVALS, num_kv_heads)
            return q.new_ones(num_kv_heads).bool()
        similarity = query_similarity(q, self.previous_query[layer], num_kv_heads, self.config.correction_pooling)
        corrected = similarity < self.correct_below[layer]
        self.count_heads(layer, Count.HEADS_CHECKED, [1] * num_kv_heads)
        self.count_heads(layer, Count.HEADS_CORRECTED, corrected.int().tolist())
        return corrected

    def _select(self, layer: int, cache: OffloadedPageCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Choose the pages that the query of this step wants: [Hk, k]."""
        scale = softmax.scale if self.config.score_scale else 1.0
        with self.span("score", layer):
            scores = page_scores(q, cache.summaries.of(cache.candidates), scale, self.config.pooling)
        with self.span("select", layer):
            selected = topk_pages(scores, cache.budget.selected) + cache.candidates.start
        self.count_selected(layer, selected)
        return selected
