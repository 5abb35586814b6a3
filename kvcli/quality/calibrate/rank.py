"""ShadowKV's rank: how many numbers a token's keys need (arXiv 2410.21465, section 3.1).

Keys without their rotation, the heads of a token side by side, are close to a matrix of low rank. Beside the
curve, their spectrum: what part of their norm lies outside the first r directions, layer by layer. It is that of each
prompt on its own, as the method factorises each on its own; then the mean over the prompts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.low_rank import gram_matrix
from kvcli.methods.base import AnyMethod
from kvcli.methods.config import MethodConfig
from kvcli.models.geometry import ModelGeometry
from kvcli.quality.calibrate.curve import Cost
from kvcli.quality.calibrate.sweep import Collector, Grid, Sweep
from kvcli.quality.fidelity import Passage

PIECE = 4096  # tokens that are taken out of their rotation at once
PARTS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1)  # of the width of the keys


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
        """`spectrum`: for each layer, by rank r = 0, 1, ..., the relative error (Frobenius) of keys of rank r."""
        return {
            "spectrum": [
                {"layer": layer, "error": _outside(energy / self.prompts).sqrt().tolist()}
                for layer, energy in sorted(self.energy.items())
            ]
        }


def _outside(energy: Tensor) -> Tensor:
    """Return the part outside the first r directions for r = 0 .. n: energy [n] -> [n + 1]."""
    return torch.cat((energy.flip(0).cumsum(0).flip(0), energy.new_zeros(1)))


def _grid(config: MethodConfig, geometry: ModelGeometry, length: int) -> Grid:  # noqa: ARG001
    width = max(layer.num_kv_heads * layer.head_dim for layer in geometry.layers if layer.window is None)
    outliers = getattr(config, "outliers", 0)
    return {"rank": [max(1, round(part * width)) for part in PARTS], "outliers": sorted({0, outliers})}


TARGET = Sweep(
    name="rank",
    title="rank of the keys, and chunks that are kept exact",
    setting="rank",
    method="shadowkv",
    cost=Cost("device_kv_bytes", "memory on the device", "bytes"),
    grid=_grid,
    relative=True,
    collector=Spectrum,
)
