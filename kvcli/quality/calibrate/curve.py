"""The curve of a sweep, one point a setting, and the choice among its points.

The loss is KL(full attention || method) of the next token in nats, the mean over the tokens of a passage, and of these
the mean over the passages. The choice goes by the loss that a setting adds: to nothing, or, where a target cannot do
away with all of it (no tau makes up for a small budget), passage by passage to that of the target's last setting. Both
are shown. A bound lies two standard errors above its figure, and the choice keeps the bound within what is allowed:
what holds on these passages by luck alone should not be promised for others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from kvcli.quality.calibrate.layerwise import LayerPoint
from kvcli.quality.fidelity import ATTENTION, Fidelity, MeasuredMethod
from kvcli.telemetry.counters import Count

NOTHING = 1e-6
"""Attention mass that counts as none."""


@dataclass(frozen=True)
class Point:
    """The figures of one setting over all passages; bytes are per step, `heads_corrected` a part of those checked.

    `loss` is nats from full attention, `added` nats of it that count for the choice.
    """

    settings: dict[str, Any]
    loss: float
    loss_bound: float
    added: float
    added_bound: float
    agreement: float
    mass: float | None
    recall: float | None
    error: float | None
    attended: float | None
    heads_corrected: float | None
    bytes_exposed: float
    bytes_to_device: float
    device_kv_bytes: float

    @property
    def label(self) -> str:
        """The settings as text, such as "rank 24, outliers 8"."""
        return ", ".join(f"{key} {value_text(value)}" for key, value in self.settings.items())


def value_text(value: Any) -> str:
    """Return a setting's value as text; a value by layer gives the numbers one after another."""
    return " ".join(f"{each:g}" for each in value) if isinstance(value, tuple) else str(value)


@dataclass
class PassageSums:
    """Adds up the passages of one setting."""

    settings: dict[str, Any]
    fidelity: Fidelity = field(default_factory=Fidelity)
    losses: list[float] = field(default_factory=list)  # of each passage
    heads_checked: int = 0
    heads_corrected: int = 0
    bytes_exposed: int = 0
    bytes_to_device: int = 0
    device_kv_bytes: int = 0
    exposed_by_layer: dict[int, int] = field(default_factory=dict)  # bytes

    def add(self, measured: MeasuredMethod) -> None:
        """Add a passage."""
        counters = measured.method.context.counters
        correction, cache = counters.correction(), counters.cache()
        self.fidelity.add(measured.fidelity)
        self.losses.append(measured.fidelity.kl)
        self.heads_checked += correction.heads_checked
        self.heads_corrected += correction.heads_corrected
        self.bytes_exposed += cache.bytes_exposed
        self.bytes_to_device += cache.bytes_to_device
        self.device_kv_bytes += measured.method.footprint().device
        for layer in measured.fidelity.layers:
            exposed = sum(step[layer][Count.BYTES_EXPOSED] for step in counters.counts)
            self.exposed_by_layer[layer] = self.exposed_by_layer.get(layer, 0) + exposed

    def by_layer(self) -> dict[int, LayerPoint]:
        """Return the bytes waited for and the output's error of each layer that chooses what to attend to."""
        return {
            layer: LayerPoint(self.exposed_by_layer[layer], float(sums.mean[ATTENTION.index("error")].mean()))
            for layer, sums in self.fidelity.layers.items()
        }

    def point(self, least: Sequence[float] | None = None) -> Point:
        """Return the figures over the passages, of which there is one at least.

        `least` are losses by passage that the added loss counts from.
        """
        steps, passages = len(self.fidelity.steps), len(self.losses)
        added = [loss - other for loss, other in zip(self.losses, least or [0.0] * passages, strict=True)]
        return Point(
            settings=self.settings,
            loss=fmean(self.losses),
            loss_bound=_bound(self.losses),
            added=fmean(added),
            added_bound=_bound(added),
            agreement=self.fidelity.agreement,
            **self.fidelity.attention(),
            heads_corrected=self.heads_corrected / self.heads_checked if self.heads_checked else None,
            bytes_exposed=self.bytes_exposed / steps,
            bytes_to_device=self.bytes_to_device / steps,
            device_kv_bytes=self.device_kv_bytes / passages,
        )


def _bound(losses: Sequence[float]) -> float:
    """Return two standard errors above the mean over passages."""
    error = stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
    return fmean(losses) + 2 * error


@dataclass(frozen=True)
class Cost:
    """The cost of closeness in a sweep: a field of `Point`, its name and its unit."""

    field: str
    name: str
    unit: str = ""

    def of(self, point: Point) -> float:
        """Return the cost of one point."""
        value: float | None = getattr(point, self.field)
        return 0.0 if value is None else value


@dataclass(frozen=True)
class ChosenPoint:
    """The point chosen, None where none stays within the limit, and the reason."""

    point: Point | None
    reason: str


def choose(points: Sequence[Point], cost: Cost, max_loss: float, relative: bool = False) -> ChosenPoint:
    """Take the cheapest point that adds at most `max_loss` nats, the closest of equally cheap ones.

    `relative` says that the added loss counts from the last point and not from full attention.
    """
    if all(point.mass is not None and point.mass > 1 - NOTHING for point in points):
        return ChosenPoint(
            None, "nothing was left out of attention at any value: the text fits into the budget, take a longer one"
        )
    within = [point for point in points if point.added_bound <= max_loss]
    if not within:
        nearest = min(points, key=lambda point: point.added_bound)
        return ChosenPoint(
            None, f"none adds at most {max_loss:g} nats; the nearest is {nearest.label} with {_added(nearest)}"
        )
    best = min(within, key=lambda point: (cost.of(point), point.loss))
    base = f" to {points[-1].label}" if relative else ""
    whole = f"; from full attention it is {nats(best.loss, best.loss_bound)}" if relative else ""
    return ChosenPoint(
        best,
        f"{best.label}: the least {cost.name} of the {len(within)} of {len(points)} that add at most {max_loss:g} nats"
        f"{base} (this one {_added(best)}){whole}",
    )


def nats(figure: float, bound: float) -> str:
    """Return a loss and its bound as text, such as "0.374 nats, at most 0.391"."""
    return f"{figure:.3g} nats, at most {bound:.3g}"


def _added(point: Point) -> str:
    return f"{point.added:.3g}, at most {point.added_bound:.3g}"
