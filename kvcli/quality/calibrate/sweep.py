"""Targets whose values are tried: the settings, what they cost, and what else is measured on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.methods import get_method, method_names
from kvcli.methods.base import AnyMethod, AttentionObserver
from kvcli.methods.config import MethodConfig
from kvcli.models.geometry import ModelGeometry
from kvcli.quality.calibrate.curve import Cost
from kvcli.quality.fidelity import Passage

Grid = Mapping[str, Sequence[Any]]
"""Values to try for each setting; all combinations."""


class Collector:
    """Measures more than closeness, over a whole calibration; this one measures nothing."""

    def begin_passage(self) -> AttentionObserver | None:
        """Return what is to observe the method with the grid's last setting over the next passage, if anything is."""
        return None

    def end_passage(self, reference: AnyMethod, passage: Passage) -> None:
        """Measure the reference, full attention, after a passage."""

    def figures(self) -> dict[str, Any]:
        """Return what was measured, as plain data."""
        return {}


@dataclass(frozen=True)
class Sweep:
    """A target whose values are tried: its setting, its default method, and the grid for a model and a length."""

    name: str
    title: str
    setting: str
    method: str
    cost: Cost
    grid: Callable[[MethodConfig, ModelGeometry, int], Grid]
    collector: Callable[[MethodConfig], Collector] = lambda _: Collector()
    relative: bool = False
    """Whether the loss counts that a setting adds to the loss of the grid's last setting."""
    by_layer: bool = False
    """Whether the setting takes a value for each layer as well; the grid's own have the cheapest first."""

    def profiles(
        self, base: Profile, geometry: ModelGeometry, length: int, asked: Mapping[str, Sequence[Any]]
    ) -> list[tuple[dict[str, Any], Profile]]:
        """Combine the grid's values, `asked` ones instead of the grid's own: settings, and the profile with them.

        Combinations of the grid's own values that the method refuses are left out.

        Raises:
            KvcliError: the method has no such setting, or no combination is left (usage).
        """
        fields = type(base.settings).model_fields
        if self.setting not in fields:
            having = [name for name in method_names() if self.setting in get_method(name).Config.model_fields]
            raise KvcliError(
                f"{base.method} has no setting {self.setting!r} to calibrate",
                f"methods that have: {', '.join(having)}",
                ExitCode.USAGE,
            )
        own = {key: values for key, values in self.grid(base.settings, geometry, length).items() if key in fields}
        grid = {**own, **asked}
        found: dict[str, tuple[dict[str, Any], Profile]] = {}
        refused: KvcliError | None = None
        for values in product(*grid.values()):
            overrides = dict(zip(grid, values, strict=True))
            try:
                profile = resolve_profile(base.method, overrides={**base.settings.model_dump(), **overrides})
            except KvcliError as error:
                refused = error
                continue
            settings = {key: getattr(profile.settings, key) for key in grid}
            found.setdefault(profile.hash, (settings, profile))
        if refused is not None and (asked or not found):
            raise refused
        return list(found.values())
