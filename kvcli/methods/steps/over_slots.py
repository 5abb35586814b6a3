"""The side of a plan's parts that works over slots: made for a layer of a batch, and asked nothing by the host.

Shapes: b sequences, H query heads, Hk KV heads, d head dimension, n pages, tokens or chunks that can be scored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append import NewToken
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.page_table import PagedKV, SlotLayout
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import Selection, topk_pages_device
from kvcli.methods.steps.batch_slots import BatchSlots


class StepIndex(ABC):
    """What the pages of a layer of a batch are chosen by."""

    needs_newest: bool
    """Whether the newest token is appended, and `update` called, before scoring; else after attention."""

    slots: BatchSlots

    @property
    def scored(self) -> tuple[Tensor, SlotLayout]:
        """Give the lengths [b] and the layout that say what can be chosen."""
        return self.slots.rows.lengths, self.slots.rows.layout

    @abstractmethod
    def best(
        self, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection, wanted: Tensor | None = None
    ) -> None:
        """Choose what scores best with queries q [b, H, d], for the KV heads `heads` [b, Hk] bool.

        `wanted` [b] int32 where it is less than there are places for.
        """

    @abstractmethod
    def update(self, new: NewToken, host: HostPages | None) -> None:
        """Take in the newest tokens, which are appended, or what they have completed, and write that to `host`.

        Where the newest are not needed before scoring, `new` is the caller's again by then.
        """


class ScoredIndex(StepIndex):
    """An index whose scores are written down before any is chosen."""

    @abstractmethod
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor) -> Tensor:
        """Score with queries q [b, H, d]: [b, Hk, n] fp32, of which only those of candidates are looked at.

        heads [b, Hk] bool: only these KV heads need to be scored.
        """

    @override
    def best(
        self, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection, wanted: Tensor | None = None
    ) -> None:
        scores = self.scores(q, softmax, heads)
        topk_pages_device(scores, *self.scored, selection, heads, wanted, self.slots.rows.arrived)


class Chosen(NamedTuple):
    """What a step attends to beside sink and window: pages [b, Hk, selected] int32, -1 behind them.

    Where tokens of them, and of sink and window, are left out, `kept` [b, Hk, slots * size] bool marks the others.
    """

    pages: Tensor
    kept: Tensor | None = None
    asked: Tensor | None = None
    """[b] int32, how many a KV head chose, where scores decide it (`StepPlan.varies`)."""


class Choice(Protocol):
    """A rule by which scores choose, made for every layer of a batch; it may keep state and count in `tally`."""

    tally: Mapping[str, Tensor] = MappingProxyType({})
    """Numbers [b] by name, given to `Method.take_tally` at the end."""

    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        """Choose for the KV heads `heads` [b, Hk] with queries q [b, H, d]; `selection` is there to be written."""


class Eviction(Protocol):
    """What a layer of a batch does before and after attention in order to hold a bounded number of tokens."""

    rows: PagedKV
    """The rows that are attended to, with the tokens held as lengths."""

    def make_room(self) -> Tensor | None:
        """Make room for the newest token; its rows [b, Hk] int32 where they are not the next ones."""

    def look_back(self, q: Tensor, softmax: Softmax) -> None:
        """Learn from what queries [b, H, d] look at; the newest token is among the rows."""
