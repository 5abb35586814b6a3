"""What a step of a layer of one sequence picks, what is kept of it for the next one, and what a rule sees of it.

Shapes: H query heads, Hk KV heads, d head dimension, k pages or tokens chosen, n candidates.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kvcli.kernels.softmax import Softmax


class Picked(NamedTuple):
    """What a layer of one sequence attends to beside sink and window: `pages` [Hk, k], or [H, k] of each query head.

    Where not all of their tokens are read, `tokens` [Hk, n] lists them and those of sink and window, and `kept` [Hk, n]
    bool marks the ones that are.
    """

    pages: Tensor
    tokens: Tensor | None = None
    kept: Tensor | None = None


class Read(NamedTuple):
    """What attention read: of KV heads `corrected` [Hk] their own selection of this step, else that of the last."""

    corrected: Tensor
    selected: Tensor  # [Hk, k] pages
    before: Tensor

    @property
    def pages(self) -> Tensor:
        """The pages of each KV head, [Hk, k]."""
        return self.selected.where(self.corrected[:, None], self.before)


class Remembered:
    """What a layer of one sequence keeps from step to step: state of a method."""

    def __init__(self) -> None:
        self.query: Tensor | None = None  # [H, d], the one that chose last, where a choice may outlive its step
        self.picked: Picked | None = None  # what it chose
        self.read: Read | None = None  # by the last attention, where not all heads read what was chosen last
        self.ahead: Picked | None = None  # lies ready for the next attention


class LayerStep(Protocol):
    """A step of one layer of one sequence, as rules see it."""

    cache: Any
    candidates: range
    softmax: Softmax
    kept: Remembered
    foretold: bool
    """Whether the query is that of a layer which has yet to take the newest token."""

    def scores(self, q: Tensor) -> Tensor:
        """Score the candidates with q [H, d], see `Index.scores`."""

    def best(self, scores: Tensor, count: int) -> Tensor:
        """The `count` candidates with the best scores [Hk, n] -> [Hk, count], in no particular order."""

    def tally(self, **numbers: int) -> None:
        """Add to what the method counts, see `Method.take_tally`."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Time a phase, see `Method.span`."""
