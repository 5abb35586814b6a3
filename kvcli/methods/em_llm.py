"""EM-LLM: events of the past, bounded by surprise, recalled with their neighbours (arXiv 2407.09450, section 3).

The prompt is read window by window, as by InfLLM, but tokens that leave the local window form events of differing
length. An event begins at a token whose surprise exceeds the mean over the `window` tokens before it by more than
`gamma` standard deviations. The boundary is then moved back to where the graph of the tokens' keys splits best, so that
events are similar within and dissimilar between (algorithm 1). Each window, and later each generated token, attends to
the sinks, to near tokens, and to two buffers of events: those most similar to its mean query, and, in a queue, the
neighbours of events that were recalled in this way, the newest first.

All layers have the same events. The last `refine_layers` of them make the graph: inner products of un-rotated keys,
summed over heads and layers, of the event that ends and of half as many tokens on either side. Representatives,
positions and what is scored are those of InfLLM.

Surprise needs the logits of every token of the prompt, so the model's head runs over all of them. Logits of generated
tokens are not used, as in the reference code: their events have `max_event` tokens.

Decided: buffers have their size in tokens, as in the reference code, and are filled until the first event that does not
fit; an event that is not complete yet counts as near. Surprise is compared with that of the tokens just before it,
where the code takes one threshold per window. Exact while the context fits into the budget, with original positions.

Boundaries are drawn as follows:

    surprise_t = -log p(x_t | x_1 .. x_{t-1})                             boundary where
    surprise_t > mu + gamma * sigma                                       over the tokens before t

    modularity(t)  = 1 / 4m  sum_ij [A_ij - d_i d_j / 2m] delta_ij        2m = sum_ij A_ij, d_i = sum_j A_ij
    conductance(t) = cut(S, V - S) / min(vol(S), vol(V - S))              vol(S) = sum over i, j in S of A_ij

S is the set of tokens before t, V the whole graph; delta_ij is 1 where i and j are on the same side of t. A good split
has high modularity and low conductance.

The KV of an event is stored in `BlockCache` token for token: the pool's pages and the slots hold one token, so that an
event takes up no more room than it has tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn.functional import cross_entropy
from typing_extensions import override

from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import topk_pages
from kvcli.kv.blocks import BlockCache, BlockLayout, BlockStats, PhaseStats, Positions, dot_scores, summarise
from kvcli.kv.cache import Tiers
from kvcli.kv.pages import PageBudget
from kvcli.memory.state import Settled
from kvcli.methods.config import CountOrShare, HostKVConfig, TokenConfig, setting
from kvcli.methods.contract import Method, SequenceContext
from kvcli.models.geometry import LayerGeometry
from kvcli.telemetry.counters import Count

if TYPE_CHECKING:
    from kvcli.models.rope import Rotary


Metric = Literal["modularity", "conductance"]

_ROWS_AT_ONCE = 64  # rows of logits held in fp32


def surprise(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the surprise, -log p in nats, of each token ids [n] under its logits [n, vocab]: [n] in fp64."""
    tokens = torch.tensor(list(ids), dtype=torch.int64, device=logits.device)
    parts = zip(*(torch.split(each, _ROWS_AT_ONCE) for each in (logits, tokens)), strict=True)
    found = [cross_entropy(rows.float(), expected, reduction="none") for rows, expected in parts]
    return torch.cat(found).double()


def surprising(surprises: Tensor, new: int, over: int, gamma: float) -> Tensor:
    """Flag those of the last `new` surprises [n] that exceed mu + gamma * sigma of the `over` before: bool [new].

    Fewer are used where there are fewer. Nothing is flagged with fewer than two, because sigma divides by their number
    less one.
    """
    padded = torch.nn.functional.pad(surprises, (1, 0))
    sums, squares = padded.cumsum(0), padded.square().cumsum(0)
    at = torch.arange(len(surprises) - new, len(surprises), device=surprises.device)
    start = (at - over).clamp(min=0)
    count = at - start
    mean = (sums[at] - sums[start]) / count
    variance = (squares[at] - squares[start] - count * mean.square()).clamp(min=0) / (count - 1)
    return (count > 1) & (surprises[at] > mean + gamma * variance.sqrt())


