"""Tensors that a method needs for a model: found once on text, saved as a safetensors file beside a profile."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from typing_extensions import override

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile
from kvcli.kernels.softmax import Softmax
from kvcli.methods import get_method, method_names
from kvcli.models.geometry import LayerGeometry
from kvcli.quality.fidelity import Passage
from kvcli.runtime.engine import Engine
from kvcli.runtime.not_finite import check_finite
from kvcli.runtime.prefill import PrefillConsumer
from kvcli.store.calibration_file import tensor_name
from kvcli.ui.summary import Table

SCHEMA_VERSION = 1


class TensorFinder(PrefillConsumer, ABC):
    """Finds tensors during an exact prefill of every passage, for the layers that are not sliding windows."""

    query_rows = 0

    def __init__(self, profile: Profile, layers: Sequence[LayerGeometry]):
        self.profile = profile
        self.layers = [layer for layer in layers if layer.window is None]

    def read(self, engine: Engine, passage: Passage, advance: Callable[[int], None]) -> None:
        """Read a passage, all of it as one prompt.

        Raises:
            KvcliError: NaN or infinity in the model's logits.
        """
        ids = [*passage.prompt, *passage.continuation]
        check_finite(engine, engine.prefill_into(ids, self, advance), ids)

    @override
    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        pass

    @override
    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        pass

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by the names that the method looks for."""

    @abstractmethod
    def tables(self) -> list[tuple[str, Table]]:
        """Return tables that describe the tensors, each with its title."""


@dataclass(frozen=True)
class TensorTarget:
    """A target that ends in a file: the setting that names the file, its default method, and what finds its tensors."""

    name: str
    title: str
    setting: str
    method: str
    source: Callable[[Profile, Sequence[LayerGeometry]], TensorFinder]
    reads_text: bool = True

    def check(self, profile: Profile, files: Sequence[str]) -> None:
        """Refuse a method that has no use for the tensors, and text for a target that reads none.

        Raises:
            KvcliError: one of the two was given (usage).
        """
        if files and not self.reads_text:
            raise KvcliError(
                f"{self.name} are not found on text, but {files[0]} was given", "leave it out", ExitCode.USAGE
            )
        if self.setting not in type(profile.settings).model_fields:
            having = [name for name in method_names() if self.setting in get_method(name).Config.model_fields]
            raise KvcliError(
                f"{profile.method} takes no {self.name} file", f"methods that do: {', '.join(having)}", ExitCode.USAGE
            )


@dataclass(frozen=True)
class TensorCalibration:
    """The tensors of a target. Where it is not `complete`, Ctrl-C left out the passages that were still to be read."""

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
        settings = self.profile.settings.model_dump(mode="json") | {self.search.setting: str(file.resolve())}
        return tomli_w.dumps(
            {
                "method": self.profile.method,
                "description": f"{self.search.name} found for {self.provenance['model']}",
                "paper": self.profile.paper,
                "settings": {key: value for key, value in settings.items() if value is not None},
                "provenance": {**self.provenance, "target": self.search.name},
            }
        )


def is_ours(path: Path) -> bool:
    """Tell whether `TensorCalibration.tensor_file` made a file, by the provenance in its header."""
    try:
        with safe_open(path, framework="pt") as file:
            return "provenance" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def by_layer(found: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """One tensor a layer, by the names of `store.calibration_file`."""
    return {tensor_name(layer): tensor.float().cpu().contiguous() for layer, tensor in sorted(found.items())}


def shares(found: Mapping[int, Tensor], columns: int, title: str) -> tuple[str, Table]:
    """Tabulate by layer the part of a sum that the first columns hold, mean over the KV heads: found [Hk, d] each."""
    shown = sorted({max(1, columns * eighth // 8) for eighth in range(1, 9)})
    rows = []
    for layer, parts in sorted(found.items()):
        held = (parts.cumsum(1) / parts.sum(1, keepdim=True)).mean(0)  # [d]
        rows.append((f"{layer}", *(f"{100 * float(held[min(count, len(held)) - 1]):.1f} %" for count in shown)))
    return title, Table(("layer", *(f"{count}" for count in shown)), rows)
