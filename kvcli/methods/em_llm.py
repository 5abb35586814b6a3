"""EM-LLM: events of the past, bounded by surprise, recalled with their neighbours (arXiv 2407.09450, section 3).

The prompt is read window by window, as by InfLLM, but what leaves the local window falls into events of differing
length. A token that the model expected least, by more than `gamma` standard deviations above the mean over the `window`
tokens before it, begins one. Its beginning is moved back to where the graph of the tokens' keys splits best, for events
to be alike within and unlike each other (algorithm 1). Each window, and later each generated token, attends to the
sinks, to near tokens, and to two buffers of events: those most similar to its mean query, and, last in first out of a
queue, the neighbours of events that were recalled so.

All layers have the same events. `refine_layers` of them, the last ones, make the graph: inner products of un-rotated
keys, summed over heads and layers, of the event that ends and of half as many tokens on either side. Representatives,
positions and what is scored are InfLLM's.

Surprise takes the logits of every token of the prompt, so that the model's head runs over all of them. Those of
generated tokens are not looked at, as in the reference code: their events have `max_event` tokens.

Decided: buffers have their size in tokens, as in the reference code, and the first event that does not fit ends one;
an event that is not whole yet counts as near. Surprise is compared with that of the tokens just before it, where the
code takes one threshold a window. Exact while the context fits into the budget, with original positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.event_boundaries import refined
from kvcli.kernels.softmax import Softmax
from kvcli.kv.blocks import BlockLayout, BlockStats, PhaseStats, Positions, dot_scores, summarise
from kvcli.kv.pages import PageBudget
from kvcli.methods.base import Method, SequenceContext
from kvcli.methods.config import CountOrShare, HostKVConfig, TokenConfig, setting
from kvcli.models.geometry import LayerGeometry
from kvcli.store.events import EventCache, Events, Surprises
from kvcli.telemetry.counters import Count


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
        """Most tokens of an event: room is left to recall two beside one that is not whole yet."""
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
    """Surprise finds events, their keys' graph refines them; similar ones and their neighbours are recalled."""

    Config = EMLLMConfig
    title = "events bounded by surprise, similar ones and neighbours, in prefill too"
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
        """Keep near tokens, sinks, event keys and a budget of tokens on the device, the rest in host memory."""
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
        """Let events go that the window before has completed, choose for the whole window, attend."""
        self.count(layer, Count.BYTES_TO_HOST, cache.advance())
        room = self.config.budget - cache.sinks - cache.near
        cache.extend(k, v)
        self._recall(layer, cache, q, room, self.usage[layer].prefill)
        with self.span("attention", layer):
            return cache.attend_newest(q, softmax)

    def retrieve(self, layer: int, cache: EventCache, q: Tensor, softmax: Softmax) -> Tensor:
        """Choose events for this token and attend."""
        room = self.config.budget - cache.sinks - cache.near
        self._recall(layer, cache, q[:, None], room, self.usage[layer].decode)
        with self.span("attention", layer):
            return cache.attend(q, softmax)

    @override
    def take_logits(self, first: int, ids: Sequence[int], logits: Tensor) -> None:
        """Find where events begin among the tokens of a window."""
        begins = self.surprises.judge(first, ids, logits)
        if self.retrieval:
            self.events.look(begins, self.surprises.judged, self._refined())

    @override
    def statistics(self) -> dict[str, Any]:
        """How long events are, and what was retrieved."""
        closed = next((cache.closed for cache in self.retrieval.values()), 0)
        tokens = self.events.starts[closed] - self.events.starts[0]
        return {"events": closed, "event_tokens": tokens / closed if closed else None, **summarise(self.usage)}

    def _refined(self) -> Callable[[int, int], int] | None:
        """Say what moves a beginning back, by the graph of the tokens from before the newest event on."""
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
        """Bring the events that queries q [H, n, d] of the newest tokens ask for, of `room` tokens together."""
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
