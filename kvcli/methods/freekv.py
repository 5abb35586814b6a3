"""FreeKV: speculative retrieval with fine-grained correction (arXiv 2505.13109, sections 3 and 4).

The full KV cache lies in host memory by pages; the device holds sink, window and a selection per KV head. A step
attends to the pages that the query of the previous step selected, so that selection and recall leave the critical path.
A KV head whose query turned too far (cosine below `tau`, pooled over its group) is corrected: it selects with its own
query and recalls before attending. The first retrieval of a sequence has nothing to reuse and is counted separately.

`kvcli.methods.step` carries this out phase after phase, which defines what a step attends to. Anything that overlaps
phases must select the same pages and give the same output.
"""

from typing import Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.group_pooling import Pooling
from kvcli.kernels.recall import HostLayout
from kvcli.kv.paged import OffloadedPageCache
from kvcli.methods.config import CosineByLayer, HostKVConfig, PagedConfig, by_layer, setting
from kvcli.methods.contract import Method
from kvcli.methods.step import Correction, FromHost, PageBounds, RecallBy, StepPlan
from kvcli.models.geometry import LayerGeometry


class FreeKVConfig(HostKVConfig, PagedConfig):
    """Settings of FreeKV; defaults: section 5.1 and appendix A."""

    tau: CosineByLayer = setting(0.9, "correct a head below this query cosine: 0 never, 1 always; or a list", "cosine")
    pooling: Pooling = setting("mean_s", "how page scores are pooled over the query heads of a KV head")
    correction_pooling: Literal["mean", "max"] = setting("mean", "how cosines are pooled over the group")
    score_scale: bool = setting(True, "scale page scores as attention does (the reference code leaves it out)")
    host_layout: HostLayout = setting("hnd", "a page in host memory: hnd by KV head, nhd by token (ablation)")
    recall: RecallBy = setting("gather", "how a GPU gets pages: gather by a kernel, copy one after another (ablation)")
    double_buffer: bool = setting(True, "copy into two staging buffers in turn, not one (ablation)")

    def correct_below(self, layers: int) -> tuple[float, ...]:
        """Return the cosine below which a head is corrected, per layer; raise KvcliError (usage) for too few numbers.

        0 and 1 map beyond the range of a cosine, so that rounding cannot change "never" and "always".
        """
        return tuple({0.0: -2.0, 1.0: 2.0}.get(tau, tau) for tau in by_layer("tau", self.tau, layers))


class FreeKV(Method[FreeKVConfig, OffloadedPageCache]):
    """Reuses the last step's selection where the query allows, and recalls only missing pages."""

    Config = FreeKVConfig
    title = "pages selected by the last step's query; heads whose query changed reselect"
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

    def new_cache(self, layer: LayerGeometry) -> OffloadedPageCache:
        """Keep everything in host memory and a budget of pages on the device."""
        shape, pages = (layer.num_kv_heads, layer.head_dim, self.context.capacity), self.config.pages
        return OffloadedPageCache(*shape, pages, self.config.tiers(self.context.tiers), layout=self.config.host_layout)

    @property
    @override
    def step_plan(self) -> StepPlan:
        config = self.config
        return StepPlan(
            PageBounds(config.pooling, config.score_scale),
            when="after",
            fetch=FromHost(config.recall, config.double_buffer),
            correction=Correction(config.correct_below(len(self.caches)), config.correction_pooling),
        )

    @override
    def attended(self, layer: int) -> Tensor:
        """Return the tokens read; heads that were not corrected read what the previous step had selected."""
        read = self.remembered[layer].read if layer in self.retrieval else None
        return super().attended(layer) if read is None else self.retrieval[layer].attended_pages(read.pages)
