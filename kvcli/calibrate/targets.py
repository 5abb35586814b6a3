"""Everything that can be calibrated, by name: values that are tried, and files that are found."""

from __future__ import annotations

from difflib import get_close_matches

from kvcli.calibrate import budget, heads, pca, rank, skew, tau, threshold
from kvcli.calibrate.matrices import Search
from kvcli.calibrate.sweep import Sweep
from kvcli.errors import ExitCode, KvcliError

SWEEPS: dict[str, Sweep] = {module.TARGET.name: module.TARGET for module in (tau, rank, budget, threshold)}
SEARCHES: dict[str, Search] = {module.TARGET.name: module.TARGET for module in (heads, skew, pca)}


def target_of(name: str) -> Sweep | Search:
    """The target of this name; raises KvcliError (usage) where there is none."""
    targets: dict[str, Sweep | Search] = {**SWEEPS, **SEARCHES}
    if name not in targets:
        close = get_close_matches(name, targets, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"targets: {', '.join(targets)}"
        raise KvcliError(f"unknown target {name!r}", hint, ExitCode.USAGE)
    return targets[name]