def split_scores(similarity: Tensor, metric: Metric) -> Tensor:
    """Rate the splits of a graph of n tokens, similarity [n, n] symmetric, before token 1 .. n - 1: [n - 1].

    More is better: modularity, or conductance with its sign flipped. Scores are linear in the entries of the graph.
    """
    total, by_token = similarity.sum(), similarity.sum(0).cumsum(0)[:-1]
    before = similarity.cumsum(0).cumsum(1).diagonal()[:-1]  # within the tokens before the split
    cut = by_token - before
    behind = total - by_token - cut
    if metric == "conductance":
        return -cut / torch.minimum(before, behind)
    expected = (by_token.square() + (total - by_token).square()) / total
    return (before + behind - expected) / (2 * total)


def refined(similarity: Tensor, metric: Metric, first: int, shortest: int, start: int, boundary: int) -> int:
    """Move a boundary back to the best end of its event, which begins at `start` and keeps `shortest` tokens.

    The graph, similarity [n, n], begins with the token at position `first`. Only the event and half as many tokens on
    either side of it are used, as far as they are in the graph.
    """
    half = (boundary - start) // 2
    begin, end = max(first, start - half), min(first + len(similarity), boundary + half)
    part = similarity[begin - first : end - first, begin - first : end - first]
    choices = range(start + shortest, min(boundary, end - 1) + 1)
    if not choices:
        return boundary
    scores = split_scores(part, metric)[choices.start - begin - 1 : choices.stop - begin - 1]
    return choices[int(scores.argmax())]


class Surprises:
    """Surprises of the last `over` tokens read, against which the next are compared; `judged` is the next position."""

    def __init__(self, over: int, gamma: float) -> None:
        self.over, self.gamma = over, gamma
        self.last = torch.zeros(0, dtype=torch.float64)
        self.judged = 0
        self.expected: Tensor | None = None  # [1, vocab] logits of the token at `judged`

    def judge(self, first: int, ids: Sequence[int], logits: Tensor) -> list[int]:
        """Return the positions of surprising tokens among ids [n] from position `first` on.

        logits [n, vocab] are those after each of the tokens.
        """
        if self.expected is not None and first == self.judged:
            found = surprise(torch.cat((self.expected, logits[:-1])), ids)
        else:  # the very first token, or one after generated tokens, has no known logits
            found = torch.cat((logits.new_zeros(1, dtype=torch.float64), surprise(logits[:-1], ids[1:])))
        all_of_them = torch.cat((self.last.to(found.device), found))
        beginnings = surprising(all_of_them, len(ids), self.over, self.gamma).nonzero()[:, 0] + first
        self.last, self.judged, self.expected = all_of_them[-self.over :].clone(), first + len(ids), logits[-1:].clone()
        return beginnings.tolist()


