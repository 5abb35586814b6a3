"""The result of a calibration: as a list, tables and JSON, and as a profile for `--profile`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
from safetensors.torch import save

from kvcli.inputs.profiles import Profile
from kvcli.quality.calibrate.sweep import ChosenPoint, Cost, Point, Sweep, nats, value_text
from kvcli.quality.calibrate.tensors import TensorFinder, TensorTarget, eighths, layer_table
from kvcli.sizes import format_bytes
from kvcli.ui.summary import Table, without_empty_columns

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """The curve, the choice, the figures of the sweep's collector, and the provenance.

    `provenance` holds the model and its fingerprint, the text, seed, versions and date. If not `complete`, Ctrl-C left
    out the passages that were still to be measured.
    """

    sweep: Sweep
    points: Sequence[Point]
    profiles: Sequence[Profile]
    choice: ChosenPoint
    figures: dict[str, Any]
    provenance: dict[str, Any]
    complete: bool

    @property
    def chosen(self) -> Profile | None:
        """The profile with the chosen settings."""
        return None if self.choice.point is None else self.profiles[list(self.points).index(self.choice.point)]

    def tables(self) -> list[tuple[str, Table]]:
        """Return the curve and the tables of the collector's figures, each with its title."""
        return [
            (_heading(self), curve_table(self.points, self.choice, self.sweep.relative)),
            *figure_tables(self.figures),
        ]

    def summary(self) -> list[tuple[str, str]]:
        """Return labels with their values, the choice first; without a choice only the reason."""
        point, cost, found = self.choice.point, self.sweep.cost, self.provenance
        measured = f"{found['passages']} passages of {found['prompt_tokens']:,} tokens, {found['steps']:,} steps"
        if point is None:
            return [("chosen", "nothing"), ("because", self.choice.reason), ("measured on", measured)]
        rows = [("chosen", point.label), ("from full attention", nats(point.loss, point.loss_bound))]
        if self.sweep.relative:
            rows.append((f"added to {self.points[-1].label}", nats(point.added, point.added_bound)))
        rows.append(("limit", f"{found['max_loss']:g} nats {'added ' if self.sweep.relative else ''}at most"))
        if self.is_far:
            rest = f"the other settings alone cost {self.points[-1].loss:.3g} nats"
            rows.append(("note", f"not within the limit of full attention: {rest}, which a larger budget lowers"))
        low, high = (cost_text(cost, which(map(cost.of, self.points))) for which in (min, max))
        rows.append((cost.name, f"{cost_text(cost, cost.of(point))}, of {low} to {high} over the values tried"))
        rows.append(("same next token", f"{_part(point.agreement)} of the steps"))
        return [*rows, ("measured on", measured)]

    @property
    def is_far(self) -> bool:
        """Whether the choice keeps its limit only against the last setting, and not against full attention."""
        point = self.choice.point
        return self.sweep.relative and point is not None and point.loss_bound > self.provenance["max_loss"]

    def to_json(self) -> str:
        """Return one JSON object, `schema_version` first."""
        chosen = self.chosen
        body = {
            "schema_version": SCHEMA_VERSION,
            "target": self.sweep.name,
            "complete": self.complete,
            "cost": asdict(self.sweep.cost),
            "points": [asdict(point) for point in self.points],
            "chosen": None if self.choice.point is None else self.choice.point.settings,
            "reason": self.choice.reason,
            "profile": None if chosen is None else chosen.as_dict(),
            "figures": self.figures,
            "provenance": self.provenance,
        }
        return json.dumps(body, ensure_ascii=False)

    def to_toml(self) -> str:
        """Return the chosen profile with its provenance and the curve.

        Raises:
            ValueError: nothing was chosen.
        """
        chosen, point = self.chosen, self.choice.point
        if chosen is None or point is None:
            raise ValueError("nothing was chosen")
        provenance = {
            **self.provenance,
            "target": self.sweep.name,
            "reason": self.choice.reason,
            "loss": point.loss,
            "loss_bound": point.loss_bound,
            "added": point.added,
            "added_bound": point.added_bound,
            "curve": [_row(each) for each in self.points],
        }
        settings = chosen.settings.model_dump(mode="json")
        return _profile(chosen, settings, f"{self.sweep.name} calibrated for", provenance)


