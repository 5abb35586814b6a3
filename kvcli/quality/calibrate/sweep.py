"""What a target of calibration is: settings to try, what they cost, and what else to look at on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

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


class Collector(Protocol):
    """Whoever looks at a run for more than its closeness; one for a whole calibration."""

    def attention_observer(self) -> AttentionObserver | None:
        """Who watches the method with the grid's last setting over the next passage."""

    def take(self, reference: AnyMethod, passage: Passage) -> None:
        """See the reference, full attention, after a passage."""

    def figures(self) -> dict[str, Any]:
        """What was found, as plain data."""


class Nothing:
    """The collector of those that look at nothing else."""

    def attention_observer(self) -> None:
        """See `Collector.attention_observer`."""

    def take(self, reference: AnyMethod, passage: Passage) -> None:
        """See `Collector.take`."""

    def figures(self) -> dict[str, Any]:
        """See `Collector.figures`."""
        return {}


@dataclass(frozen=True)
class Sweep:
    """A target: the setting it is about, the method it is mostly asked for, and the grid for a model and a length."""

    name: str
    title: str
    setting: str
    method: str
    cost: Cost
    grid: Callable[[MethodConfig, ModelGeometry, int], Grid]
    collector: Callable[[MethodConfig], Collector] = lambda _: Nothing()
    relative: bool = False
    """Whether only that loss counts which a setting adds to the one of the grid's last setting."""
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
