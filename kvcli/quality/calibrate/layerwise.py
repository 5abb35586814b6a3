"""A value of its own for each layer: which combinations are worth measuring.

While one value after another is measured for all layers at once, every layer shows what each costs there and how far
the layer's output comes to lie from the exact one. Errors of single layers do not add up to the loss, so they only
decide what is tried: from the cheapest value everywhere on, the layer comes next whose better value takes away most
squared error for what it costs. What comes of it is measured as any value is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class LayerPoint:
    """The figures of one layer at a value that all layers have: its cost, and the relative error of its output."""

    cost: float
    error: float


def layerwise(
    values: Sequence[float], curves: Mapping[int, Sequence[LayerPoint]], layers: int, most: int
) -> list[tuple[float, ...]]:
    """Combine `values`, the cheapest first, of which `curves` has a point each, for those layers that choose at all.

    Gives at most `most` combinations of one value for each of `layers`, spread from cheap to dear; none of them has
    the same value everywhere.
    """
    at = dict.fromkeys(curves, 0)
    found: list[tuple[float, ...]] = []
    while steps := [
        (_gain(curve[at[layer]], curve[better]), layer, better)
        for layer, curve in curves.items()
        for better in range(at[layer] + 1, len(values))
    ]:
        gain, layer, better = max(steps)
        if gain <= 0:
            break
        at[layer] = better
        if len(set(at.values())) > 1:
            found.append(tuple(values[at.get(each, 0)] for each in range(layers)))
    bounds = [len(found) * part // most for part in range(most + 1)]
    return found if len(found) <= most else [found[end - 1] for start, end in pairwise(bounds) if end > start]


def _gain(cheap: LayerPoint, better: LayerPoint) -> float:
    """Return the squared error taken away by a unit of cost; infinite where it costs nothing."""
    less, more = cheap.error**2 - better.error**2, better.cost - cheap.cost
    return less / more if more > 0 else less * float("inf") if less else 0.0
