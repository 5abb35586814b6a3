"""The plan of a step: what the retrieval layers of any method do, stated once.

`Phases` carries a plan out for one sequence, phase after phase, on its caches: this defines what a step attends to.
`kvcli.runtime.gpu` carries it out for a batch, over slots, without asking the host. So every part of a plan has two
sides: a function on a cache, and `over_slots`, which makes the equivalent for a layer of a batch.

    StepPlan        index, choice, timing, fetch, correction and eviction of a step
    BatchSlots      a layer's caches of a batch, stacked in tensors of fixed shapes
    Best, NearBest  rules that choose pages, tokens or chunks by their scores
    PageBounds      the index of pages by bounds on their keys
    KeyChannels     tokens scored by some channels of their keys
    PartialKeys     tokens scored by a copy of their keys, which has a few columns
    LowestScore, StalestPage    evictions: the slot of the newest token, and the feedback from attention

Every part uses kernels, or torch operations that neither wait for the device nor copy anything to it, so that a step
can be captured in a CUDA graph. On a CPU the kernels' references are used. Parts that only one method needs lie with
that method (Twilight, ShadowKV, FIER).

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

from kvcli.kernels import speculation
from kvcli.kernels.append import NewToken, take_in_filled_page
from kvcli.kernels.decode_attention import Tokens
from kvcli.kernels.eviction import PageCounts, StampedPages, make_room, replace_page
from kvcli.kernels.group_pooling import HeadPooling, Pooling, pool_queries, pool_scores
from kvcli.kernels.near_best import NearTally, count_near_best, near_best
from kvcli.kernels.page_scores import choose_pages, page_scores, page_scores_device
from kvcli.kernels.page_table import Misses, MissList, PagedKV, SlotLayout
from kvcli.kernels.prefill_attention import last_rows
from kvcli.kernels.query_similarity import query_similarity
from kvcli.kernels.recall import HostPages
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.speculation import Pages, Speculated, SpeculationSettings
from kvcli.kernels.token_scores import project_heads, project_newest, token_scores_device
from kvcli.kernels.topk import Selection, topk_pages, topk_pages_device
from kvcli.kv.cache import NEVER, LayerCache, LayerSlots
from kvcli.telemetry.counters import Count

if TYPE_CHECKING:
    from kvcli.methods.contract import AnyMethod
    from kvcli.models.rope import Rotary


RecallBy = Literal["gather", "copy"]


class Index(ABC):
    """Scores the pages, tokens or chunks of a layer, from which a rule chooses."""

    @abstractmethod
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        """Score the candidates of a cache with q [H, d].

        Returns [Hk, n]; [H, n] where query heads score on their own; [1, n] where all heads share one score.
        """

    def over_slots(self, slots: BatchSlots) -> StepIndex:
        """Make the index for a layer of a batch; missing where no CUDA graph can score."""
        raise NotImplementedError(f"{type(self).__name__} scores phase after phase")


class Rule(ABC):
    """Chooses by scores."""

    @abstractmethod
    def pick(self, step: LayerStep, q: Tensor) -> Picked:
        """Choose for a layer of one sequence with q [H, d]; counts go to `Method.take_tally`."""

    def over_slots(self, slots: BatchSlots) -> Choice:
        """Make the rule for a layer of a batch; missing where the settings do not stay in place."""
        raise NotImplementedError(f"{type(self).__name__} chooses phase after phase")


class Coordinates(ABC):
    """The coordinate system that a layer keeps its keys in; its cache transforms the keys that it stores."""

    @abstractmethod
    def turned(self, cache: Any, q: Tensor) -> Tensor:
        """Transform the queries [H, d] of one sequence."""

    @abstractmethod
    def over_slots(self, slots: BatchSlots) -> Callable[[Tensor], Tensor]:
        """Make the function that transforms queries and new keys of a batch, [b, H or Hk, d]."""


class Evict(ABC):
    """Decides what leaves a layer of bounded size; its cache makes room as it stores a token."""

    @abstractmethod
    def look_back(self, cache: Any, q: Tensor, softmax: Softmax) -> None:
        """Update the eviction state from the attention of q [H, d] of one sequence; its newest token is stored."""

    @abstractmethod
    def over_slots(self, slots: BatchSlots) -> Eviction:
        """Make the eviction for a layer of a batch: making room, and the feedback."""


class Resident(NamedTuple):
    """Everything is on the device: attention reads the chosen rows in place."""


class FromHost(NamedTuple):
    """Chosen pages lie in host memory; missing ones are brought into slots on the device.

    Over slots this is done by a kernel that reads pinned memory (gather), or by one copy per page through one or two
    staging buffers. Where only values lie in host memory, `rebuild` makes the matching keys. With `writes`, pages that
    fill up are written to host memory, at the latest when they leave the window.
    """

    recall: RecallBy = "gather"
    double_buffer: bool = True
    rebuild: Callable[[BatchSlots], Callable[[MissList], None]] | None = None
    writes: bool = True


class Whole(NamedTuple):
    """Layers lie in host memory and come to the device whole, in turn, each while the one before it is computed."""

    @staticmethod
    def buffers(layers: int) -> int:
        """Return how many buffers `layers` layers need: two, or three if the last would need the first one's buffer."""
        return 1 if layers == 1 else 2 + layers % 2


