"""What is measured beside closeness while values are tried: how alike queries are, how many directions keys need.

`Similarity` is for FreeKV's tau (arXiv 2505.13109, figures 3 and 10): the mean cosine of each KV head's query group
with the one before, which a tau is compared with, and what part of them lies below each twentieth.

`Spectrum` is for ShadowKV's rank (arXiv 2410.21465, section 3.1): keys without their rotation, the heads of a token
side by side, are close to a matrix of low rank. What part of their norm lies outside the first r directions is that of
each prompt on its own, as the method factorises each on its own; then the mean over the prompts.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.key_bases import gram_matrix
from kvcli.kernels.query_similarity import query_similarity
from kvcli.kernels.softmax import Softmax
from kvcli.methods.config import MethodConfig
from kvcli.methods.contract import AnyMethod, AttentionObserver
from kvcli.quality.fidelity import Passage

BOUNDS = tuple(i / 20 for i in range(21))
PIECE = 4096  # tokens that are taken out of their rotation at once


class Collector:
    """Measures more than closeness, over a whole calibration; this one measures nothing."""

    def begin_passage(self) -> AttentionObserver | None:
        """Return what is to observe the method with the grid's last setting over the next passage, if anything is."""
        return None

    def end_passage(self, reference: AnyMethod, passage: Passage) -> None:
        """Measure the reference, full attention, after a passage."""

    def figures(self) -> dict[str, Any]:
        """Return what was measured, as plain data."""
        return {}


class Similarity(Collector):
    """Cosines of each KV head's consecutive queries, while it decodes."""

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
        """`similarity`, the mean cosine by layer and KV head, and `below`, what part lies below each bound."""
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
