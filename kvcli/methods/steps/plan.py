"""What the retrieval layers of a method do at a step, stated once, for any method.

`kvcli.methods.steps.phases` carries it out for one sequence, phase after phase, on its caches: that defines what a step
attends to. `kvcli.runtime.gpu` carries it out for a batch, over slots, without asking the host. So the parts of a plan
have two sides: what they do with a cache, and `over_slots`, which makes what does the same for a layer of a batch.

Shapes: b sequences, H query heads, Hk KV heads, d head dimension, n pages, tokens or chunks that can be scored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from kvcli.kernels.page_table import MissList
from kvcli.kernels.softmax import Softmax
from kvcli.methods.steps.batch_slots import BatchSlots
from kvcli.methods.steps.over_slots import Choice, Eviction, StepIndex
from kvcli.methods.steps.step import LayerStep, Picked

RecallBy = Literal["gather", "copy"]


class Index(ABC):
    """What is chosen by: how the pages, tokens or chunks of a layer are scored."""

    @abstractmethod
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        """Score candidates of a cache with q [H, d]: [Hk, n]; of each query head [H, n], of all together [1, n]."""

    @abstractmethod
    def over_slots(self, slots: BatchSlots) -> StepIndex:
        """Make the index of a layer of a batch."""


class Rule(ABC):
    """How scores choose."""

    @abstractmethod
    def pick(self, step: LayerStep, q: Tensor) -> Picked:
        """Choose for a layer of one sequence with q [H, d]; what it counts goes to `Method.take_tally`."""

    def over_slots(self, slots: BatchSlots) -> Choice:
        """Make the choice of a layer of a batch; not there for rules whose settings do not stay in place."""
        raise NotImplementedError(f"{type(self).__name__} chooses phase after phase")


class Coordinates(ABC):
    """Which coordinates a layer keeps its keys in; a cache turns the keys that it takes."""

    @abstractmethod
    def turned(self, cache: Any, q: Tensor) -> Tensor:
        """Turn the queries [H, d] of one sequence."""

    @abstractmethod
    def over_slots(self, slots: BatchSlots) -> Callable[[Tensor], Tensor]:
        """Make what turns queries and new keys of a batch, [b, H or Hk, d]."""


class Evict(ABC):
    """What leaves a layer that holds a bounded number of tokens; a cache makes room as it takes a token."""

    @abstractmethod
    def look_back(self, cache: Any, q: Tensor, softmax: Softmax) -> None:
        """Learn from what q [H, d] of one sequence looks at; the newest token is there."""

    @abstractmethod
    def over_slots(self, slots: BatchSlots) -> Eviction:
        """Make what does both for a layer of a batch."""


class Resident(NamedTuple):
    """Everything is on the device: attention reads the chosen rows where they lie."""


class FromHost(NamedTuple):
    """Chosen pages lie in host memory; those that are missing are brought into their slots.

    Over slots by a kernel that reads pinned memory (gather), or copied one after another through one or two staging
    buffers. Where only values lie there, `rebuild` makes the keys that go with them. Pages that fill are written there
    (`writes`), at the latest when they leave the window.
    """

    recall: RecallBy = "gather"
    double_buffer: bool = True
    rebuild: Callable[[BatchSlots], Callable[[MissList], None]] | None = None
    writes: bool = True


class Whole(NamedTuple):
    """Layers lie in host memory and come to the device whole, in turns, each while the one before it works."""

    @staticmethod
    def buffers(layers: int) -> int:
        """How many buffers so many layers take turns with: two, and a third for a last one in the first's turn."""
        return 1 if layers == 1 else 2 + layers % 2


Fetch = Resident | FromHost | Whole
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
    `prepare` is made for every layer of a batch and called before all else, to turn what is held to other positions;
    `turn` gives queries and new keys the coordinates that the layer keeps its keys in; `rounds` new keys and values
    [b, Hk, d] to what it keeps of them, also where nothing has to be chosen; `evict` makes room before attention and
    looks back after it.
    """

    index: Index | None = None
    choose: Rule | None = None  # the best scores
    when: Literal["before", "after", "ahead"] = "before"
    varies: bool = False
    fetch: Fetch = RESIDENT
    correction: Correction | None = None
    prepare: Callable[[BatchSlots], Callable[[], None]] | None = None
    turn: Coordinates | None = None
    rounds: Callable[[Tensor], Tensor] | None = None
    evict: Evict | None = None

    @property
    def rotates(self) -> bool:
        """Whether it rotates keys or queries apart from the model, by tables of all positions in fp32."""
        rebuilds = isinstance(self.fetch, FromHost) and self.fetch.rebuild is not None
        return rebuilds or self.when == "ahead" or self.prepare is not None
