"""The softmax of a layer: the parameters that differ between models."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvcli.kernels._triton import jit, tl


class Softmax(NamedTuple):
    """Parameters of attention: `scale` of q.k, `softcap` (scores are bounded by tanh), and attention `sinks`.

    `sinks` [H] holds one logit per query head that takes part in the normalisation and carries no value (gpt-oss).
    `selected` [1 or Hk, n, k] int64 are the tokens that the model itself selects for each of n queries, EMPTY for none;
    without it all tokens take part. Of a batch it is [b, 1 or Hk, n, k].
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    selected: Tensor | None = None

    def of(self, sequence: int) -> Softmax:
        """Return that of one sequence of a batch."""
        return self if self.selected is None else self._replace(selected=self.selected[sequence])

    def scores(self, products: Tensor) -> Tensor:
        """Turn products q.k into scores: scaled, and capped if the model does so."""
        scores = products * self.scale
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap


@jit
def capped(scores: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """Bound scores to (-softcap, softcap) by tanh, if there is a softcap."""
    if softcap is not None:
        scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
    return scores
