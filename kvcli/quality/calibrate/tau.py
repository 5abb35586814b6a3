"""FreeKV's tau: how alike consecutive queries have to be for a selection to serve both (arXiv 2505.13109, 3.3 and 5.4).

More corrections are closer to exact retrieval and make attention wait for more recalls. Beside the curve, how
alike consecutive queries are: the mean cosine of each KV head's query group, which is what a tau is compared with (the
paper's figures 3 and 10), and what part of them lies below each tenth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.query_similarity import query_similarity
from kvcli.kernels.softmax import Softmax
from kvcli.methods.base import AnyMethod, AttentionObserver
from kvcli.methods.config import MethodConfig
from kvcli.models.geometry import ModelGeometry
from kvcli.quality.calibrate.curve import Cost
from kvcli.quality.calibrate.sweep import Collector, Grid, Sweep

BOUNDS = tuple(i / 20 for i in range(21))


class Similarity(Collector):
    """Cosines of each KV head's consecutive queries, while it decodes."""

    def __init__(self, config: MethodConfig):
        self.pooling: Literal["mean", "max"] = getattr(config, "correction_pooling", "mean")
        self.previous: dict[int, Tensor] = {}  # layer -> [H, d]
        self.steps: dict[int, int] = {}
        self.total: dict[int, Tensor] = {}  # layer -> [Hk]
        self.below = torch.zeros(len(BOUNDS), dtype=torch.int64)  # cosines below each bound
        self.seen = 0

    @override
    def begin_passage(self) -> AttentionObserver:
        self.previous = {}
        return self._watch

    def _watch(self, method: AnyMethod, layer: int, q: Tensor, out: Tensor, softmax: Softmax) -> None:  # noqa: ARG002
        if layer not in method.retrieval:
            return
        if layer in self.previous:
            num_kv_heads = method.attended(layer).shape[0]
            cosine = query_similarity(q, self.previous[layer], num_kv_heads, self.pooling).double().cpu()
            self.steps[layer] = self.steps.get(layer, 0) + 1
            self.total[layer] = cosine + self.total.get(layer, torch.zeros_like(cosine))
            self.below += (cosine[:, None] < torch.tensor(BOUNDS)).sum(0)
            self.seen += len(cosine)
        self.previous[layer] = q.clone()

    @override
    def figures(self) -> dict[str, Any]:
        """`similarity`, the mean cosine by layer and KV head, and `below`, what part lies below each bound."""
        if not self.seen:
            return {}
        return {
            "similarity": [
                {"layer": layer, "heads": (total / self.steps[layer]).tolist()}
                for layer, total in sorted(self.total.items())
            ],
            "below": [
                {"cosine": bound, "part": count / self.seen}
                for bound, count in zip(BOUNDS, self.below.tolist(), strict=True)
            ],
        }


def _grid(config: MethodConfig, geometry: ModelGeometry, length: int) -> Grid:  # noqa: ARG001
    values: Sequence[float] = (0.0, 0.7, 0.8, 0.9, 1.0)  # section 5.4
    return {"tau": values}


TARGET = Sweep(
    name="tau",
    title="query similarity below which a KV head is corrected",
    setting="tau",
    method="freekv",
    cost=Cost("bytes_exposed", "recall that attention waits for", "bytes"),
    grid=_grid,
    relative=True,
    by_layer=True,
    collector=Similarity,
)
