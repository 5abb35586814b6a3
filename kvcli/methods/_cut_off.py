"""ActQKV's cut-off: how the layers share the budget of a decode step (arXiv 2502.13542, section 4.2).

A layer takes of what is left the part that the entropy of its scores has in the entropies of itself and the layers
still to come (equation 12), for which the means of their last 100 steps stand; before each layer has one, the split is
even. What a layer really gets, rounded and clamped, is what the next ones lack; so the layers' mean keeps to the
budget, unless a clamp binds.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean

RECENT_STEPS = 100  # steps whose entropies make a layer's mean


class CutOff:
    """Divides `blocks` a layer among `layers` by their entropies, layer after layer within each step."""

    def __init__(self, layers: Sequence[int], blocks: int, least: int, most: int):
        self.layers, self.blocks, self.least, self.most = list(layers), blocks, least, most
        self.recent: dict[int, deque[float]] = {layer: deque(maxlen=RECENT_STEPS) for layer in layers}
        self.means: dict[int, float] = {}
        self.remaining = 0.0

    def allot(self, layer: int, entropy: float, candidates: int) -> int:
        """Give `layer` its blocks of this step, at most `candidates`."""
        if layer == self.layers[0]:
            self.remaining = len(self.layers) * self.blocks
        rest = self.layers[self.layers.index(layer) + 1 :]
        if len(self.means) == len(self.layers):
            share = entropy / (entropy + sum(self.means[other] for other in rest))
        else:
            share = 1 / (1 + len(rest))
        given = min(candidates, max(self.least, min(self.most, round(share * self.remaining))))
        self.remaining -= given
        self.recent[layer].append(entropy)
        self.means[layer] = fmean(self.recent[layer])
        return given