Fetch = Resident | FromHost | Whole
RESIDENT = Resident()


class Correction(NamedTuple):
    """KV heads whose query cosine with the last step is below a threshold; they do not reuse the last step's choice.

    `below` has one threshold per layer: above 1 all heads are corrected, below -1 none. Cosines are pooled over the
    query heads.
    """

    below: tuple[float, ...]
    pooling: Literal["mean", "max"] = "mean"


@dataclass(frozen=True)
class StepPlan:
    """A step in the layers of `Method.new_cache`; without an `index` they attend to all that they hold.

    `when` is the time of the choice: before attention; or after it, for the next step, except for heads that
    `correction` names; or a layer ahead, by the query that the layer before predicts, or by that layer's own query,
    borrowed. With `varies` the scores decide how many are chosen. `prepare` is made for every layer of a batch and
    called before all else, to move held keys to other positions. `turn` transforms queries and new keys to the
    coordinates in which the layer keeps keys. `rounds` rounds new keys and values [b, Hk, d] as the layer stores them,
    also where nothing has to be chosen. `evict` makes room before attention and looks back after it.
    """

    index: Index | None = None
    choose: Rule | None = None  # None: the best scores
    when: Literal["before", "after", "ahead", "borrowed"] = "before"
    varies: bool = False
    fetch: Fetch = RESIDENT
    correction: Correction | None = None
    prepare: Callable[[BatchSlots], Callable[[], None]] | None = None
    turn: Coordinates | None = None
    rounds: Callable[[Tensor], Tensor] | None = None
    evict: Evict | None = None

    @property
    def rotates(self) -> bool:
        """Whether the step rotates keys or queries on its own, by fp32 tables of all positions."""
        rebuilds = isinstance(self.fetch, FromHost) and self.fetch.rebuild is not None
        return rebuilds or self.when == "ahead" or self.prepare is not None


class Picked(NamedTuple):
    """The choice of a layer of one sequence, in addition to sink and window: `pages` [Hk, k], or [H, k] by query head.

    Where not all of their tokens are read, `tokens` [Hk, n] lists them with those of sink and window, and `kept` [Hk,
    n] bool marks the ones to read.
    """

    pages: Tensor
    tokens: Tensor | None = None
    kept: Tensor | None = None


class Read(NamedTuple):
    """What attention read: KV heads in `corrected` [Hk] this step's selection, the others the last step's."""

    corrected: Tensor
    selected: Tensor  # [Hk, k] pages
    before: Tensor

    @property
    def pages(self) -> Tensor:
        """The pages that each KV head read, [Hk, k]."""
        return self.selected.where(self.corrected[:, None], self.before)


