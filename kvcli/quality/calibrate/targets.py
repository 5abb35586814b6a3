"""Everything that can be calibrated, by name: sweeps over values, and tensors to find."""

from difflib import get_close_matches

from kvcli.errors import ExitCode, KvcliError
from kvcli.methods.config import MethodConfig
from kvcli.models.geometry import ModelGeometry
from kvcli.quality.calibrate import tensors
from kvcli.quality.calibrate.sweep import Cost, Grid, Similarity, Spectrum, Sweep
from kvcli.quality.calibrate.tensors import TensorTarget

_ATTENDED = Cost("attended", "number of tokens attended to", "tokens")
_RANKS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1)  # of the width of the keys
_BUDGETS = (32, 16, 8, 4, 2)  # a prompt's length over them
_LEAST_BUDGET = 64


def _ranks(config: MethodConfig, geometry: ModelGeometry, length: int) -> Grid:  # noqa: ARG001
    width = max(layer.num_kv_heads * layer.head_dim for layer in geometry.layers if layer.window is None)
    outliers = getattr(config, "outliers", 0)
    return {"rank": [max(1, round(part * width)) for part in _RANKS], "outliers": sorted({0, outliers})}


def _budgets(config: MethodConfig, geometry: ModelGeometry, length: int) -> Grid:  # noqa: ARG001
    """Combine each budget with pages of half, once and twice the profile's size; sink and window stay."""
    page: int = getattr(config, "page_size", 1)
    return {
        "budget": sorted({max(_LEAST_BUDGET, length // part) for part in _BUDGETS}),
        "page_size": sorted({max(1, page // 2), page, 2 * page}),
    }


_SWEEPS = (
    # More corrections are closer to exact retrieval and make attention wait for more recalls.
    Sweep(
        name="tau",
        title="query similarity below which a KV head is corrected",
        method="freekv",
        cost=Cost("bytes_exposed", "recall that attention waits for", "bytes"),
        grid=lambda *_: {"tau": (0.0, 0.7, 0.8, 0.9, 1.0)},  # arXiv 2505.13109, section 5.4
        relative=True,
        by_layer=True,
        collector=Similarity,
    ),
    Sweep(
        name="rank",
        title="rank of the keys, and chunks that are kept exact",
        method="shadowkv",
        cost=Cost("device_kv_bytes", "memory on the device", "bytes"),
        grid=_ranks,
        relative=True,
        collector=Spectrum,
    ),
    Sweep(
        name="budget",
        title="tokens attended to, and pages they are selected by",
        method="freekv",
        cost=_ATTENDED,
        grid=_budgets,
    ),
    # The prompt decides what a threshold amounts to: the realised budget is a result.
    Sweep(
        name="threshold",
        title="part of the attention norm that pruning may lose",
        method="refreekv",
        cost=_ATTENDED,
        grid=lambda *_: {"threshold": (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0)},
    ),
)
_SEARCHES = (
    TensorTarget("heads", "razor", tensors.Heads, reads_text=False),
    TensorTarget("gates", "duoattention", tensors.Gates),
    TensorTarget("skew", "infinigen", tensors.Skew),
    TensorTarget("pca", "loki", tensors.Axes),
)
SWEEPS: dict[str, Sweep] = {target.name: target for target in _SWEEPS}
SEARCHES: dict[str, TensorTarget] = {target.name: target for target in _SEARCHES}


def target_of(name: str) -> Sweep | TensorTarget:
    """Return the target of this name.

    Raises:
        KvcliError: there is none (usage); the hint names the nearest.
    """
    targets: dict[str, Sweep | TensorTarget] = {**SWEEPS, **SEARCHES}
    if name not in targets:
        close = get_close_matches(name, targets, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"targets: {', '.join(targets)}"
        raise KvcliError(f"unknown target {name!r}", hint, ExitCode.USAGE)
    return targets[name]
