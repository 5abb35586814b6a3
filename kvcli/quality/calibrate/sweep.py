"""Targets whose values are tried: the cost and the loss of each value, and the choice among them.

The loss is KL(full attention || method) of the next token in nats, the mean over the tokens of a passage, and then the
mean over the passages. The choice depends on the loss that a setting adds: to zero, or, if a target cannot remove all
of it (no tau makes up for a small budget), passage by passage to that of the target's last setting. Both are shown. A
bound lies two standard errors above its figure, and the choice keeps the bound within the limit, so that it does not
promise for other texts what holds on these passages by luck.

A separate value for each layer: while one value after another is measured for all layers at once, every layer shows its
cost there and the distance of its output from the exact one. Errors of single layers do not add up to the loss, so they
only decide what is tried: starting from the cheapest value everywhere, the next layer to improve is the one whose
better value removes most squared error for its cost. The result is measured as any value is.

Two things are measured in addition to the loss. `Similarity` is for FreeKV's tau (arXiv 2505.13109, figures 3 and 10):
the mean cosine of each KV head's query group with the one before, which is compared with tau, and the part of them
below each twentieth. `Spectrum` is for ShadowKV's rank (arXiv 2410.21465, section 3.1): keys without their rotation,
with the heads of a token concatenated, are close to a matrix of low rank. The part of their norm outside the first r
directions is computed for each prompt on its own, as the method factorises each on its own, and then averaged over
prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from statistics import fmean, stdev
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.kernels.key_bases import gram_matrix
from kvcli.kernels.query_similarity import query_similarity
from kvcli.kernels.softmax import Softmax
from kvcli.methods import get_method, method_names
from kvcli.methods.config import MethodConfig
from kvcli.methods.contract import AnyMethod, AttentionObserver
from kvcli.models.geometry import ModelGeometry
from kvcli.quality.fidelity import ATTENTION, Fidelity, MeasuredMethod, Passage
from kvcli.sizes import Share
from kvcli.telemetry.counters import Count


@dataclass(frozen=True)
class LayerPoint:
    """The figures of one layer at a value that all layers have: its cost, and the relative error of its output."""

    cost: float
    error: float


def layerwise(
    values: Sequence[float], curves: Mapping[int, Sequence[LayerPoint]], layers: int, most: int
) -> list[tuple[float, ...]]:
    """Combine `values`, the cheapest first, with a point of `curves` for each, for the layers that choose at all.

    Returns at most `most` combinations of one value for each of `layers`, spread from cheap to expensive; none of them
    has the same value everywhere.
    """
    at = dict.fromkeys(curves, 0)
    found: list[tuple[float, ...]] = []
    while steps := [
        (_gain(curve[at[layer]], curve[better]), layer, better)
        for layer, curve in curves.items()
        for better in range(at[layer] + 1, len(values))
    ]:
        gain, layer, better = max(steps)
        if gain <= 0:
            break
        at[layer] = better
        if len(set(at.values())) > 1:
            found.append(tuple(values[at.get(each, 0)] for each in range(layers)))
    bounds = [len(found) * part // most for part in range(most + 1)]
    return found if len(found) <= most else [found[end - 1] for start, end in pairwise(bounds) if end > start]


def _gain(cheap: LayerPoint, better: LayerPoint) -> float:
    """Return the squared error removed per unit of cost; infinite if that is free."""
    less, more = cheap.error**2 - better.error**2, better.cost - cheap.cost
    return less / more if more > 0 else less * float("inf") if less else 0.0


NOTHING = 1e-6
"""Attention mass that counts as none."""


@dataclass(frozen=True)
class Point:
    """The figures of one setting over all passages; bytes are per step, `heads_corrected` a part of those checked.

    `loss` is nats from full attention, `added` the nats of it that count for the choice.
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
        """Return the figures over the passages, of which there is at least one.

        `least` are the losses by passage from which the added loss counts.
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
    """The chosen point, None if none stays within the limit, and the reason."""

    point: Point | None
    reason: str


def choose(points: Sequence[Point], cost: Cost, max_loss: float, relative: bool = False) -> ChosenPoint:
    """Choose the cheapest point that adds at most `max_loss` nats, and the closest of equally cheap ones.

    `relative` says that the added loss counts from the last point and not from full attention.
    """
    if all(point.mass is not None and point.mass > 1 - NOTHING for point in points):
        return ChosenPoint(
            None, "nothing was left out of attention at any value: the text fits into the budget; use a longer one"
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


BOUNDS = tuple(i / 20 for i in range(21))
PIECE = 4096  # tokens whose rotation is undone at once


class Collector:
    """Measures more than closeness, over a whole calibration; this base class measures nothing."""

    def begin_passage(self) -> AttentionObserver | None:
        """Return an observer of the method with the grid's last setting over the next passage, or None."""
        return None

    def end_passage(self, reference: AnyMethod, passage: Passage) -> None:
        """Measure the reference, full attention, after a passage."""

    def figures(self) -> dict[str, Any]:
        """Return the measurements as plain data."""
        return {}