class Remembered:
    """State of a method that a layer of one sequence keeps from step to step."""

    def __init__(self) -> None:
        self.query: Tensor | None = None  # [H, d], the last query that chose, where a choice may outlive its step
        self.picked: Picked | None = None  # its choice
        self.read: Read | None = None  # what the last attention read, where some heads may reuse an older choice
        self.ahead: Picked | None = None  # fetched already, for the next attention
        self.lent: Tensor | None = None  # [H, d], the query of the layer before, which the next attention chooses by


class LayerStep(Protocol):
    """A step of one layer of one sequence, as rules see it."""

    cache: Any
    candidates: range
    softmax: Softmax
    kept: Remembered
    predicted: bool
    """Whether the query is a prediction for a layer that has not stored the newest token yet."""

    def scores(self, q: Tensor) -> Tensor:
        """Score the candidates with q [H, d], see `Index.scores`."""

    def best(self, scores: Tensor, count: int) -> Tensor:
        """Return the `count` candidates with the best scores [Hk, n] -> [Hk, count], in no particular order."""

    def tally(self, **numbers: int) -> None:
        """Add to the method's counts, see `Method.take_tally`."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Time a phase, see `Method.span`."""


@dataclass(frozen=True)
class BatchSlots:
    """A layer of b sequences: its rows, and its other `tensors` [b, ...] by the names that the caches give them.

    `seen` [b] int32 counts the tokens of each sequence; the rows may hold fewer. `host` holds the pages in host memory,
    if there are any, and `into` is the layout of the slots that they are brought into. Each sequence starts to choose
    at `active_from` tokens. `rotary` is the layer's rotation, per sequence.
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
        """The rows that pages from the host are brought into."""
        if self.into == self.rows.layout:
            return self.rows
        rows, end = self.rows, self.into.total * self.into.size
        return PagedKV(rows.k[:, :, :end], rows.v[:, :, :end], rows.lengths, self.into, self.tensors["resident"])

    @property
    def by_position(self) -> PagedKV:
        """The rows as slots that each belong to one page, where tokens lie in place."""
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
        """Take over the layer's cache of every sequence, which then becomes a view of this; `parts` are its slots.

        Kernels will read `seen` and, where fewer tokens are held, `held` [b] int32; their values do not matter yet. A
        single sequence is not copied. Of several sequences, each cache is copied to its place and then freed.
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
    """Stack tensors whose sizes may differ; the space beyond the end of a smaller one is not initialised."""
    if len(parts) == 1:
        return parts[0][None]
    shapes = [part.shape for part in parts]
    batch = parts[0].new_empty(len(parts), *(max(sizes) for sizes in zip(*shapes, strict=True)))
    for target, part in zip(batch, parts, strict=True):
        target[_corner(part)] = part
    return batch


def _corner(part: Tensor) -> tuple[slice, ...]:
    """Return the slices at which a tensor lies in a larger one."""
    return tuple(slice(size) for size in part.shape)


def _host_pages(parts: Sequence[LayerSlots], kv: Tensor) -> HostPages | None:
    pieces = [part.pieces for part in parts if part.pieces is not None]
    if not pieces:
        return None
    form, sizes = parts[0].format, [part.sizes for part in parts if part.sizes is not None]
    quantised = None if form is None else (form, kv.dtype)
    return HostPages.of(pieces, parts[0].host_layout, kv.device, quantised, torch.stack(sizes) if sizes else None)


