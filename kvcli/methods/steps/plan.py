"""What the retrieval layers of a method do at a step, stated once; `kvcli.runtime.gpu` carries it out for any method.

Shapes: b sequences, H query heads, Hk KV heads, d head dimension, n pages, tokens or chunks that can be scored.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append_token import NewToken
from kvcli.kernels.host_pages import HostPages
from kvcli.kernels.resolve_pages import MissList
from kvcli.kernels.slot_layout import SlotLayout
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import Selection, topk_pages_device
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.eviction import Eviction

RecallBy = Literal["gather", "copy"]


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


class Resident(NamedTuple):
    """Everything is on the device: attention reads the chosen rows where they lie."""


class FromHost(NamedTuple):
    """Chosen pages lie in host memory; those that are missing are brought into their slots.

    By a kernel that reads pinned memory (gather), or copied one after another through one or two staging buffers. Where
    only values lie there, `rebuild` makes the keys that go with them. Pages that fill are written there (`writes`).
    """

    recall: RecallBy = "gather"
    double_buffer: bool = True
    rebuild: Callable[[BatchSlots], Callable[[MissList], None]] | None = None
    writes: bool = True


Fetch = Resident | FromHost
RESIDENT = Resident()


class Correction(NamedTuple):
    """Which KV heads do not reuse what the step before chose: those whose query cosine with it is below a threshold.

    `below` has one a layer; above 1 all heads are corrected, below -1 none. Cosines are pooled over the query heads.
    """

    below: tuple[float, ...]
    pooling: Literal["mean", "max"] = "mean"


@dataclass(frozen=True)
class StepPlan:
    """A step of the layers of `Method.new_cache`; without an `index` they attend to all that they hold.

    `when` is a choice made: before attention; or after it, for the next step, but for heads that `correction` names; or
    a layer ahead, by the query that the layer before foretells. `varies` says that scores decide how many are chosen.
    `index`, `choose` and what follows `correction` are made for every layer of a batch. `prepare` is called before all
    else, to turn what is held to other positions; `turn` gives queries and new keys the coordinates that the layer
    keeps its keys in; `evict` makes room before attention and looks back after it.
    """

    index: Callable[[BatchSlots], StepIndex] | None = None
    choose: Callable[[BatchSlots], Choice] | None = None  # the best scores
    when: Literal["before", "after", "ahead"] = "before"
    varies: bool = False
    fetch: Fetch = RESIDENT
    correction: Correction | None = None
    prepare: Callable[[BatchSlots], Callable[[], None]] | None = None
    turn: Callable[[BatchSlots], Callable[[Tensor], Tensor]] | None = None
    evict: Callable[[BatchSlots], Eviction] | None = None

    @property
    def rotates(self) -> bool:
        """Whether it rotates keys or queries apart from the model, by tables of all positions in fp32."""
        rebuilds = isinstance(self.fetch, FromHost) and self.fetch.rebuild is not None
        return rebuilds or self.when == "ahead" or self.prepare is not None
