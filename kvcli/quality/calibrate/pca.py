"""Loki's principal axes of the keys (arXiv 2406.02542, section 4): the covariance of each prompt's keys, summed up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from kvcli.inputs.profiles import Profile
from kvcli.kernels.principal_axes import centred_moments, principal_axes
from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import LayerGeometry
from kvcli.quality.calibrate.matrices import TensorFinder, TensorTarget, by_layer, shares
from kvcli.ui.summary import Table


class Axes(TensorFinder):
    """Axes [Hk, d, d] of every layer, as columns."""

    def __init__(self, profile: Profile, layers: Sequence[LayerGeometry]):
        super().__init__(profile, layers)
        self.moments: dict[int, Tensor] = {}  # layer -> [Hk, d, d]

    @override
    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        if any(layer == each.index for each in self.layers):
            moments = centred_moments(k)
            self.moments[layer] = moments + self.moments.get(layer, 0)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return by_layer({layer: principal_axes(moments) for layer, moments in self.moments.items()})

    @override
    def tables(self) -> list[tuple[str, Table]]:
        variance = {}
        for layer, moments in self.moments.items():
            axes = principal_axes(moments)
            variance[layer] = (axes * (moments @ axes)).sum(1).clamp(min=0)  # [Hk, d]
        width = max(moments.shape[1] for moments in self.moments.values())
        return [shares(variance, width, "Variance of the keys within the first axes, mean over the KV heads")]


TARGET = TensorTarget("pca", "principal axes of the keys", "pca", "loki", Axes)