class StepIndex(ABC):
    """The index of a layer of a batch: scores its pages, tokens or chunks and chooses the best."""

    needs_newest: bool
    """Whether the newest token is appended, and `update` called, before scoring; otherwise both follow attention."""

    slots: BatchSlots

    @property
    def scored(self) -> tuple[Tensor, SlotLayout]:
        """The lengths [b] and the layout that define the candidates."""
        return self.slots.rows.lengths, self.slots.rows.layout

    @abstractmethod
    def best(
        self, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection, wanted: Tensor | None = None
    ) -> None:
        """Choose the best by queries q [b, H, d] into `selection`, for the KV heads marked in `heads` [b, Hk] bool.

        `wanted` [b] int32 limits how many are chosen, where fewer than there are places.
        """

    @abstractmethod
    def update(self, new: NewToken, host: HostPages | None) -> None:
        """Index the newest, already appended tokens, or the pages that they complete, and write these to `host`.

        Where `needs_newest` is False the caller may already reuse `new`.
        """


class ScoredIndex(StepIndex):
    """An index that writes its scores down before it chooses."""

    @abstractmethod
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor) -> Tensor:
        """Score with queries q [b, H, d]; return [b, Hk, n] fp32, of which only the candidates' scores are used.

        Only the KV heads marked in `heads` [b, Hk] bool need to be scored.
        """

    @override
    def best(
        self, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection, wanted: Tensor | None = None
    ) -> None:
        scores = self.scores(q, softmax, heads)
        topk_pages_device(scores, *self.scored, selection, heads, wanted, self.slots.rows.arrived)


class Chosen(NamedTuple):
    """The choice of a batch, in addition to sink and window: pages [b, Hk, selected] int32, padded with -1.

    Where some tokens of these pages, sink or window are left out, `kept` [b, Hk, slots * size] bool marks the others.
    """

    pages: Tensor
    kept: Tensor | None = None
    asked: Tensor | None = None
    """[b] int32: how many each KV head chose, where the scores decide (`StepPlan.varies`)."""


class Choice(Protocol):
    """A rule made for a layer of a batch; it may keep state, and count in `tally`."""

    tally: Mapping[str, Tensor] = MappingProxyType({})
    """Named numbers [b], passed to `Method.take_tally` at the end."""

    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        """Choose for the KV heads marked in `heads` [b, Hk] with queries q [b, H, d]; `selection` is written."""


class Eviction(Protocol):
    """Keeps a layer of a batch bounded: makes room before attention, looks back after it."""

    rows: PagedKV
    """The rows that are attended to; their lengths are the tokens held."""

    def make_room(self) -> Tensor | None:
        """Make room for the newest token; return its rows [b, Hk] int32, or None where it takes the next row."""

    def look_back(self, q: Tensor, softmax: Softmax) -> None:
        """Update the eviction state from the attention of queries [b, H, d]; the newest token is among the rows."""


