"""DuoAttention: retrieval heads keep everything, streaming heads only what is near (arXiv 2410.10819, section 2).

The KV heads that need their whole past are found by optimisation, not from attention: each head gets a gate between
full attention and attention to sinks and window, and gates are lowered as far as the model's last hidden state on long
retrieval allows (`kvcli calibrate gates`, which does not change the weights). The part `retrieval` of the KV heads with
the largest gates keeps everything.

Decided where kvcli differs from the paper: prompts are read exactly, and heads differ only afterwards; in the paper
streaming heads also read the prompt by sinks and window. The part is counted over all layers except sliding-window ones
and those of `dense_layers`, and rounded up to whole heads; equal gates go to the lower layer and head. A half is the
paper's part for grouped queries; with one KV head per query head it takes a quarter. Without a file of gates the heads
are those that attend most to what followed a token's former occurrences, by RazorAttention's probe (arXiv 2407.15891):
found in seconds, but not a result of this paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kv.calibration_file import read_tensor
from kvcli.kv.compensated import HeadSplitCache
from kvcli.kv.sliding import SlidingCache
from kvcli.methods.config import ResidentKVConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.methods.razor import choose_heads
from kvcli.methods.step import StepPlan
from kvcli.models.geometry import LayerGeometry


class DuoAttentionConfig(ResidentKVConfig):
    """Settings of DuoAttention; defaults: section 3."""

    retrieval: float = setting(0.5, "part of the KV heads that keep everything", ge=0, le=1)
    sink: int = setting(64, "first tokens that the other heads keep", "tokens", ge=0)
    window: int = setting(256, "most recent tokens that the other heads keep", "tokens", ge=1)
    gates: str = setting("", "safetensors file of every KV head's gate; without, a probe ranks the heads")
    dense_layers: int = setting(0, "leading layers that attend to everything", "layers", ge=0)

    @property
    @override
    def leading_dense_layers(self) -> int:
        return self.dense_layers


class DuoAttention(Method[DuoAttentionConfig, HeadSplitCache]):
    """Keeps everything in some heads, sinks and window in the others."""

    Config = DuoAttentionConfig
    title = "everything in retrieval heads (by gates); sinks and window in the others"
    paper = "arXiv 2410.10819"
    long_generation = True
    offloads = False
    group_consistent = True
    device_memory = "O(s·L + W)"
    exact: ClassVar[dict[str, Any]] = {"window": 1 << 20}
    ablation: ClassVar[dict[str, dict[str, Any]]] = {
        "a quarter of the heads": {"retrieval": 0.25},
        "streaming heads alone": {"retrieval": 0.0},
    }

    def __init__(self, config: DuoAttentionConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        self.keep = _heads(config, layers, context)  # layer -> [Hk] bool
        super().__init__(config, layers, context)

    @classmethod
    @override
    def needs(cls, config: DuoAttentionConfig) -> Sequence[str]:
        """Ask for retrieval scores of every head, unless a file has the gates."""
        return () if config.gates else ("head_scores",)

    def new_cache(self, layer: LayerGeometry) -> HeadSplitCache:
        """Make a cache that keeps everything for some heads, sinks and window for the others."""
        capacity, tiers, keep, d = self.context.capacity, self.context.tiers, self.keep[layer.index], layer.head_dim
        retrieval, window = int(keep.sum()), min(self.config.window, capacity)
        return HeadSplitCache(
            keep,
            self.config.cache_of(layer, retrieval, capacity, tiers),
            SlidingCache(layer.num_kv_heads - retrieval, d, window, tiers, self.config.sink),
            tiers,
        )

    @property
    @override
    def step_plan(self) -> StepPlan:
        return StepPlan()

    def statistics(self) -> dict[str, Any]:
        """Return the KV heads that keep everything, as pairs of layer and head."""
        return {
            "retrieval_heads": [[layer, int(head)] for layer in self.retrieval for head in self.keep[layer].nonzero()]
        }


def _heads(config: DuoAttentionConfig, layers: Sequence[LayerGeometry], context: SequenceContext) -> dict[int, Tensor]:
    """Return for every layer which of its heads keep everything: [Hk] bool.

    While memory is planned, scores are unknown, and the first heads stand for as many others.
    """
    split = [layer for layer in layers if layer.window is None and layer.index >= config.dense_layers]
    shape = len(layers), max((layer.num_kv_heads for layer in layers), default=0)
    if config.gates:
        known = read_tensor(config.gates, "gates", shape, "gates").float()
    else:
        known = torch.zeros(shape) if context.prepared is None else context.prepared["head_scores"].induction
    ranked = torch.full(shape, -torch.inf)
    for layer in split:
        cells = layer.index, slice(layer.num_kv_heads)
        ranked[cells] = known[cells]
    keep = choose_heads(ranked, ranked, config.retrieval, echo_part=0.0)
    return {layer.index: keep[layer.index, : layer.num_kv_heads] for layer in split}
