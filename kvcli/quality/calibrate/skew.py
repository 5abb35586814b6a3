"""InfiniGen's skew (arXiv 2406.19707, section 4): from the second moments of all prompts' queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.inputs.profiles import Profile
from kvcli.kernels.principal_axes import second_moments
from kvcli.kernels.skew import skew_of
from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import LayerGeometry
from kvcli.quality.calibrate.matrices import TensorFinder, TensorTarget, by_layer, shares
from kvcli.ui.summary import Table


class Skew(TensorFinder):
    """An orthogonal matrix [Hk, d, d] for every layer, the strongest columns first."""

    def __init__(self, profile: Profile, layers: Sequence[LayerGeometry]):
        super().__init__(profile, layers)
        self.queries: dict[int, Tensor] = {}  # layer -> [Hk, d, d]
        self.keys: dict[int, Tensor] = {}

    @override
    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        if any(layer == each.index for each in self.layers):
            by_group = torch.reshape(q, (k.shape[0], -1, q.shape[-1]))  # [Hk, G * n, d]
            self.queries[layer] = second_moments(by_group) + self.queries.get(layer, 0)

    @override
    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        if any(layer == each.index for each in self.layers):
            self.keys[layer] = second_moments(k) + self.keys.get(layer, 0)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return by_layer(self._skew())

    @override
    def tables(self) -> list[tuple[str, Table]]:
        products = {}
        for layer, skew in self._skew().items():
            norms = [(skew * (each[layer] @ skew)).sum(1).clamp(min=0).sqrt() for each in (self.queries, self.keys)]
            products[layer] = norms[0] * norms[1]  # [Hk, d]
        width = max(moments.shape[1] for moments in self.keys.values())
        return [shares(products, width, "Product of queries and keys within the first columns, mean over the KV heads")]

    def _skew(self) -> dict[int, Tensor]:
        return {layer: skew_of(self.queries[layer], self.keys[layer]) for layer in self.keys}


TARGET = TensorTarget("skew", "skew of queries and keys", "skew", "infinigen", Skew)