class Events:
    """The boundaries of a sequence's events: `starts` of events that have at least `shortest` tokens.

    An event ends after `longest` tokens in any case. All tokens before `known` have been examined.
    """

    def __init__(self, first: int, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.starts = [first]
        self.known = 0

    def look(self, candidates: Iterable[int], known: int, refined: Callable[[int, int], int] | None = None) -> None:
        """Start events at `candidates`, which are ascending; afterwards all tokens before `known` are examined.

        `refined` moves a boundary back, given the start of the event that it ends.
        """
        for candidate in candidates:
            while candidate - self.starts[-1] >= self.longest:
                self.starts.append(self.starts[-1] + self.longest)
            if candidate - self.starts[-1] >= self.shortest:
                self.starts.append(candidate if refined is None else refined(self.starts[-1], candidate))
        self.known = max(self.known, known)

    def end(self, event: int) -> int | None:
        """Return where an event ends; None while that is unknown."""
        if event + 1 == len(self.starts) and self.starts[event] + self.longest <= self.known:
            self.starts.append(self.starts[event] + self.longest)
        return self.starts[event + 1] if event + 1 < len(self.starts) else None

    def size(self, event: int) -> int:
        """Return the number of tokens of an event whose end is known."""
        return self.starts[event + 1] - self.starts[event]

    def similar_and_near(
        self, scores: Tensor, room: int, contiguity: float, queue: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Select events of `room` tokens: those with the best scores [events], and their neighbours.

        Neighbours get the part `contiguity` of the room; the previous neighbours, in `queue`, come after the new ones.
        """
        beside = int(contiguity * room)
        similar = self._fitting(scores.argsort(descending=True, stable=True).tolist(), room - beside)
        around = [near for event in similar for near in (event + 1, event - 1) if 0 <= near < len(scores)]
        left_out = dict.fromkeys(event for event in (*around, *queue) if event not in set(similar))
        return similar, self._fitting(left_out, beside)

    def _fitting(self, events: Iterable[int], room: int) -> list[int]:
        """Return the longest prefix of `events` that fits into `room` tokens."""
        taken = []
        for event in events:
            room -= self.size(event)
            if room < 0:
                break
            taken.append(event)
        return taken

    def settled(self) -> list[Settled]:
        """Return the starts, which do not change."""
        return [Settled(self.starts, 0, len(self.starts))]


class Recalled(NamedTuple):
    """The result of a recall: missing `tokens` per KV head, the `events` they belong to, and the bytes moved."""

    tokens: list[int]
    events: int
    moved: int


class EventCache(BlockCache):
    """A block cache whose host memory holds the tokens of events that have left the local window, sinks excluded.

    The device holds the near tokens (the local window, the rest of the event that reaches into it, and new tokens), the
    sinks, `keys` [events, Hk, d], one per event, and slots of single tokens. `layout` has pages of one token.

    In prefill the local window advances before new tokens come, by the events known until then; generated tokens are
    not examined.
    """

    def __init__(
        self,
        layer: LayerGeometry,
        capacity: int,
        layout: BlockLayout,
        rotary: Rotary | None,
        tiers: Tiers,
        events: Events,
    ) -> None:
        self.events = events
        self.closed = 0  # events that have left the local window
        super().__init__(layer, capacity, layout, rotary, tiers)

    @override
    def most_blocks(self, pages: int) -> int:
        return pages // self.events.shortest

    @override
    def most_near(self) -> int:
        return super().most_near() + max(self.events.longest, self.budget.sink)

    @property
    @override
    def num_blocks(self) -> int:
        return self.closed

    @property
    def sinks(self) -> int:
        """Sink tokens that are stored apart from the near ones."""
        return min(self.first, self.budget.sink)

    @property
    def near(self) -> int:
        """Number of near tokens."""
        return self.length - self.first

    def plain_keys(self, first: int) -> Tensor:
        """Return un-rotated keys [Hk, n, d] of the near tokens from position `first` on."""
        return self.unrotate(self.k[:, first - self.first : self.near], first)

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        """Store a prompt without known surprises, so that all events have the greatest length."""
        self.events.look((), k.shape[1])
        return super().load(k, v)

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        self.events.look((), self.length + 1)
        return super().append(k, v)

    @override
    def advance(self) -> int:
        """Offload the events that have left the local window; return the bytes written to the host."""
        stop = self.length - self.budget.window
        if stop < self.budget.sink:
            return 0
        before = self.closed
        while (end := self.events.end(self.closed)) is not None and end <= stop:
            self.closed += 1
        return self._leave(self.events.starts[self.closed], range(before, self.closed))

    def recall_events(self, events: Sequence[int]) -> Recalled:
        """Bring the tokens of `events`, ascending, to the device; attention reads them from now on."""
        device = self.resident.device
        starts, sizes = (
            torch.tensor(values, dtype=torch.int64, device=device)
            for values in ([self.events.starts[at] for at in events], [self.events.size(at) for at in events])
        )
        behind = starts - self.budget.sink - (sizes.cumsum(0) - sizes)
        count = sum(map(self.events.size, events))
        tokens = torch.arange(count, device=device) + behind.repeat_interleave(sizes)
        of_event = torch.arange(len(events), device=device).repeat_interleave(sizes)
        absent = self.bring(tokens)
        misses, moved = [len(absent)] * self.slots.shape[1], len(absent) * self.pool.page_bytes
        return Recalled(misses, len(torch.unique(of_event[absent])), moved)

    @override
    def _represent(self, blocks: range, first: int, k: Tensor, mass: Tensor) -> None:
        starts = torch.tensor([self.events.starts[at] for at in (*blocks, blocks.stop)], device=k.device) - first
        within = torch.arange(self.events.longest, device=k.device)
        tokens = starts[:-1, None] + within  # [events, longest]
        masses = mass[tokens.clamp(max=len(mass) - 1)].masked_fill(tokens >= starts[1:, None], float("-inf"))
        best = tokens.gather(1, topk_pages(masses, self.layout.representatives))  # [events, r]
        self.keys[blocks.start : blocks.stop] = k.transpose(0, 1)[best].mean(1)


class EMLLMConfig(HostKVConfig, TokenConfig):
    """Settings of EM-LLM; defaults are those for Llama 3."""

    budget: CountOrShare = setting(8320, "tokens attended per layer and KV head, all included", "tokens", ge=1)
    sink: int = setting(128, "first tokens, always attended", "tokens", ge=0)
    window: int = setting(
        4096, "most recent tokens, always attended; surprise is compared over as many", "tokens", ge=1
    )
    dense_layers: int = setting(0, "leading layers that attend to everything", "layers", ge=0)
    prefill_window: int = setting(512, "tokens of the prompt read at once", "tokens", ge=1)
    gamma: float = setting(1.0, "standard deviations above the mean from which on surprise begins an event", ge=0)
    refine: Literal["modularity", "conductance", "none"] = setting(
        "modularity", "what beginnings are moved back by: modularity, conductance, or none"
    )
    refine_layers: float = setting(0.375, "part of the layers, the last ones, whose keys make the graph", gt=0, le=1)
    min_event: int = setting(8, "fewest tokens of an event", "tokens", ge=1)
    max_event: int = setting(128, "most tokens of an event; a third of what is left to recall, at most", "tokens", ge=1)
    representatives: int = setting(4, "most attended tokens of an event whose mean key represents it", "tokens", ge=1)
    contiguity: float = setting(0.3, "part of the recalled tokens that are neighbours of similar events", ge=0, le=0.5)
    positions: Positions = setting("capped", "distance of what is not near: capped (window - 1) or original")

    @property
    def pages(self) -> PageBudget:
        """The budget in pages of one token."""
        return PageBudget.of(budget=self.budget, sink=self.sink, window=self.window, page_size=1)

    @property
    def longest(self) -> int:
        """Most tokens of an event; leaves room to recall two next to one that is not complete yet."""
        return max(1, min(self.max_event, self.pages.selected // 3))

    @property
    def shortest(self) -> int:
        """Fewest tokens of an event."""
        return min(self.min_event, self.longest)

    @model_validator(mode="after")
    def _events_represent_themselves(self) -> EMLLMConfig:
        if self.min_event > self.max_event:
            raise ValueError(f"min_event {self.min_event} is more than max_event {self.max_event}")
        if self.representatives > self.min_event:
            raise ValueError(f"representatives {self.representatives} are more than min_event {self.min_event}")
        return self


class EMLLM(Method[EMLLMConfig, EventCache]):
    """Finds events by surprise, refines them by their keys' graph, recalls similar ones and their neighbours."""

    Config = EMLLMConfig
    title = "events (split at surprising tokens) and their neighbours; in prefill too"
    paper = "arXiv 2407.09450"
    long_generation = True
    offloads = True
    group_consistent = True
    device_memory = "O(B + L/p)"
    budget_is_bound = True
    no_latents = "it keeps keys without their rotation apart from values, and a latent is both"
    exact: ClassVar[dict[str, Any]] = {"positions": "original"}
    true_kv: ClassVar[dict[str, Any] | None] = exact
    ablation: ClassVar[dict[str, dict[str, Any]]] = {
        "surprise": {"refine": "none", "contiguity": 0.0},  # EM-LLM S of the tables
        "surprise, refined": {"contiguity": 0.0},  # SM
        "surprise, neighbours": {"refine": "none"},  # S+C
        "by conductance": {"refine": "conductance"},
    }

    def __init__(self, config: EMLLMConfig, layers: Sequence[LayerGeometry], context: SequenceContext):
        self.events = Events(config.sink, config.shortest, config.longest)  # before the caches, which share it
        super().__init__(config, layers, context)
        self.usage = {layer: PhaseStats() for layer in self.retrieval}
        self.queue: dict[int, list[int]] = {layer: [] for layer in self.retrieval}  # neighbours, the newest first
        self.surprises = Surprises(config.window, config.gamma)

    def new_cache(self, layer: LayerGeometry) -> EventCache:
        """Make a cache with near tokens, sinks, event keys and some tokens on the device, the rest in host memory."""
        config, context = self.config, self.context
        representatives = min(config.representatives, config.shortest)
        layout = BlockLayout(
            config.pages, config.pages.selected, config.prefill_window, representatives, config.positions
        )
        rotary, tiers = context.rotary[layer.index], config.tiers(context.tiers)
        return EventCache(layer, context.capacity, layout, rotary, tiers, self.events)

    @property
    @override
    def prefill_window(self) -> int:
        return self.config.prefill_window

    def retrieve_window(
        self, layer: int, cache: EventCache, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
    ) -> Tensor:
        """Offload events that the previous window has completed, select for the whole window, attend."""
        self.count(layer, Count.BYTES_TO_HOST, cache.advance())
        room = self.config.budget - cache.sinks - cache.near
        cache.extend(k, v)
        self._recall(layer, cache, q, room, self.usage[layer].prefill)
        with self.span("attention", layer):
            return cache.attend_newest(q, softmax)

    def retrieve(self, layer: int, cache: EventCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Select events for this token and attend."""
        room = self.config.budget - cache.sinks - cache.near
        self._recall(layer, cache, q[:, None], room, self.usage[layer].decode)
        with self.span("attention", layer):
            return cache.attend(q, softmax)

    @override
    def take_logits(self, first: int, ids: Sequence[int], logits: Tensor) -> None:
        """Find the events that begin in a window."""
        begins = self.surprises.judge(first, ids, logits)
        if self.retrieval:
            self.events.look(begins, self.surprises.judged, self._refined())

    @override
    def statistics(self) -> dict[str, Any]:
        """Return the length of events, and what was retrieved."""
        closed = next((cache.closed for cache in self.retrieval.values()), 0)
        tokens = self.events.starts[closed] - self.events.starts[0]
        return {"events": closed, "event_tokens": tokens / closed if closed else None, **summarise(self.usage)}

    def _refined(self) -> Callable[[int, int], int] | None:
        """Make the function that moves a boundary back, from the graph of tokens since before the newest event."""
        metric = self.config.refine
        if metric == "none":
            return None
        caches = list(self.retrieval.values())
        caches = caches[-max(1, round(self.config.refine_layers * len(caches))) :]
        first = max(caches[0].first, self.events.starts[-1] - self.config.longest)
        keys = (cache.plain_keys(first).float().transpose(0, 1).flatten(1) for cache in caches)  # [n, Hk * d]
        graph = torch.stack([k @ k.T for k in keys]).sum(0).double().cpu()
        return partial(refined, graph, metric, first, self.config.shortest)

    def _recall(self, layer: int, cache: EventCache, q: Tensor, room: int, usage: BlockStats) -> None:
        """Bring the events that queries q [H, n, d] of the newest tokens select, at most `room` tokens in total."""
        count = cache.num_blocks
        if cache.events.starts[count] - self.config.sink <= room:
            chosen = list(range(count))
        else:
            with self.span("score", layer):
                probe = cache.unrotate(q, cache.length - q.shape[1]).mean(1)
                scores = dot_scores(probe, cache.block_keys)
            with self.span("select", layer):
                similar, self.queue[layer] = self.events.similar_and_near(
                    scores, room, self.config.contiguity, self.queue[layer]
                )
                chosen = sorted(similar + self.queue[layer])
        with self.span("recall", layer):
            recalled = cache.recall_events(chosen)
        if len(chosen) == count and not recalled.events:
            return
        heads = len(recalled.tokens)
        self.count_heads(layer, Count.PAGES_REQUESTED, [sum(map(self.events.size, chosen))] * heads)
        self.count_recalled(layer, recalled.tokens, recalled.moved)
        mean = float(scores[chosen].mean()) if len(chosen) < count and chosen else 0.0
        usage.add(len(chosen), recalled.events, recalled.moved, mean)