@dataclass(frozen=True)
class Best(Rule):
    """The best scores, as many as there are places.

    With a `part`: that part of the places goes to the best of all; the rest first to what is on the device, then to
    others, by score (ArkVale).
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
        """Rank the best and the `held` candidates before all others, each by scores [Hk, n]; return int64 [Hk, n].

        More is better. held [Hk, places] lists candidates on the device, below 0 for none. The bits of positive floats,
        read as integers, are in the same order; those of negative floats are once all bits but the sign are flipped.
        """
        ahead = scores.new_zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)  # column 0: no page
        ahead = ahead.scatter_(1, held.clamp_min(-1) + 1, True)[:, 1:]
        ahead.scatter_(1, topk_pages(scores, self.first(places)), True)
        bits = (scores.float() + 0.0).view(torch.int32)  # zeros of either sign are equal
        return (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() + (ahead.long() << 33)

    def first(self, places: int) -> int:
        """Return how many are chosen by score alone, wherever they lie; 0: all."""
        return 0 if self.part is None else max(1, round(self.part * places))

    @override
    def over_slots(self, slots: BatchSlots) -> Choice:
        return BestOverSlots(self.first(slots.rows.layout.selected))


class BestOverSlots(Choice):
    """`Best` for a batch; see `Selection.first`."""

    def __init__(self, first: int):
        self.first = first

    @override
    def __call__(self, index: StepIndex, q: Tensor, softmax: Softmax, heads: Tensor, selection: Selection) -> Chosen:
        index.best(q, softmax, heads, selection._replace(first=self.first))
        return Chosen(selection.selected)


@dataclass(frozen=True)
class NearBest(Rule):
    """Tokens that score within `alpha` of the best; each KV head gets the mean count over heads (InfiniGen)."""

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
    """`NearBest` for a batch."""

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
    """Pages scored by an upper bound of q.k from their summary, pooled over the query heads of a KV head.

    The summary is the minimum and maximum of each channel, or with `cuboid` a cuboid around the keys. The cache decides
    which; over slots this setting must agree. Without `score_scale` scores are not scaled.
    """

    pooling: HeadPooling
    score_scale: bool = True
    cuboid: bool = False

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        return page_scores(q, cache.summaries.of(candidates), self.scale(softmax), self.pooling)

    def scale(self, softmax: Softmax) -> float:
        """Return the factor of q.k."""
        return softmax.scale if self.score_scale else 1.0

    @override
    def over_slots(self, slots: BatchSlots) -> PageBoundsOverSlots:
        return PageBoundsOverSlots(slots, self)


class PageBoundsOverSlots(StepIndex):
    """`PageBounds` for a batch: `bounds` [b, Hk, n, 2, d] of every full page, or the cuboid around its keys.

    A page stays in the window until another is full, so its bounds are not needed before attention.
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
    """Scores by the first `channels` of the keys (None: all), pooled over the group or, if `together`, all heads."""

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
    """`KeyChannels` for a batch."""

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
        """Do nothing: the keys that attention stores are those that are scored."""


@dataclass(frozen=True)
class PartialKeys(Index):
    """Scores by a few columns of the keys (`PartialKeyIndex`), pooled over the query heads of a KV head."""

    pooling: Pooling

    @override
    def scores(self, cache: Any, q: Tensor, candidates: range, softmax: Softmax) -> Tensor:
        scores: Tensor = cache.index.scores(q, candidates, softmax.scale, self.pooling)
        return scores

    @override
    def over_slots(self, slots: BatchSlots) -> PartialKeysOverSlots:
        return PartialKeysOverSlots(slots, self.pooling)


class PartialKeysOverSlots(ScoredIndex):
    """`PartialKeys` for a batch, by `keys` and `basis`."""

    needs_newest = True

    def __init__(self, slots: BatchSlots, pooling: Pooling):
        self.slots, self.pooling = slots, pooling
        self.keys, self.basis = slots.tensors["keys"], slots.tensors["basis"]

    @override
    def scores(self, q: Tensor, softmax: Softmax, heads: Tensor) -> Tensor:
        b, num_kv_heads, tokens, columns = self.keys.shape
        queries = q.new_empty(b, q.shape[1], columns, dtype=torch.float32)
        project_heads(q, self.basis, queries)
        out = q.new_empty(b, num_kv_heads, tokens, dtype=torch.float32)
        token_scores_device(queries, self.keys, *self.scored, Softmax(softmax.scale), self.pooling, out, heads)
        return out

    @override
    def update(self, new: NewToken, host: HostPages | None) -> None:
        project_newest(new.k, self.basis, self.slots.rows.lengths, self.keys)
        if host is not None:
            take_in_filled_page(self.slots.rows, host=host)


Heads = Literal["group", "layer"]
"""The query heads whose attention is averaged: those of a KV head, or those of the layer."""


@dataclass(frozen=True)
class LowestScore(Evict):
    """Evicts the token with the lowest score, the newest in a tie; not the `recent` newest (see `EvictingCache`)."""

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
    """Average the attention weights of query heads, [H, n], for each KV head; return [Hk, n]."""
    if heads == "layer":
        return weights.mean(0).expand(num_kv_heads, -1)
    return weights.view(num_kv_heads, -1, weights.shape[-1]).mean(1)