class Similarity(Collector):
    """Cosines of each KV head's consecutive queries during decoding."""

    def __init__(self, config: MethodConfig):
        self.pooling: Literal["mean", "max"] = getattr(config, "correction_pooling", "mean")
        self.previous: dict[int, Tensor] = {}  # layer -> [H, d]
        self.steps: dict[int, int] = {}
        self.total: dict[int, Tensor] = {}  # layer -> [Hk]
        self.below = torch.zeros(len(BOUNDS), dtype=torch.int64)  # cosines below each bound
        self.seen = 0

    @override
    def begin_passage(self) -> AttentionObserver:
        self.previous = {}
        return self._watch

    def _watch(self, method: AnyMethod, layer: int, q: Tensor, out: Tensor, softmax: Softmax) -> None:  # noqa: ARG002
        if layer not in method.retrieval:
            return
        if layer in self.previous:
            num_kv_heads = method.attended(layer).shape[0]
            cosine = query_similarity(q, self.previous[layer], num_kv_heads, self.pooling).double().cpu()
            self.steps[layer] = self.steps.get(layer, 0) + 1
            self.total[layer] = cosine + self.total.get(layer, torch.zeros_like(cosine))
            self.below += (cosine[:, None] < torch.tensor(BOUNDS)).sum(0)
            self.seen += len(cosine)
        self.previous[layer] = q.clone()

    @override
    def figures(self) -> dict[str, Any]:
        """Return `similarity`, the mean cosine by layer and KV head, and `below`, the part below each bound."""
        if not self.seen:
            return {}
        return {
            "similarity": [
                {"layer": layer, "heads": (total / self.steps[layer]).tolist()}
                for layer, total in sorted(self.total.items())
            ],
            "below": [
                {"cosine": bound, "part": count / self.seen}
                for bound, count in zip(BOUNDS, self.below.tolist(), strict=True)
            ],
        }


class Spectrum(Collector):
    """Squared singular values of the prompts' keys, as parts of their sum."""

    def __init__(self, config: MethodConfig):
        del config
        self.prompts = 0
        self.energy: dict[int, Tensor] = {}  # layer -> [Hk * d], the largest first

    @override
    def end_passage(self, reference: AnyMethod, passage: Passage) -> None:
        self.prompts += 1
        for layer, cache in reference.retrieval.items():
            k = cache.k[:, : len(passage.prompt)]  # [Hk, s, d]
            rotary, gram = reference.context.rotary[layer], torch.zeros(())
            for start in range(0, k.shape[1], PIECE):
                piece = k[:, start : start + PIECE].float()
                if rotary is not None:
                    piece = rotary.unrotate(piece, torch.arange(start, start + piece.shape[1], device=k.device))
                gram = gram.to(k.device) + gram_matrix(piece.transpose(0, 1).flatten(1))
            squares = torch.linalg.eigvalsh(gram.double().cpu()).flip(0).clamp(min=0)
            self.energy[layer] = self.energy.get(layer, torch.zeros_like(squares)) + squares / squares.sum()

    @override
    def figures(self) -> dict[str, Any]:
        """Return `spectrum`: for each layer, by rank r = 0, 1, ..., the relative error (Frobenius) of rank-r keys."""
        return {
            "spectrum": [
                {"layer": layer, "error": _outside(energy / self.prompts).sqrt().tolist()}
                for layer, energy in sorted(self.energy.items())
            ]
        }


def _outside(energy: Tensor) -> Tensor:
    """Return the part outside the first r directions for r = 0 .. n: energy [n] -> [n + 1]."""
    return torch.cat((energy.flip(0).cumsum(0).flip(0), energy.new_zeros(1)))


Grid = Mapping[str, Sequence[Any]]
"""Values to try for each setting; all combinations."""


def methods_with(setting: str) -> str:
    """List the methods that have a setting."""
    return ", ".join(name for name in method_names() if setting in get_method(name).Config.model_fields)


@dataclass(frozen=True)
class Sweep:
    """A target whose values are tried: the setting of its name, its default method, and the grid of values.

    The grid depends on the method's settings, a model, and the tokens of a prompt.
    """

    name: str
    title: str
    method: str
    cost: Cost
    grid: Callable[[MethodConfig, ModelGeometry, int], Grid]
    collector: Callable[[MethodConfig], Collector] = lambda _: Collector()
    relative: bool = False
    """Whether the loss that counts is the one added to that of the grid's last setting."""
    by_layer: bool = False
    """Whether the setting also takes a value for each layer; the grid's own have the cheapest first."""

    def profiles(
        self, base: Profile, geometry: ModelGeometry, length: int, asked: Mapping[str, Sequence[Any]]
    ) -> list[tuple[dict[str, Any], Profile]]:
        """Combine the grid's values, or `asked` ones in their place: settings, and the profile with them.

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
