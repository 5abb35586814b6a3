"""Targets that end in tensors: what a method needs for a model, found once on text, in a file beside a profile."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import override

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import Profile
from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import LayerGeometry
from kvcli.quality.calibrate.sweep import methods_with
from kvcli.quality.fidelity import Passage
from kvcli.runtime.engine import Engine
from kvcli.runtime.not_finite import check_finite
from kvcli.runtime.prefill import PrefillConsumer
from kvcli.ui.summary import Table


class TensorFinder(PrefillConsumer, ABC):
    """Finds tensors during an exact prefill of every passage, for the layers that are not sliding windows."""

    query_rows = 0

    def __init__(self, profile: Profile, layers: Sequence[LayerGeometry]):
        self.profile = profile
        self.layers = {layer.index: layer for layer in layers if layer.window is None}

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
        if self.name not in type(profile.settings).model_fields:
            hint = f"methods that do: {methods_with(self.name)}"
            raise KvcliError(f"{profile.method} takes no {self.name} file", hint, ExitCode.USAGE)


def is_ours(path: Path) -> bool:
    """Tell whether `TensorCalibration.tensor_file` made a file, by the provenance in its header."""
    try:
        with safe_open(path, framework="pt") as file:
            return "provenance" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def eighths(width: int) -> list[int]:
    """Return an eighth of a width, two eighths and so on, for tables."""
    return sorted({max(1, width * eighth // 8) for eighth in range(1, 9)})


def layer_table(title: str, columns: Iterable[str], cells: Iterable[tuple[int, Sequence[str]]]) -> tuple[str, Table]:
    """Tabulate cells by layer; a layer that has fewer of them than others has "-" for the rest."""
    heads = ("layer", *columns)
    return title, Table(heads, [(f"{layer}", *own, *["-"] * (len(heads) - 1 - len(own))) for layer, own in cells])
