"""A layer whose older tokens lie in host memory by events of differing length (EM-LLM, arXiv 2407.09450).

The KV of an event is what a block is to `BlockCache`, token for token: the pool's pages and the slots are of one token,
so that an event takes up no more than it has. Where events begin is the same in all layers (`Events`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.event_boundaries import surprise, surprising
from kvcli.kernels.topk import topk_pages
from kvcli.kv.blocks import BlockCache, BlockLayout
from kvcli.kv.cache import Tiers
from kvcli.memory.state import Settled
from kvcli.models.geometry import LayerGeometry

if TYPE_CHECKING:
    from kvcli.models.rope import Rotary


class Surprises:
    """How little the last `over` tokens read were expected, against which the next ones are held; up to `judged`."""

    def __init__(self, over: int, gamma: float) -> None:
        self.over, self.gamma = over, gamma
        self.last = torch.zeros(0, dtype=torch.float64)
        self.judged = 0
        self.expected: Tensor | None = None  # [1, vocab] logits of the token at `judged`

    def judge(self, first: int, ids: Sequence[int], logits: Tensor) -> list[int]:
        """Find which of the tokens ids [n] from position `first` on surprise, by the logits [n, vocab] behind each."""
        if self.expected is not None and first == self.judged:
            found = surprise(torch.cat((self.expected, logits[:-1])), ids)
        else:  # the first token of all, or one behind generated tokens, is expected by nothing that is known
            found = torch.cat((logits.new_zeros(1, dtype=torch.float64), surprise(logits[:-1], ids[1:])))
        all_of_them = torch.cat((self.last.to(found.device), found))
        beginnings = surprising(all_of_them, len(ids), self.over, self.gamma).nonzero()[:, 0] + first
        self.last, self.judged, self.expected = all_of_them[-self.over :].clone(), first + len(ids), logits[-1:].clone()
        return beginnings.tolist()


class Events:
    """Where the events of a sequence begin, `first` the first one, each of at least `shortest` tokens.

    `longest` tokens end an event in any case. All tokens before `known` have been looked at.
    """

    def __init__(self, first: int, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.starts = [first]
        self.known = 0

    def look(self, candidates: Iterable[int], known: int, refined: Callable[[int, int], int] | None = None) -> None:
        """Let events begin at `candidates`, ascending, none of them before `known`; these were all up to the new one.

        `refined` moves one back, given the beginning of the event that it ends.
        """
        for candidate in candidates:
            while candidate - self.starts[-1] >= self.longest:
                self.starts.append(self.starts[-1] + self.longest)
            if candidate - self.starts[-1] >= self.shortest:
                self.starts.append(candidate if refined is None else refined(self.starts[-1], candidate))
        self.known = max(self.known, known)

    def end(self, event: int) -> int | None:
        """Where an event ends; None while that is not known."""
        if event + 1 == len(self.starts) and self.starts[event] + self.longest <= self.known:
            self.starts.append(self.starts[event] + self.longest)
        return self.starts[event + 1] if event + 1 < len(self.starts) else None

    def size(self, event: int) -> int:
        """Tokens of an event whose end is known."""
        return self.starts[event + 1] - self.starts[event]

    def similar_and_near(
        self, scores: Tensor, room: int, contiguity: float, queue: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Choose events of `room` tokens: those with the best scores [events], and neighbours of theirs.

        The latter have the part `contiguity` of the room; those that were in it before, the `queue`, come behind.
        """
        beside = int(contiguity * room)
        similar = self._fitting(scores.argsort(descending=True, stable=True).tolist(), room - beside)
        around = [near for event in similar for near in (event + 1, event - 1) if 0 <= near < len(scores)]
        left_out = dict.fromkeys(event for event in (*around, *queue) if event not in set(similar))
        return similar, self._fitting(left_out, beside)

    def _fitting(self, events: Iterable[int], room: int) -> list[int]:
        """The first ones of `events`, as many as have `room`."""
        taken = []
        for event in events:
            room -= self.size(event)
            if room < 0:
                break
            taken.append(event)
        return taken

    def settled(self) -> list[Settled]:
        """A beginning stays."""
        return [Settled(self.starts, 0, len(self.starts))]


class Recalled(NamedTuple):
    """What a recall found missing: `tokens` of each KV head, in so many `events`, and the bytes that it moved."""

    tokens: list[int]
    events: int
    moved: int


class EventCache(BlockCache):
    """In host memory: the tokens of events that have left the local window, counted from the first behind the sinks.

    On the device: near tokens, which are the local window, the rest of the event that reaches into it, and new ones;
    sinks; `keys` [events, Hk, d], one for each event; slots of single tokens. `layout` has pages of one token.

    In prefill the local window advances before new tokens come, by what is known of events until then; of a token
    that is generated nothing is looked at.
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
        self.closed = 0  # events that have left
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
        """First tokens that stand among the far ones."""
        return min(self.first, self.budget.sink)

    @property
    def near(self) -> int:
        """Tokens that stand among the near ones."""
        return self.length - self.first

    def plain_keys(self, first: int) -> Tensor:
        """Un-rotated keys [Hk, n, d] of the near tokens from position `first` on."""
        return self.unrotate(self.k[:, first - self.first : self.near], first)

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        """Store a prompt of which nothing else is known, so that all events are of the greatest length."""
        self.events.look((), k.shape[1])
        return super().load(k, v)

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        self.events.look((), self.length + 1)
        return super().append(k, v)

    @override
    def advance(self) -> int:
        """Offload the events that have left the local window; returns the bytes written to the host."""
        stop = self.length - self.budget.window
        if stop < self.budget.sink:
            return 0
        before = self.closed
        while (end := self.events.end(self.closed)) is not None and end <= stop:
            self.closed += 1
        return self._leave(self.events.starts[self.closed], range(before, self.closed))

    def recall_events(self, events: Sequence[int]) -> Recalled:
        """Bring the tokens of `events`, ascending, to the device and attend to these from now on."""
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
