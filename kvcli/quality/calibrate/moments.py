"""Matrices from second moments of a text's queries and keys, summed up over the prompts.

Loki's principal axes of the keys (arXiv 2406.02542, section 4), by the covariance of each prompt's keys, and
InfiniGen's skew (arXiv 2406.19707, section 4), by the moments of queries and keys.
"""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from kvcli.inputs.profiles import Profile
from kvcli.kernels.key_bases import centred_moments, principal_axes, second_moments, skew_of
from kvcli.kernels.softmax import Softmax
from kvcli.kv.calibration_file import tensor_name
from kvcli.models.geometry import LayerGeometry
from kvcli.quality.calibrate.matrices import TensorFinder, eighths, layer_table
from kvcli.ui.summary import Table


class MomentFinder(TensorFinder):
    """Finds an orthogonal matrix [Hk, d, d] of every layer, the strongest columns first."""

    title: str
    """What the first columns hold a part of."""

    def __init__(self, profile: Profile, layers: Sequence[LayerGeometry]):
        super().__init__(profile, layers)
        self.queries: dict[int, Tensor] = {}  # layer -> [Hk, d, d]
        self.keys: dict[int, Tensor] = {}

    @abstractmethod
    def matrix(self, layer: int) -> Tensor:
        """Return the matrix of a layer."""

    @abstractmethod
    def strength(self, layer: int, matrix: Tensor) -> Tensor:
        """Return what each column holds, [Hk, d]."""

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {tensor_name(layer): self.matrix(layer).float().cpu().contiguous() for layer in sorted(self.keys)}

    @override
    def tables(self) -> list[tuple[str, Table]]:
        shown = eighths(max(moments.shape[1] for moments in self.keys.values()))
        cells = []
        for layer in sorted(self.keys):
            parts = self.strength(layer, self.matrix(layer))
            held = (parts.cumsum(1) / parts.sum(1, keepdim=True)).mean(0)  # [d]
            cells.append((layer, [f"{100 * float(held[min(count, len(held)) - 1]):.1f} %" for count in shown]))
        return [layer_table(f"{self.title}, mean over the KV heads", map(str, shown), cells)]


class Axes(MomentFinder):
    """Principal axes of the keys."""

    title = "Variance of the keys within the first axes"

    @override
    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        if layer in self.layers:
            self.keys[layer] = centred_moments(k) + self.keys.get(layer, 0)

    @override
    def matrix(self, layer: int) -> Tensor:
        return principal_axes(self.keys[layer])

    @override
    def strength(self, layer: int, matrix: Tensor) -> Tensor:
        return (matrix * (self.keys[layer] @ matrix)).sum(1).clamp(min=0)


class Skew(MomentFinder):
    """Directions in which queries and keys are long together."""

    title = "Product of queries and keys within the first columns"

    @override
    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        if layer in self.layers:
            by_group = q.reshape(k.shape[0], -1, q.shape[-1])  # [Hk, G * n, d]
            self.queries[layer] = second_moments(by_group) + self.queries.get(layer, 0)

    @override
    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        if layer in self.layers:
            self.keys[layer] = second_moments(k) + self.keys.get(layer, 0)

    @override
    def matrix(self, layer: int) -> Tensor:
        return skew_of(self.queries[layer], self.keys[layer])

    @override
    def strength(self, layer: int, matrix: Tensor) -> Tensor:
        squares = ((matrix * (each[layer] @ matrix)).sum(1).clamp(min=0) for each in (self.queries, self.keys))
        queries, keys = (each.sqrt() for each in squares)
        return queries * keys