@dataclass(frozen=True)
class TensorCalibration:
    """The tensors of a target. If not `complete`, Ctrl-C left out the passages that were still to be read."""

    search: TensorTarget
    profile: Profile
    source: TensorFinder
    provenance: dict[str, Any]
    complete: bool

    def tables(self) -> list[tuple[str, Table]]:
        """Return tables that describe the tensors, each with its title."""
        return self.source.tables()

    def to_json(self) -> str:
        """Return one JSON object, `schema_version` first, with the shapes of the tensors."""
        tables = [{"title": title, "columns": table.columns, "rows": table.rows} for title, table in self.tables()]
        body = {
            "schema_version": SCHEMA_VERSION,
            "target": self.search.name,
            "complete": self.complete,
            "tensors": {name: list(tensor.shape) for name, tensor in self.source.tensors().items()},
            "tables": tables,
            "provenance": self.provenance,
        }
        return json.dumps(body, ensure_ascii=False)

    def summary(self) -> list[tuple[str, str]]:
        """Return label and value of the text that was read, if any was."""
        found = self.provenance
        if "passages" not in found:
            return []
        tokens = f"{found['prompt_tokens']:,} tokens and {found['steps']:,} that follow"
        return [("found on", f"{found['passages']} passages of {tokens}")]

    def tensor_file(self) -> bytes:
        """Return the tensors as a safetensors file, with the provenance in its header."""
        return save(self.source.tensors(), metadata={"provenance": json.dumps(self.provenance)})

    def to_toml(self, file: Path) -> str:
        """Return the profile that uses `file`."""
        settings = self.profile.settings.model_dump(mode="json") | {self.search.name: str(file.resolve())}
        return _profile(
            self.profile, settings, f"{self.search.name} found for", {**self.provenance, "target": self.search.name}
        )


def _profile(base: Profile, settings: Mapping[str, Any], found: str, provenance: dict[str, Any]) -> str:
    """Return a profile's file; `found` begins its description."""
    return tomli_w.dumps(
        {
            "method": base.method,
            "description": f"{found} {provenance['model']}",
            "paper": base.paper,
            "settings": {key: value for key, value in settings.items() if value is not None},
            "provenance": provenance,
        }
    )


def curve_table(points: Sequence[Point], choice: ChosenPoint, relative: bool) -> Table:
    """Tabulate one row per setting, the chosen one marked; `relative` if added loss counts from the last one."""
    keys = list(points[0].settings)
    columns = (
        *(key.replace("_", " ") for key in keys),
        "",
        "loss, at most",
        "added, at most",
        "same token",
        "mass",
        "top found",
        "output off",
        "attended",
        "corrected",
        "waited for",
        "moved",
        "device KV",
    )
    rows = [
        (
            *(value_text(point.settings[key]) for key in keys),
            "chosen" if point is choice.point else "",
            f"{point.loss:.3g} ≤{point.loss_bound:.3g}",
            f"{point.added:.3g} ≤{point.added_bound:.3g}" if relative else "-",
            _part(point.agreement),
            _part(point.mass),
            _part(point.recall),
            _part(point.error),
            "-" if point.attended is None else f"{point.attended:,.0f}",
            _part(point.heads_corrected),
            format_bytes(point.bytes_exposed),
            format_bytes(point.bytes_to_device),
            format_bytes(point.device_kv_bytes),
        )
        for point in points
    ]
    return without_empty_columns(Table(columns, rows, keys=len(keys), texts=("",)))


def figure_tables(figures: dict[str, Any]) -> list[tuple[str, Table]]:
    """Return tables of the figures of a collector."""
    tables = []
    if "similarity" in figures:
        most = max(len(layer["heads"]) for layer in figures["similarity"])
        cosines = ((layer["layer"], [f"{cosine:.2f}" for cosine in layer["heads"]]) for layer in figures["similarity"])
        columns = (f"KV head {head}" for head in range(most))
        tables.append(layer_table("Mean cosine of consecutive queries", columns, cosines))
    if "spectrum" in figures:
        shown = eighths(max(len(layer["error"]) - 1 for layer in figures["spectrum"]))
        errors = (
            (layer["layer"], [_part(layer["error"][rank]) for rank in shown if rank < len(layer["error"])])
            for layer in figures["spectrum"]
        )
        tables.append(layer_table("Keys outside the first directions", (f"rank {rank}" for rank in shown), errors))
    return tables


def _heading(calibration: Calibration) -> str:
    found = calibration.provenance
    return (
        f"{calibration.sweep.name} of {found['method']} on {found['model']}: {found['passages']} passages of "
        f"{found['prompt_tokens']:,} tokens, {found['steps']:,} steps; loss in nats from full attention, bytes per step"
    )


def _row(point: Point) -> dict[str, Any]:
    """Return a point for TOML: settings and figures in one table, without those that are missing."""
    fields = {**point.settings, **asdict(point)}
    return {key: value for key, value in fields.items() if key != "settings" and value is not None}


def _part(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def cost_text(cost: Cost, value: float) -> str:
    """Return a cost with its unit."""
    return format_bytes(value) if cost.unit == "bytes" else f"{value:,.0f} {cost.unit}"
