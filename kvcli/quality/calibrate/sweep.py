"""Targets whose values are tried: the settings, what they cost, and what else is measured on the way (`collectors`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.methods import get_method, method_names
from kvcli.methods.config import MethodConfig
from kvcli.models.geometry import ModelGeometry
from kvcli.quality.calibrate.collectors import Collector
from kvcli.quality.calibrate.curve import Cost
from kvcli.sizes import Share

Grid = Mapping[str, Sequence[Any]]
"""Values to try for each setting; all combinations."""


def methods_with(setting: str) -> str:
    """List the methods that have a setting."""
    return ", ".join(name for name in method_names() if setting in get_method(name).Config.model_fields)


@dataclass(frozen=True)
class Sweep:
    """A target whose values are tried: the setting of its name, its default method, and the grid of values.

    The grid is for the method's settings, a model, and the tokens of a prompt.
    """

    name: str
    title: str
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
        if self.name not in fields:
            raise KvcliError(
                f"{base.method} has no setting {self.name!r} to calibrate",
                f"methods that have: {methods_with(self.name)}",
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
                profile.for_prompt(length)
            except KvcliError as error:
                refused = error
                continue
            tried = {key: getattr(profile.settings, key) for key in grid}
            settings = {key: str(value) if isinstance(value, Share) else value for key, value in tried.items()}
            found.setdefault(profile.hash, (settings, profile))
        if refused is not None and (asked or not found):
            raise refused
        return list(found.values())
