"""The budget: how many tokens a method has to attend to, and in pages of which size.

Budgets from a thirty-second of the prompt to half of it, each with pages of half, once and twice the size that the
profile has. Sink and window stay the profile's, unless they are asked for.
"""

from __future__ import annotations

from kvcli.methods.config import MethodConfig
from kvcli.models.geometry import ModelGeometry
from kvcli.quality.calibrate.curve import Cost
from kvcli.quality.calibrate.sweep import Grid, Sweep

PARTS = (32, 16, 8, 4, 2)
LEAST = 64


def _grid(config: MethodConfig, geometry: ModelGeometry, length: int) -> Grid:  # noqa: ARG001
    page: int = getattr(config, "page_size", 1)
    return {
        "budget": sorted({max(LEAST, length // part) for part in PARTS}),
        "page_size": sorted({max(1, page // 2), page, 2 * page}),
    }


TARGET = Sweep(
    name="budget",
    title="tokens attended to, and pages they are selected by",
    setting="budget",
    method="freekv",
    cost=Cost("attended", "number of tokens attended to", "tokens"),
    grid=_grid,
)
