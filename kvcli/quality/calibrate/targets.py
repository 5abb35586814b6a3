"""Everything that can be calibrated, by name: sweeps over values, and tensors that are found."""

from __future__ import annotations

from difflib import get_close_matches

from kvcli.errors import ExitCode, KvcliError
from kvcli.quality.calibrate import budget, heads, pca, rank, skew, tau, threshold
from kvcli.quality.calibrate.matrices import TensorTarget
from kvcli.quality.calibrate.sweep import Sweep

SWEEPS: dict[str, Sweep] = {module.TARGET.name: module.TARGET for module in (tau, rank, budget, threshold)}
SEARCHES: dict[str, TensorTarget] = {module.TARGET.name: module.TARGET for module in (heads, skew, pca)}


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
