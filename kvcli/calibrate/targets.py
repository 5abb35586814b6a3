"""Everything that can be calibrated, by name."""

from __future__ import annotations

from difflib import get_close_matches

from kvcli.calibrate import budget, rank, tau, threshold
from kvcli.calibrate.sweep import Sweep
from kvcli.errors import ExitCode, KvcliError

SWEEPS: dict[str, Sweep] = {module.TARGET.name: module.TARGET for module in (tau, rank, budget, threshold)}


def sweep_of(name: str) -> Sweep:
    """The target of this name; raises KvcliError (usage) where there is none."""
    if name not in SWEEPS:
        close = get_close_matches(name, SWEEPS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"targets: {', '.join(SWEEPS)}"
        raise KvcliError(f"unknown target {name!r}", hint, ExitCode.USAGE)
    return SWEEPS[name]
