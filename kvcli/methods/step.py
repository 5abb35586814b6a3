"""What the retrieval layers of a method do at a step, stated once, for any method.

`Phases` carries it out for one sequence, phase after phase, on its caches: that defines what a step attends to.
`kvcli.runtime.gpu` carries it out for a batch, over slots, without asking the host. So the parts of a plan have two
sides: what they do with a cache, and `over_slots`, which makes what does the same for a layer of a batch.

    StepPlan        what a step does: index, choice, when, what is fetched, feedback, correction
    BatchSlots      a layer's caches of a batch, side by side in tensors whose shapes never change
    Best, NearBest  which pages, tokens or chunks are attended to, by their scores
    PageBounds      the index of pages by bounds on their keys
    KeyChannels     tokens scored by some channels of their keys
    LowestScore, StalestPage    where the newest token goes, and what attention gives back for the choice

Every part does its work by kernels, or by operations of torch that neither wait for the device nor copy anything to it,
so that a step may be captured in a CUDA graph. On a CPU the kernels' references do it. What one method alone does at a
step lies with it (Twilight, ShadowKV, FIER, InfiniGen).

Shapes: b sequences, H query heads, Hk KV heads, d head dimension, n pages, tokens or chunks that can be scored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.append import NewToken, take_in_filled_page
from kvcli.kernels.eviction import PageCounts, StampedPages, make_room, replace_page
from kvcli.kernels.group_pooling import HeadPooling, Pooling, pool_queries, pool_scores
from kvcli.kernels.near_best import NearTally, count_near_best, near_best
from kvcli.kernels.page_scores import choose_pages, page_scores, page_scores_device
from kvcli.kernels.page_table import MissList, PagedKV, SlotLayout
from kvcli.kernels.prefill_attention import last_rows
from kvcli.kernels.query_similarity import query_similarity
from kvcli.kernels.recall import HostPages
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores_device
from kvcli.kernels.topk import Selection, topk_pages, topk_pages_device
from kvcli.kv.cache import NEVER, LayerCache, LayerSlots
from kvcli.telemetry.counters import Count

if TYPE_CHECKING:
    from kvcli.methods.contract import AnyMethod
    from kvcli.models.rope import Rotary


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
    a layer ahead, by the query that the layer before predicts. `varies` says that scores decide how many are chosen.
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
    predicted: bool
    """Whether the query is that of a layer which has yet to take the newest token."""

    def scores(self, q: Tensor) -> Tensor:
        """Score the candidates with q [H, d], see `Index.scores`."""

    def best(self, scores: Tensor, count: int) -> Tensor:
        """The `count` candidates with the best scores [Hk, n] -> [Hk, count], in no particular order."""

    def tally(self, **numbers: int) -> None:
        """Add to what the method counts, see `Method.take_tally`."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Time a phase, see `Method.span`."""