class LowestScoreOverSlots(Eviction):
    """`LowestScore` for a batch."""

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
        # A row without a token receives -inf and so keeps its score, as do all rows of a sequence that takes no part.
        # The score of a new token starts at zero.
        rows, layout = self.rows, SlotLayout(1, 0, 0, 0)  # all rows that hold a token
        token_scores_device(q, rows.k, rows.lengths, layout, softmax, "mean_s", self.received)
        if self.summed:
            self.scores.add_(self.received.clamp_min_(0))
        else:
            torch.where(self.received >= 0, self.received, self.scores, out=self.scores)


@dataclass(frozen=True)
class StalestPage(Evict):
    """Evicts the page with the oldest timestamp when a new page needs its slot (see `TimestampedPageCache`).

    A page of `size` tokens is stamped when its score exceeds `threshold`. The newest `window` pages never leave.
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
    """`StalestPage` for a batch."""

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
    """Carries out a step of one layer of one sequence."""

    def __init__(self, method: AnyMethod, layer: int, softmax: Softmax):
        self.method, self.layer, self.softmax = method, layer, softmax
        self.plan: StepPlan = method.plan
        self.cache = method.retrieval[layer]
        self.kept: Remembered = method.remembered[layer]
        self.candidates: range = self.cache.candidates if self.plan.index is not None else range(0)
        self.predicted = False

    def attend(self, q: Tensor) -> Tensor:
        """Attend with q [H, d]; the newest token is already appended."""
        plan, cache = self.plan, self.cache
        if plan.turn is not None:
            q = plan.turn.turned(cache, q)
        if plan.index is None or not cache.active:  # everything is attended to
            with self.span("attention"):
                out: Tensor = cache.attend(q, self.softmax)
            if plan.evict is not None:
                with self.span("score"):
                    plan.evict.look_back(cache, q, self.softmax)
            return out
        if plan.correction is not None:
            return self._speculate(plan.correction, q)
        lent, self.kept.lent = self.kept.lent, None
        how = {} if lent is None else {"hidden": True}
        picked, self.kept.ahead = self.kept.ahead or self._choose_and_fetch(q if lent is None else lent, **how), None
        with self.span("attention"):
            return self._attend_to(picked, q)

    def choose_ahead(self, q: Tensor) -> None:
        """Choose and fetch for the next attention with a predicted query, before the newest token arrives."""
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
        kept, cache, how = self.kept, self.cache, speculation_of(self.plan, self.layer, self.softmax)
        if how is not None:
            bounds = cache.summaries.of(self.candidates)  # an `OffloadedPageCache`
            if speculation.suits(q, bounds, cache.resident, cache.kv.numel()):
                return self._speculate_in_loops(how, bounds, q)
        with self.span("correction"):
            corrected = self._corrected(correction, q)  # [Hk] bool
        flags = corrected.tolist()
        count_corrected(self.method, self.layer, flags)
        last, kept.picked = kept.picked, self._choose(q)
        selected = kept.picked.pages  # [Hk, k]
        kept.read = Read(corrected, selected, selected if last is None else last.pages)
        if any(flags):
            self._fetch(selected, heads=None if all(flags) else corrected)
        with self.span("attention"):
            out: Tensor = self.cache.attend(q, self.softmax)
        if not all(flags):  # corrected heads have all of theirs by now
            self._fetch(selected, later=True, hidden=True)
        kept.query = q.clone()
        return out

    def _speculate_in_loops(self, how: SpeculationSettings, bounds: Tensor, q: Tensor) -> Tensor:
        """Speculate likewise on a CPU, where loops correct, score, choose and find what is missing."""
        cache, first = self.cache, self.candidates.start
        with self.span("select"):
            pages = Pages(how, self.kept.query, bounds, first, cache.budget.count(cache.length), cache.resident)
            found = speculation.speculate(q, pages)
        take_speculated(self.method, self.layer, found)
        if found.corrected.any():
            self._bring(found.misses(corrected=True))
        with self.span("attention"):
            out: Tensor = cache.attend(q, self.softmax)
        if not found.corrected.all():
            self._bring(found.misses(corrected=False), later=True)
        return out

    def _bring(self, misses: Misses, later: bool = False) -> None:
        """Bring what the page table names already, and `take_speculated` has counted."""
        with self.span("recall"):
            if len(misses.pages):
                self.cache.bring(misses, later)

    def _corrected(self, correction: Correction, q: Tensor) -> Tensor:
        """Flag the KV heads that must not reuse the last choice: [Hk] bool; all of them at the first retrieval."""
        heads = len(self.cache.resident)
        if self.kept.query is None:
            return q.new_ones(heads).bool()
        return query_similarity(q, self.kept.query, heads, correction.pooling) < correction.below[self.layer]

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
        """Bring the missing ones of `pages` [Hk, k] by the cache's `recall`; `hidden`: attention does not wait."""
        with self.span("recall"):
            misses, moved = self.cache.recall(pages, **how)
        self.method.count_recalled(self.layer, misses, moved, hidden)

    def _attend_to(self, picked: Picked, q: Tensor) -> Tensor:
        pages, tokens, kept = picked
        if kept is None:
            return self.cache.attend_selected(q, pages, self.softmax)  # type: ignore[no-any-return]
        return self.cache.attend_tokens(q, tokens, kept, self.softmax)  # type: ignore[no-any-return]


