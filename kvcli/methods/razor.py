"""RazorAttention: retrieval heads keep everything, the others what is near (arXiv 2407.15891, section 3).

Few heads look back over a whole text: they find a token's former occurrences (echo heads) or what followed them
(induction heads). These retrieval heads keep all their KV. Every other head keeps sinks, a recent window and one
compensation token, the mean key and value of everything that it dropped, which counts as many tokens as it stands for.

The set of retrieval heads does not depend on the text. It comes from a file (`heads`, a tensor of that name, bool
[layers, KV heads]); without one the heads are found on random tokens that repeat (`kvcli.runtime.retrieval_heads`),
before the first prompt is read.

Decided where the paper, written for one KV head per query head, says nothing or differs from its reference code: the
score of a KV head is that of its best query head, as in the code; a head that is good at both takes one place; the
window's minimum length, which algorithm 1 leaves open, is 4,000 tokens. Generated tokens move the window on. Heads are
ranked over all layers except sliding-window ones and those of `dense_layers`, none by default, as in the code.

Rounding: `sparsity` of the ranked heads is rounded up to whole heads, so that at least one keeps everything: 3 of 16,
10 of 64. `echo` of them is rounded to the nearest, which is none below 51 heads; these places go to induction heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor
from typing_extensions import override

from kvcli.kv.calibration_file import read_tensor
from kvcli.kv.compensated import CompensatedCache, HeadSplitCache
from kvcli.kv.sliding import SlidingCache
from kvcli.methods.config import ResidentKVConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.models.geometry import LayerGeometry


class RazorConfig(ResidentKVConfig):
    """Settings of RazorAttention; defaults: section 4.1 and table 2."""

    sparsity: float = setting(0.15, "part of the KV heads that keep everything", ge=0, le=1)
    echo: float = setting(0.01, "part of the KV heads chosen by echo score, the others by induction", ge=0, le=1)
    sink: int = setting(4, "first tokens that the other heads keep", "tokens", ge=0)
    window: int = setting(4000, "most recent tokens that the other heads keep, at least", "tokens", ge=1)
    window_part: float = setting(0.2, "they keep at least this part of the prompt", ge=0, le=1)
    compensation: bool = setting(True, "the other heads keep one token for all they dropped")
    heads: str = setting("", "safetensors file of the heads that keep everything; without, a probe finds them")
    dense_layers: int = setting(0, "leading layers that attend to everything", "layers", ge=0)

    @property
    @override
    def leading_dense_layers(self) -> int:
        return self.dense_layers

    @model_validator(mode="after")
    def _echo_is_a_part(self) -> RazorConfig:
        if self.echo > self.sparsity:
            raise ValueError(f"echo {self.echo} is more than sparsity {self.sparsity}, of which it is a part")
        return self


class Razor(Method[RazorConfig, HeadSplitCache]):
    """Keeps everything in retrieval heads; sinks, window and a mean token in the others."""

    Config = RazorConfig
    title = "everything in retrieval heads; sinks, window and a mean token in the others"
    paper = "arXiv 2407.15891"
    long_generation = True
    offloads = False
    group_consistent = True
    device_memory = "O(s·L + W)"
    exact: ClassVar[dict[str, Any]] = {"window_part": 1.0, "window": 4096}
    true_kv: ClassVar[dict[str, Any]] = {"compensation": False}
    ablation: ClassVar[dict[str, dict[str, Any]]] = {"without the mean token": {"compensation": False}}

    def __init__(self, config: RazorConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        self.keep = _heads(config, layers, context)  # layer -> [Hk] bool
        super().__init__(config, layers, context)

    @classmethod
    @override
    def needs(cls, config: RazorConfig) -> Sequence[str]:
        """Ask for retrieval scores of every head, unless a file names the heads."""
        return () if config.heads else ("head_scores",)

    def new_cache(self, layer: LayerGeometry) -> HeadSplitCache:
        """Make a cache that keeps everything for some heads; sinks, window and mean for the others."""
        config, context, keep, d = self.config, self.context, self.keep[layer.index], layer.head_dim
        prompt = context.capacity if context.prompt_tokens is None else context.prompt_tokens
        window = min(context.capacity, max(config.window, math.ceil(config.window_part * prompt)))
        local = CompensatedCache if config.compensation else SlidingCache
        dense_heads = int(keep.sum())
        return HeadSplitCache(
            keep,
            config.cache_of(layer, dense_heads, context.capacity, context.tiers),
            local(layer.num_kv_heads - dense_heads, d, window, context.tiers, config.sink),
            context.tiers,
        )

    def statistics(self) -> dict[str, Any]:
        """Return the KV heads that keep everything, as pairs of layer and head."""
        return {
            "retrieval_heads": [[layer, int(head)] for layer in self.retrieval for head in self.keep[layer].nonzero()]
        }


def _heads(config: RazorConfig, layers: Sequence[LayerGeometry], context: SequenceContext) -> dict[int, Tensor]:
    """Return for every layer which of its heads keep everything: [Hk] bool.

    While memory is planned, scores are unknown, and the first heads stand for as many others.
    """
    split = [layer for layer in layers if layer.window is None and layer.index >= config.dense_layers]
    most = max((layer.num_kv_heads for layer in layers), default=0)
    if config.heads:
        keep = read_tensor(config.heads, "heads", (len(layers), most), "heads").bool()
    else:
        known = context.prepared
        echo, induction = (torch.full((len(layers), most), -torch.inf) for _ in range(2))
        for layer in split:
            cells = layer.index, slice(layer.num_kv_heads)
            echo[cells] = 0 if known is None else known["head_scores"].echo[cells]
            induction[cells] = 0 if known is None else known["head_scores"].induction[cells]
        keep = choose_heads(induction, echo, config.sparsity, config.echo)
    return {layer.index: keep[layer.index, : layer.num_kv_heads] for layer in split}


def choose_heads(induction: Tensor, echo: Tensor, part: float, echo_part: float) -> Tensor:
    """Mark `part` of all heads, rounded up: `echo_part`, rounded, by echo score, the others by induction score.

    Scores [layers, heads] -> bool [layers, heads]; larger is better, and -inf marks a head that does not exist. A head
    that is good at both takes one place. Ties go to the lower layer and head.
    """
    num_heads = int((induction > -torch.inf).sum())
    wanted = math.ceil(round(part * num_heads, 6))  # 0.15 of 20 are 3 heads, whatever the product rounds to
    chosen = torch.zeros_like(induction, dtype=torch.bool)
    for scores, so_far in ((echo, min(wanted, round(echo_part * num_heads))), (induction, wanted)):
        left = scores.masked_fill(chosen, -torch.inf).flatten()
        best = left.sort(descending=True, stable=True).indices[: so_far - int(chosen.sum())]
        chosen.view(-1)[best] = True
    return chosen
