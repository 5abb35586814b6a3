"""ReFreeKV's threshold: the part of the last row's attention that may be lost (arXiv 2502.16886, section 3).

The prompt decides what that comes to: the realised budget is a result, the number of tokens attended to.
"""

from __future__ import annotations

from kvcli.methods.config import MethodConfig
from kvcli.models.geometry import ModelGeometry
from kvcli.quality.calibrate.curve import Cost
from kvcli.quality.calibrate.sweep import Grid, Sweep

VALUES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0)


def _grid(config: MethodConfig, geometry: ModelGeometry, length: int) -> Grid:  # noqa: ARG001
    return {"threshold": VALUES}


TARGET = Sweep(
    name="threshold",
    title="part of the attention norm that pruning may lose",
    setting="threshold",
    method="refreekv",
    cost=Cost("attended", "number of tokens attended to", "tokens"),
    grid=_grid,
)