def count_corrected(method: AnyMethod, layer: int, corrected: list[bool]) -> None:
    """Count a layer's heads [Hk] that were checked and corrected, or that retrieve for the first time."""
    if method.remembered[layer].query is None:
        method.count(layer, Count.FIRST_RETRIEVALS, len(corrected))
        return
    method.count_heads(layer, Count.HEADS_CHECKED, [1] * len(corrected))
    method.count_heads(layer, Count.HEADS_CORRECTED, corrected)


def speculation_of(plan: StepPlan, layer: int, softmax: Softmax) -> SpeculationSettings | None:
    """Return how a layer speculates where the plan leaves that to `kvcli.kernels.speculation`."""
    correction, index = plan.correction, plan.index
    if correction is None or not isinstance(index, PageBounds) or index.pooling == "none" or plan.choose is not None:
        return None
    return SpeculationSettings(correction.below[layer], correction.pooling, index.scale(softmax), index.pooling)


def pages_in_chain(method: AnyMethod, layer: int, softmax: Softmax) -> tuple[Tokens, Pages] | None:
    """Return what the loops of a chain attend to and speculate among at a layer's next step; None if they cannot."""
    how, cache, kept = speculation_of(method.plan, layer, softmax), method.retrieval[layer], method.remembered[layer]
    held = None if how is None else cache.pages_in_chain()
    if how is None or held is None:
        return None
    (tokens, slots, blocks), length = held, cache.length + 1
    candidates, total = cache.budget.candidates(length), cache.budget.count(length)
    bounds = cache.summaries.of(candidates)
    return tokens, Pages(how, kept.query, bounds, candidates.start, total, cache.resident, slots, blocks)


def take_speculated(method: AnyMethod, layer: int, found: Speculated) -> None:
    """Remember and count what loops found for a layer that speculates, and that the missing pages are brought."""
    kept, cache, corrected = method.remembered[layer], method.retrieval[layer], found.corrected.tolist()
    count_corrected(method, layer, corrected)
    before = found.selected if kept.picked is None else kept.picked.pages
    kept.picked, kept.read = Picked(found.selected), Read(found.corrected, found.selected, before)
    kept.query = found.query
    method.count_selected(layer, found.selected, cache.readers)
    for later in (False, True):
        missing = [count * (flag != later) for count, flag in zip(found.missing.tolist(), corrected, strict=True)]
        method.count_recalled(layer, missing, sum(missing) * cache.pool.block_bytes, hidden=later)