@dataclass(frozen=True)
class BatchSlots:
    """A layer of b sequences: its rows, its other `tensors` [b, ...] by the names that the caches give them, and more.

    `seen` [b] int32 are the tokens of each sequence, of which the rows may hold less. `host` are the pages of layers
    that have any in host memory, `into` is the layout of the slots that they come into. Each sequence chooses once it
    has `active_from` tokens; `rotary` is the layer's rotation in it.
    """

    rows: PagedKV
    tensors: Mapping[str, Tensor]
    seen: Tensor
    host: HostPages | None
    into: SlotLayout
    active_from: Sequence[int]
    rotary: Sequence[Rotary | None] = ()

    @property
    def holds_all(self) -> bool:
        """Whether no sequence will ever have to choose."""
        return all(least == NEVER for least in self.active_from)

    @property
    def slots(self) -> PagedKV:
        """The rows that pages come into from the host."""
        if self.into == self.rows.layout:
            return self.rows
        rows, end = self.rows, self.into.total * self.into.size
        return PagedKV(rows.k[:, :, :end], rows.v[:, :, :end], rows.lengths, self.into, self.tensors["resident"])

    @property
    def by_position(self) -> PagedKV:
        """The rows, where they lie in place as slots of which every page has its own."""
        rows, size = self.rows, self.rows.layout.size
        if not rows.in_place:
            return rows
        return PagedKV(rows.k, rows.v, rows.lengths, SlotLayout.everything(rows.k.shape[2] // size, size))

    @classmethod
    def of(
        cls,
        caches: Sequence[LayerCache],
        parts: Sequence[LayerSlots],
        seen: Tensor,
        held: Tensor | None = None,
        rotary: Sequence[Rotary | None] = (),
    ) -> BatchSlots:
        """Take over the layer's cache of every sequence, which from then on is a view of this; `parts` are its slots.

        `seen` and, where it is less, `held` [b] int32 are what kernels will read; their values do not matter yet. A
        single sequence is not copied; of several, each cache is copied to its place and then freed.
        """
        kv = _side_by_side([part.kv for part in parts])  # [b, t, Hk, rows, d]
        tensors = {name: _side_by_side([part.tensors[name] for part in parts]) for name in parts[0].tensors}
        for row, (cache, part) in enumerate(zip(caches, parts, strict=True)):
            own = {name: tensors[name][row][_corner(x)] for name, x in part.tensors.items()}
            cache.adopt_slots(part._replace(kv=kv[row][_corner(part.kv)], tensors=own))
        longest = max((part.layout for part in parts), key=lambda layout: layout.total * layout.size)
        resident = tensors.get("resident") if longest.selected else None
        k, v = kv[:, 0], kv[:, -1]
        arrived = torch.zeros(k.shape[:2], dtype=torch.int32, device=k.device)
        rows = PagedKV(k, v, seen if held is None else held, longest, resident, parts[0].in_place, arrived)
        outgrown = longest.budget * longest.size + 1
        active_from = [outgrown if part.active_from is None else part.active_from for part in parts]
        return cls(rows, tensors, seen, _host_pages(parts, kv), parts[0].into or longest, active_from, rotary)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors whose sizes may differ; what is beyond the end of one is not initialised."""
    if len(parts) == 1:
        return parts[0][None]
    shapes = [part.shape for part in parts]
    batch = parts[0].new_empty(len(parts), *(max(sizes) for sizes in zip(*shapes, strict=True)))
    for target, part in zip(batch, parts, strict=True):
        target[_corner(part)] = part
    return batch


def _corner(part: Tensor) -> tuple[slice, ...]:
    """Where a tensor lies in a larger one."""
    return tuple(slice(size) for size in part.shape)


def _host_pages(parts: Sequence[LayerSlots], kv: Tensor) -> HostPages | None:
    pieces = [part.pieces for part in parts if part.pieces is not None]
    if not pieces:
        return None
    form, sizes = parts[0].format, [part.sizes for part in parts if part.sizes is not None]
    quantised = None if form is None else (form, kv.dtype)
    return HostPages.of(pieces, parts[0].host_layout, kv.device, quantised, torch.stack(sizes) if sizes else None)


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


@dataclass(frozen=True)
class Best(Rule):
    """What scores best, as much as there are places for.

    With a `part`: the best for that part of all places; then what is on the device, then others, by score (ArkVale).
    """

    part: float | None = None

    @override
    def pick(self, step: LayerStep, q: Tensor) -> Picked:
        scores, places = step.scores(q), step.cache.selected  # [Hk, n]
        if self.part is not None:
            with step.span("select"):
                scores = self._standing(scores, step.cache.resident - step.candidates.start, places)
        return Picked(step.best(scores, places))

    def _standing(self, scores: Tensor, held: Tensor, places: int) -> Tensor:
        """Put what is best or `held` before all else, each by its scores [Hk, n]: int64 [Hk, n], more is better.

        held [Hk, places]: candidates on the device, below 0 for none. The bits of positive numbers, as whole numbers,
        are in their order; those of negative ones are once all but the sign are turned over.
        """
        ahead = scores.new_zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)  # column 0 is of no page
        ahead = ahead.scatter_(1, held.clamp_min(-1) + 1, True)[:, 1:]
        ahead.scatter_(1, topk_pages(scores, self.first(places)), True)
        bits = (scores.float() + 0.0).view(torch.int32)  # zeros of either sign are equal
        return (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() + (ahead.long() << 33)

    def first(self, places: int) -> int:
        """How many are the best wherever they lie; 0: all."""
        return 0 if self.part is None else max(1, round(self.part * places))

    @override
    def over_slots(self, slots: BatchSlots) -> Choice:
        return BestOverSlots(self.first(slots.rows.layout.selected))


class BestOverSlots(Choice):
    """The best scores of a batch; see `Selection.first`."""

    def __init__(self, first: int):
        self.first = first

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        index.best(q, softmax, heads, selection._replace(first=self.first))
        return Chosen(selection.selected)


@dataclass(frozen=True)
class NearBest(Rule):
    """Tokens that score within `alpha` of the best, as many for a KV head as the heads want on average (InfiniGen)."""

    alpha: float

    @override
    def pick(self, step: LayerStep, q: Tensor) -> Picked:
        scores = step.scores(q)  # [Hk, n]
        with step.span("select"):
            wanted = int(near_best(scores, self.alpha).float().mean())
        tokens = step.best(scores, min(wanted, step.cache.budget.max_selected))
        step.tally(chosen=tokens.numel(), choices=len(tokens), layer_steps=int(step.predicted))
        return Picked(tokens)

    @override
    def over_slots(self, slots: BatchSlots) -> Choice:
        return NearBestOverSlots(slots, self.alpha)


class NearBestOverSlots(Choice):
    """The same of a batch."""

    def __init__(self, slots: BatchSlots, alpha: float):
        self.slots, self.alpha = slots, alpha
        b, device = len(slots.rows.k), slots.rows.k.device
        self.counts = NearTally(*torch.zeros(len(NearTally._fields), b, dtype=torch.int64, device=device))
        self.tally = self.counts._asdict()
        self.wanted, self.arrived = torch.zeros(2, b, dtype=torch.int32, device=device)

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        assert isinstance(index, ScoredIndex)
        scores, rows = index.scores(q, softmax, heads), self.slots.rows  # [b, Hk, n]
        count_near_best(scores, heads, self.alpha, rows.layout.selected, self.wanted, self.counts, self.arrived)
        topk_pages_device(scores, rows.lengths, rows.layout, selection, heads, self.wanted, rows.arrived)
        return Chosen(selection.selected, asked=self.wanted)


@dataclass(frozen=True)
class PageBounds(Index):
    """The most that q.k can be in a page by its summary, pooled over the query heads of a KV head.

    The summary is the least and the greatest value of each channel, or a `cuboid` about the keys: a cache says which,
    and where pages are indexed over slots this says the same. Without `score_scale` scores are not scaled.
    """

    pooling: HeadPooling
    score_scale: bool = True
    cuboid: bool = False

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        return page_scores(q, cache.summaries.of(candidates), self.scale(softmax), self.pooling)

    def scale(self, softmax: Softmax) -> float:
        """What q.k is multiplied by."""
        return softmax.scale if self.score_scale else 1.0

    @override
    def over_slots(self, slots: BatchSlots) -> PageBoundsOverSlots:
        return PageBoundsOverSlots(slots, self)


class PageBoundsOverSlots(StepIndex):
    """`bounds` [b, Hk, n, 2, d] of every full page, or the cuboid about its keys.

    A page is in the window until another one is full: it need not have its bounds before attention.
    """

    needs_newest = False

    def __init__(self, slots: BatchSlots, of: PageBounds):
        assert of.pooling != "none", "query heads that choose alone are served phase after phase"
        self.slots, self.bounds, self.of, self.pooling = slots, slots.tensors["bounds"], of, of.pooling
        self.pages = slots.by_position

    @override
    def best(
        self, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection, wanted: Tensor | None = None
    ) -> None:
        assert wanted is None, "as many pages as there are places for"
        scale, arrived = self.of.scale(softmax), self.slots.rows.arrived
        choose_pages(q, self.bounds, *self.scored, scale, self.pooling, selection, heads, arrived)

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        take_in_filled_page(self.pages, self.bounds, host, self.of.cuboid)


@dataclass(frozen=True)
class KeyChannels(Index):
    """Scores by the first `channels` of the keys (None: all), over the group or, `together`, over all query heads."""

    channels: int | None
    pooling: HeadPooling
    together: bool = False

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        pooled = 1 if self.together else cache.k.shape[0]
        queries = pool_queries(q.view(pooled, -1, q.shape[-1]), self.pooling)  # [Hk or 1, G or 1, d]
        scores = cache.index.scores(queries.flatten(0, 1), candidates, softmax.scale)  # [Hk, G or 1, n]
        return pool_scores(scores.reshape(pooled, -1, scores.shape[-1]), self.pooling)

    @override
    def over_slots(self, slots: BatchSlots) -> KeyChannelsOverSlots:
        return KeyChannelsOverSlots(slots, self)


class KeyChannelsOverSlots(ScoredIndex):
    """The same of a batch."""

    needs_newest = False

    def __init__(self, slots: BatchSlots, of: KeyChannels):
        assert of.pooling != "none", "query heads that choose alone are served phase after phase"
        self.slots, self.pooling = slots, of.pooling
        self.keys, self.rows = slots.rows.k[..., : of.channels], 1 if of.together else slots.rows.k.shape[1]

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor) -> Tensor:
        out = q.new_empty(len(q), self.rows, self.keys.shape[2], dtype=torch.float32)
        token_scores_device(q, self.keys, *self.scored, Softmax(softmax.scale), self.pooling, out, heads)
        return out

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        """Do nothing: attention puts the key where it is scored."""


Heads = Literal["group", "layer"]
"""The query heads whose attention is averaged: those of a KV head, or all of the layer."""


@dataclass(frozen=True)
class LowestScore(Evict):
    """The token of the lowest score leaves, of equals the newest; not the `recent` newest (see `EvictingCache`).

    Scores are the attention of each token, by KV head (`heads` of its group) or the same for the whole layer; of all
    steps so far (`summed`) or of the last.
    """

    recent: int
    heads: Heads
    summed: bool

    @override
    def look_back(self, cache: Any, q: Tensor, softmax: Softmax) -> None:
        k, _ = cache.resident
        received, scores = mean_attention(last_rows(q[:, None], k, softmax)[:, 0], len(k), self.heads), cache.scores
        held = scores[:, : cache.held]
        if self.summed:
            held += received
        else:
            held[:] = received

    @override
    def over_slots(self, slots: BatchSlots) -> Eviction:
        return LowestScoreOverSlots(slots, self.recent, self.heads, self.summed)


def mean_attention(weights: Tensor, num_kv_heads: int, heads: Heads) -> Tensor:
    """Average what query heads give the tokens, [H, n], for each KV head: [Hk, n]."""
    if heads == "layer":
        return weights.mean(0).expand(num_kv_heads, -1)
    return weights.view(num_kv_heads, -1, weights.shape[-1]).mean(1)


class LowestScoreOverSlots(Eviction):
    """The same of a batch."""

    def __init__(self, slots: BatchSlots, recent: int, heads: Heads, summed: bool):
        self.rows, self.seen = slots.rows, slots.seen
        self.positions, self.scores = slots.tensors["positions"], slots.tensors["scores"]  # [b, Hk, rows]
        self.most = slots.tensors["rows"]  # [b]
        self.recent, self.summed = recent, summed
        self.received = torch.empty_like(self.scores if heads == "group" else self.scores[:, :1])
        self.at = torch.zeros(self.scores.shape[:2], dtype=torch.int32, device=self.seen.device)

    @override
    def make_room(self) -> Tensor:
        make_room(self.positions, self.scores, self.seen, self.most, self.recent, self.at)
        return self.at

    @override
    def look_back(self, q: Tensor, softmax: Softmax) -> None:
        # A row that holds no token gets -inf, and keeps its score; a sequence that takes no part keeps all of them. The
        # score of a token that comes there begins at zero.
        rows, layout = self.rows, SlotLayout(1, 0, 0, 0)  # all rows that hold one
        token_scores_device(q, rows.k, rows.lengths, layout, softmax, "mean_s", self.received)
        if self.summed:
            self.scores.add_(self.received.clamp_min_(0))
        else:
            torch.where(self.received >= 0, self.received, self.scores, out=self.scores)


@dataclass(frozen=True)
class StalestPage(Evict):
    """The page of the oldest timestamp leaves when a new one needs its slot (see `TimestampedPageCache`).

    A page of `size` tokens is stamped where its score is larger than a `threshold`; the newest `window` never leave.
    """

    window: int
    size: int
    threshold: float
    pooling: Pooling

    @override
    def look_back(self, cache: Any, q: Tensor, softmax: Softmax) -> None:
        if cache.contested:
            cache.stamp(page_scores(q, cache.summaries, softmax.scale, self.pooling) > self.threshold)  # [Hk, pages]

    @override
    def over_slots(self, slots: BatchSlots) -> Eviction:
        return StalestPageOverSlots(slots, self)


class StalestPageOverSlots(Eviction):
    """The same of a batch."""

    def __init__(self, slots: BatchSlots, of: StalestPage):
        self.size, self.window, self.threshold, self.pooling = of.size, of.window, of.threshold, of.pooling
        tensors, seen = slots.tensors, slots.seen
        self.held = StampedPages(slots.rows.k, slots.rows.v, tensors["bounds"], tensors["stamps"], tensors["pages"])
        self.counts = PageCounts(
            tensors["protected"], tensors["slots"], seen, torch.zeros_like(seen), torch.zeros_like(seen)
        )
        self.rows, self.contested = slots.rows._replace(lengths=self.counts.held), not slots.holds_all

    @override
    def make_room(self) -> None:
        replace_page(self.held, self.counts, self.window)

    @override
    def look_back(self, q: Tensor, softmax: Softmax) -> None:
        if not self.contested:
            return
        bounds, stamps = self.held.bounds, self.held.stamps
        take_in_filled_page(self.rows, bounds)
        layout = SlotLayout(self.size, 0, 0, 0)  # all full pages are scored
        scores = torch.empty(stamps.shape, dtype=torch.float32, device=q.device)
        page_scores_device(
            q, bounds, self.counts.full, layout, softmax.scale, self.pooling, scores, arrived=self.rows.arrived
        )
        torch.where(scores > self.threshold, self.counts.seen[:, None, None].long(), stamps, out=stamps)


class Phases(LayerStep):
    """A step of one layer of one sequence, carried out."""

    def __init__(self, method: AnyMethod, layer: int, softmax: Softmax):
        self.method, self.layer, self.softmax = method, layer, softmax
        self.plan: StepPlan = method.plan
        self.cache = method.retrieval[layer]
        self.kept: Remembered = method.remembered[layer]
        self.candidates: range = self.cache.candidates if self.plan.index is not None else range(0)
        self.predicted = False

    def attend(self, q: Tensor) -> Tensor:
        """Attend with q, the newest token appended."""
        plan, cache = self.plan, self.cache
        if plan.turn is not None:
            q = plan.turn.turned(cache, q)
        if plan.index is None or not cache.active:  # nothing is left out, or nothing is there to be left out
            with self.span("attention"):
                out: Tensor = cache.attend(q, self.softmax)
            if plan.evict is not None:
                with self.span("score"):
                    plan.evict.look_back(cache, q, self.softmax)
            return out
        if plan.correction is not None:
            return self._speculate(plan.correction, q)
        picked, self.kept.ahead = self.kept.ahead or self._choose_and_fetch(q), None
        with self.span("attention"):
            return self._attend_to(picked, q)

    def choose_ahead(self, q: Tensor) -> None:
        """Choose and fetch for the next attention, with a query that is predicted; the newest token is yet to come."""
        length = self.cache.length + 1
        if length > self.cache.budget.total:
            self.candidates, self.predicted = self.cache.budget.candidates(length), True
            self.kept.ahead = self._choose_and_fetch(q, later=True)

    @override
    def scores(self, q: Tensor) -> Tensor:
        assert self.plan.index is not None
        with self.span("score"):
            return self.plan.index.scores(self.cache, q, self.candidates, self.softmax)

    @override
    def best(self, scores: Tensor, count: int) -> Tensor:
        with self.span("select"):
            return topk_pages(scores, count) + self.candidates.start

    @override
    def tally(self, **numbers: int) -> None:
        self.method.take_tally(self.layer, numbers)

    @override
    def span(self, name: str) -> AbstractContextManager[None]:
        return self.method.span(name, self.layer)

    def _speculate(self, correction: Correction, q: Tensor) -> Tensor:
        """Attend to the last step's choice, corrected where the query turned; then fetch for the next step."""
        kept = self.kept
        with self.span("correction"):
            corrected = self._corrected(correction, q)  # [Hk] bool
        last, kept.picked = kept.picked, self._choose(q)
        selected = kept.picked.pages  # [Hk, k]
        kept.read = Read(corrected, selected, selected if last is None else last.pages)
        if corrected.any():
            self._fetch(selected, heads=corrected)
        with self.span("attention"):
            out: Tensor = self.cache.attend(q, self.softmax)
        if not corrected.all():  # for the other heads: a corrected one misses nothing any more
            self._fetch(selected, later=True, hidden=True)
        kept.query = q.clone()
        return out

    def _corrected(self, correction: Correction, q: Tensor) -> Tensor:
        """Flag the KV heads that must not reuse: all of them at the first retrieval."""
        heads = len(self.cache.resident)
        if self.kept.query is None:
            self.method.count(self.layer, Count.FIRST_RETRIEVALS, heads)
            return q.new_ones(heads).bool()
        corrected = query_similarity(q, self.kept.query, heads, correction.pooling) < correction.below[self.layer]
        self.method.count_heads(self.layer, Count.HEADS_CHECKED, [1] * heads)
        self.method.count_heads(self.layer, Count.HEADS_CORRECTED, corrected.int().tolist())
        return corrected

    def _choose(self, q: Tensor) -> Picked:
        picked = (self.plan.choose or Best()).pick(self, q)
        self.method.count_selected(self.layer, picked.pages, self.cache.readers)
        return picked

    def _choose_and_fetch(self, q: Tensor, **how: Any) -> Picked:
        picked = self._choose(q)
        if isinstance(self.plan.fetch, FromHost):
            self._fetch(picked.pages, **how)
        return picked

    def _fetch(self, pages: Tensor, hidden: bool = False, **how: Any) -> None:
        """Bring what is missing of pages [Hk, k], see the cache's `recall`; `hidden`: this attention does not wait."""
        with self.span("recall"):
            misses, moved = self.cache.recall(pages, **how)
        self.method.count_recalled(self.layer, misses, moved, hidden)

    def _attend_to(self, picked: Picked, q: Tensor) -> Tensor:
        pages, tokens, kept = picked
        if kept is None:
            return self.cache.attend_selected(q, pages, self.softmax)  # type: ignore[no-any-return]
        return self.cache.attend_tokens(q, tokens, kept, self.softmax)  # type: ignore[no-any-return]
