"""PyramidKV: SnapKV with more tokens for lower layers and fewer for higher ones (arXiv 2406.02069, section 4).

Attention spreads widely in the first layers and narrows towards the last. So the number of tokens that a layer keeps in
addition to its window falls linearly from layer to layer, and the mean is SnapKV's number: the last layer gets that
mean divided by `beta`, the first twice the mean less this.

Decided as in the reference code: where the first layer's share is more than the prompt has, it keeps everything, and
the surplus goes to the last layer, so that the mean stays (for prompts shorter than twice the budget that code gives
all layers the same). Layers lie on the exact line, each rounded down, where the code rounds the step between two layers
down, so that a layer may differ from it by as many tokens as there are layers below it. Only layers that are cut count,
not sliding-window ones.
"""

from collections.abc import Sequence

from typing_extensions import override

from kvcli.methods.config import CountOrShare, setting
from kvcli.methods.contract import SequenceContext
from kvcli.methods.snapkv import SnapKV, SnapKVConfig
from kvcli.models.geometry import LayerGeometry


class PyramidKVConfig(SnapKVConfig):
    """Settings of PyramidKV; defaults: section 5."""

    budget: CountOrShare = setting(
        2048, "tokens kept of the prompt per KV head, window included, mean of the layers", "tokens", ge=1
    )
    window: int = setting(8, "last tokens of the prompt, which stay and whose queries vote", "tokens", ge=1)
    beta: int = setting(20, "how many times less than the mean the last layer gets; 1: all the same", ge=1)


class PyramidKV(SnapKV):
    """Keeps the prompt tokens that its end attends to, more in lower layers."""

    Config = PyramidKVConfig
    config: PyramidKVConfig
    title = "as snapkv, but lower layers keep more tokens than higher ones"
    paper = "arXiv 2406.02069"
    budget_is_mean = True

    def __init__(self, config: PyramidKVConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        cut = [layer.index for layer in layers if layer.window is None]
        self.steps = {index: step for step, index in enumerate(cut)}  # layer -> steps down from the first
        super().__init__(config, layers, context)

    @override
    def layer_budget(self, layer: int, prompt: int) -> int:
        """Return the layer's point on a linear fall, rounded down."""
        budget, window = self.config.budget, self.config.window
        last, step = len(self.steps) - 1, self.steps[layer]
        if prompt <= budget or last == 0:
            return budget
        mean = budget - window
        most = min(2 * mean - mean // self.config.beta, prompt - window)
        least = 2 * mean - most
        return window + (most * (last - step) + least * step) // last
