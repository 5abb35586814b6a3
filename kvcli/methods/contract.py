"""The contract of a method: one cache per layer, and what each step attends to.

A method object serves one sequence. The loop calls `prefill` once per layer with the prompt's KV, then `attend` once
per layer and token. Sliding-window layers and the leading dense layers need no retrieval and are handled here; a method
makes the cache of its other layers (`new_cache`) and attends in them (`retrieve`).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor

from kvcli.errors import usage_error
from kvcli.kernels.narrow_attention import ChainTokens
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.speculation import Pages, Speculated
from kvcli.kv.cache import DenseCache, LayerCache, Tiers
from kvcli.kv.pages import distinct
from kvcli.kv.parking import Parking, Waits
from kvcli.kv.recurrent import RecurrentState
from kvcli.kv.sliding import SlidingCache, windowed_cache
from kvcli.memory.state import branched
from kvcli.memory.tiers import Footprint, Traffic
from kvcli.methods.config import MethodConfig
from kvcli.methods.step import Phases, Remembered, StepPlan, pages_in_chain, take_speculated
from kvcli.models.devices import Placement
from kvcli.models.geometry import LayerGeometry, StateGeometry
from kvcli.telemetry.counters import Count, Counters
from kvcli.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from kvcli.models.rope import Rotary


class AttentionObserver(Protocol):
    """A callback that sees every attention of a method."""

    def __call__(self, method: AnyMethod, layer: int, q: Tensor, out: Tensor, softmax: Softmax) -> None:
        """Receive a layer's query q [H, d] and attention output out [H, d]; it must neither change nor keep them."""


@dataclass
class SequenceContext:
    """Everything a method object is given: room for `capacity` tokens, memory tiers, counters, timeline, and RoPE.

    Where layers lie on several devices, `tiers` belong to the layer whose cache is being made, otherwise to the first.
    """

    stateless: ClassVar[bool] = True
    capacity: int
    tiers: Tiers
    counters: Counters
    timeline: Timeline
    rotary: Sequence[Rotary | None]
    track: str = "sequence 0"
    question: Sequence[int] = ()  # token ids of the question after the document, where the prompt has one
    prompt_tokens: int | None = None  # tokens of `capacity` that are the prompt's, where known; the rest is generated
    document_tokens: int | None = None  # prompt tokens before the question, once the prompt is read; None: all
    prepared: Mapping[str, Any] | None = None
    """Results of `Method.needs`, by name; None while memory is planned and nothing is known of the model."""
    states: Sequence[StateGeometry] = ()  # of the layers that keep a recurrent state
    placement: Placement | None = None  # of the layers, where they lie on several devices
    parking: Parking | None = None  # holds the layers' device tensors in host memory while a long prompt is read
    attention_observer: AttentionObserver | None = None  # called after every `Method.attend`
    prefill_statistics: Mapping[str, Any] | None = None  # what a sparse prefill left out

    @classmethod
    def of(
        cls,
        num_layers: int,
        device: torch.device,
        dtype: torch.dtype,
        capacity: int,
        rotary: Sequence[Rotary | None] | None = None,
        timeline: Timeline | None = None,
        **known: Any,
    ) -> SequenceContext:
        """Make the context of a sequence of `capacity` tokens; `known` sets further fields.

        On the meta device nothing is allocated: that is how memory is planned.
        """
        return cls(
            capacity=capacity,
            tiers=Tiers.for_device(device, dtype),
            counters=Counters(num_layers),
            timeline=timeline or Timeline(),
            rotary=rotary or [None] * num_layers,
            **known,
        )

    def device(self, layer: int) -> torch.device:
        """Return the device of a layer, numbered among the layers that attend."""
        return self.tiers.device if self.placement is None else self.placement.attending[layer]

    @property
    def keeping(self) -> Sequence[torch.device]:
        """The devices of the layers that keep a recurrent state."""
        return [self.tiers.device] * len(self.states) if self.placement is None else self.placement.keeping

    def placed(self, held: Footprint, device: torch.device) -> Footprint:
        """Assign the footprint `held` to `device`, where there are several."""
        if self.placement is None:
            return held
        devices = self.placement.devices
        return held.on(devices.index(device), len(devices))


def tiers_for(layers: Sequence[LayerGeometry], tiers: Tiers, name: str, refused: str | None) -> Tiers:
    """Return `tiers` with the number of parts (K and V, or one latent) that these layers keep per token.

    `refused` says why method `name` keeps no latents; None means that it can.

    Raises:
        KvcliError: the layers have latents, which the method cannot keep (usage).
    """
    if layers[0].parts == tiers.parts:
        return tiers
    if refused is not None:
        raise usage_error(f"{name} keeps no latents: {refused}", "use another method, such as freekv")
    return replace(tiers, parts=layers[0].parts)


def tiers_of_layer(method: AnyMethod, layers: Sequence[LayerGeometry], dense: int, tiers: Tiers) -> Tiers:
    """Return the memory tiers of one layer, with an equal share of the disk for each retrieval layer.

    Raises:
        KvcliError: the layers have latents, which the method cannot keep (usage).
    """
    tiers = tiers_for(layers, tiers, type(method).__name__, method.no_latents)
    if tiers.disk is None:
        return tiers
    retrieving = sum(layer.window is None and layer.index >= dense for layer in layers)
    return replace(tiers, disk=tiers.disk.divided(retrieving))


def refuse_selection(method: type[AnyMethod], config: MethodConfig, layers: Sequence[LayerGeometry]) -> None:
    """Refuse a method that selects where the model does so itself, and a prompt read sparsely there.

    Raises:
        KvcliError: the method does not take the model's selection (usage).
    """
    selects = next((layer.selects for layer in layers if layer.selects is not None), None)
    if selects is None:
        return
    model = f"this model's layers select by themselves, the {selects.name}"
    if not method.takes_selection:
        hint = "use native, with KV in host memory, or full, with everything on the device"
        raise usage_error(f"{method.__name__} cannot be used: {model}", hint)
    if config.prefill != "exact":
        raise usage_error(f"prefill {config.prefill} cannot be used: {model}", "leave it at exact")


def count_disk(context: SequenceContext, layer: int, cache: LayerCache) -> None:
    """Count the disk traffic of a layer's cache since the last call, and show its waits on their own timeline row."""
    if cache.disk is None:
        return
    tally, add = cache.disk.tally.taken(), context.counters.add
    add(layer, Count.HOST_HITS, tally.hits)
    add(layer, Count.DISK_READS, tally.misses)
    add(layer, Count.BYTES_FROM_DISK, tally.read)
    add(layer, Count.BYTES_TO_DISK, tally.written)
    add(layer, Count.DISK_WAIT_US, tally.waited // 1000)
    for begun, ended, size in tally.waits:
        context.timeline.add("disk", f"{context.track}, disk", begun, ended, layer=layer, bytes=size)


class PromptParts:
    """Methods for a prompt that arrives in parts."""

    caches: list[LayerCache]
    context: SequenceContext

    def take_part(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store what can leave the device of the first tokens' k, v [Hk, m, d]; `prefill` later brings all of them."""
        self.open(layer)
        if k.shape[1] >= self.caches[layer].first_part:
            self.context.counters.add(layer, Count.BYTES_TO_HOST, self.caches[layer].take(k, v))

    def lend(self, layer: int, length: int) -> Tensor | None:
        """Return rows [t, Hk, length, d] to collect a layer's KV in, so that `prefill` need not copy it there."""
        self.open(layer)
        return self.caches[layer].lend(length)

    @property
    def repeated(self) -> Sequence[slice]:
        """Parts of the document that the model is to repeat after it, seen by `observe_repeated`."""
        return ()

    def observe_repeated(self, layer: int, part: slice, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Observe, in pieces and before `prefill`, how a layer reads a part of the document that it is asked to repeat.

        q [H, n, d] are the next queries of the repetition, k [Hk, m, d] all keys up to them: the document's, followed
        by those of the request and the repetition. The caller reuses the tensors afterwards.
        """

    @property
    def waiting(self) -> Sequence[Waits]:
        """State that can wait in host memory while other layers are read; only where KV goes to host memory anyway."""
        offloads = getattr(self, "offloads", False) or getattr(getattr(self, "config", None), "offload", False)
        return self.caches if offloads else ()

    def wait(self, made: Waits, keeps: bool = True) -> None:
        """Let `made` wait in host memory if the prompt is long enough; without `keeps` its contents are not stored."""
        if self.context.parking is not None and any(each is made for each in self.waiting):
            self.context.parking.enter(made, keeps)

    def open(self, layer: int) -> None:
        """Bring a layer's state back to the device."""
        if self.context.parking is not None:
            self.context.parking.open(self.caches[layer])

    def close(self, layer: int) -> None:
        """Let a layer's state wait again after `prefill`; lent rows must no longer be read."""
        if self.context.parking is not None:
            self.context.parking.close(self.caches[layer])

    def be_present(self) -> None:
        """Bring everything back to the device and keep it there."""
        if self.context.parking is not None:
            self.context.parking.leave()
            self.context.parking = None


def last_used_here(*tensors: Tensor) -> None:
    """Keep the memory of `tensors` from being reused until the stream that stores the prompt is done with them.

    Use it for tensors that are made in `observe` and released in `prefill`.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


WindowCacheT = TypeVar("WindowCacheT", bound=LayerCache, contravariant=True)


class PromptWindows:
    """Methods for a prompt that is read in windows, each through all layers before the next."""

    @property
    def prefill_window(self) -> int | None:
        """Tokens per window where the prompt is read by `attend_window`; None: the prompt is read by `prefill`."""
        return None

    @property
    def preview(self) -> Sequence[int]:
        """Token ids that the method wants to see, read alone, before the prompt is read in windows."""
        return ()

    def take_preview(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> None:
        """Receive a layer's queries q [H, 1 + n, d], keys and values k, v [Hk, 1 + n, d] of the preview.

        Index 0 is the prompt's first token, at position 0. Of a long preview only the last n tokens are given.
        """

    @property
    def wants_logits(self) -> bool:
        """Whether `take_logits` wants the logits of every prompt token."""
        return type(self).take_logits is not PromptWindows.take_logits

    def take_logits(self, first: int, ids: Sequence[int], logits: Tensor) -> None:
        """Receive a window that all layers have read: tokens `ids` [n] from position `first`, and logits [n, vocab]."""


@runtime_checkable
class AttendsWindows(Protocol[WindowCacheT]):
    """A method that attends with several prompt tokens at once."""

    def retrieve_window(
        self, layer: int, cache: WindowCacheT, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
    ) -> Tensor:
        """Implement `Method.attend_window` for a layer of `Method.new_cache`."""


def attend_window(method: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Attend to a window in a layer of `Method.new_cache`, and count its disk traffic."""
    cache, context = method.retrieval[layer], method.context
    assert isinstance(method, AttendsWindows), f"{type(method).__name__} has no retrieve_window"
    out = method.retrieve_window(layer, cache, q, k, v, softmax)
    count_disk(context, layer, cache)
    return out


ConfigT = TypeVar("ConfigT", bound=MethodConfig)
CacheT = TypeVar("CacheT", bound=LayerCache)


class Method(PromptParts, PromptWindows, ABC, Generic[ConfigT, CacheT]):
    """One method serving one sequence."""

    not_state: ClassVar[tuple[str, ...]] = ("plan",)
    Config: ClassVar[type[MethodConfig]]
    title: ClassVar[str]
    """Short description of what a step attends to; this and the next five are literals (`kvcli.methods.card` reads
    them)."""
    paper: ClassVar[str]
    long_generation: ClassVar[bool]
    """Whether generated tokens are treated like prompt tokens, however many there are; with default settings."""
    offloads: ClassVar[bool]
    """Whether KV lies in host memory; with default settings."""
    group_consistent: ClassVar[bool]
    """Whether, as published, all query heads of a KV head read the same KV; otherwise pooling over them enforces it."""
    device_memory: ClassVar[str]
    """Device memory for KV, in tokens, of a retrieval layer: O(...) in `card.MEMORY_SYMBOLS`."""
    exact: ClassVar[dict[str, Any]] = {}
    """Settings with which an ample budget gives full attention, where the defaults do not."""
    true_kv: ClassVar[dict[str, Any] | None] = {}
    """Settings with which the query heads of a KV head read the same tokens, with the model's own keys and values at
    their own positions; None: no such settings exist."""
    ablation: ClassVar[dict[str, dict[str, Any]]] = {}
    """Ablation steps: the name of each variant, with the settings that produce it."""
    planned_is_bound: ClassVar[bool] = False
    """Whether the planned footprint is an upper bound, because the actual one depends on the prompt."""
    budget_is_mean: ClassVar[bool] = False
    """Whether layers share their budget, so that only their mean keeps to it."""
    budget_is_bound: ClassVar[bool] = False
    """Whether a step may attend to fewer tokens than the budget allows, because the scores decide how many."""
    reads_by_chance: ClassVar[bool] = False
    """Whether a step reads a random amount, so that `traffic` is only an expectation."""
    no_latents: ClassVar[str | None] = None
    """Why the method cannot keep latents, which are key and value in one; None: it can."""
    wants_next_query: ClassVar[bool] = False
    """Whether `take_next_query` is called, one layer ahead of `attend`."""
    attends_to_rows: ClassVar[bool] = False
    """Whether a `retrieve` of the method's own attends to everything while its caches give `tokens_in_chain`."""
    takes_selection: ClassVar[bool] = False
    """Whether the method attends to what the model selects by itself (`LayerGeometry.selects`)."""

    def __init__(self, config: ConfigT, layers: Sequence[LayerGeometry], context: SequenceContext):
        refuse_selection(type(self), config, layers)
        tiers = context.tiers = tiers_of_layer(self, layers, config.leading_dense_layers, context.tiers)
        self.config, self.context, self.caches = config, context, list[LayerCache]()
        self.shared = any(layer.readers for layer in layers)  # whether later layers read the KV of others
        selections = [layer.selects for layer in layers if layer.selects is not None]
        self.selected_for = bool(selections)  # whether layers select by themselves
        self.selects_alone = any(selects.alone for selects in selections)  # whether their modules look at numbers
        if self.shared and self.prefill_window is not None:
            what = f"{type(self).__name__} reads prompts by windows, and layers of this model read the KV of others"
            raise usage_error(what, "use a method that reads prompts layer by layer, such as freekv")
        self.retrieval: dict[int, CacheT] = {}
        self.plain: dict[int, DenseCache | SlidingCache] = {}
        self.states = RecurrentState(context.states, [tiers.on(device) for device in context.keeping])
        for layer in layers:
            cache: LayerCache
            its = context.tiers = tiers.on(context.device(layer.index))
            if layer.window is not None:
                cache = self.plain[layer.index] = windowed_cache(layer, its)
            elif layer.index < config.leading_dense_layers:
                cache = DenseCache(layer.num_kv_heads, layer.head_dim, context.capacity, its)
                self.plain[layer.index] = cache
            else:
                cache = self.retrieval[layer.index] = self.new_cache(layer)
            self.caches.append(cache)
            self.wait(cache)
        context.tiers = tiers
        self.remembered = {layer: Remembered() for layer in self.retrieval}

    @classmethod
    def needs(cls, config: ConfigT) -> Sequence[str]:  # noqa: ARG003
        """Name what must be computed from the model before a sequence can be served; see `Engine.prepared`."""
        return ()

    @abstractmethod
    def new_cache(self, layer: LayerGeometry) -> CacheT:
        """Make the cache of a layer that is neither sliding nor dense."""

    def retrieve(self, layer: int, cache: CacheT, q: Tensor, softmax: Softmax) -> Tensor:  # noqa: ARG002
        """Attend with q [H, d] in a layer of `new_cache`, the current token appended; return [H, d].

        Follows `step_plan`; without one, attends to everything on the device.
        """
        return Phases(self, layer, softmax).attend(q)

    @property
    def query_rows(self) -> int:
        """How many of the prompt's last queries `prefill` needs."""
        return 0

    @property
    def observes(self) -> bool:
        """Whether `observe` needs all of the prompt's queries."""
        return type(self).observe is not Method.observe

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Observe, in parts, how a layer reads the prompt: the next queries q [H, n, d], all keys so far k [Hk, m, d].

        Called before `prefill`. The caller reuses the tensors afterwards.
        """

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Store a layer's prompt KV k, v [Hk, s, d]; q [H, r, d] are its last `query_rows` queries.

        The caller reuses the tensors afterwards.
        """
        self.open(layer)
        if layer in self.retrieval:
            self.take_prompt(layer, self.retrieval[layer], k, v, q, softmax)
            count_disk(self.context, layer, self.caches[layer])
        else:
            self.count(layer, Count.BYTES_TO_HOST, self.caches[layer].load(k, v))

    def take_prompt(self, layer: int, cache: CacheT, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:  # noqa: ARG002
        """Implement `prefill` for a layer of `new_cache`."""
        self.count(layer, Count.BYTES_TO_HOST, cache.load(k, v))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Append the current token's k, v [Hk, d] and attend with q [H, d]; return [H, d]."""
        with self.span("append", layer):
            written = self.caches[layer].append(k, v)
        self.count(layer, Count.BYTES_TO_HOST, written)
        out = self.attend_to(layer, q, softmax)
        if self.context.attention_observer is not None:
            self.context.attention_observer(self, layer, q, out, softmax)
        return out

    def attend_to(self, layer: int, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to what is there of the KV of `layer`, the current token appended; return [H, d].

        Called for the layer itself, and once more for each later layer that has no KV of its own and reads this one's:
        that one chooses anew, by its own query, and whatever the layer remembers is of the query that was last.
        """
        if layer not in self.retrieval:
            with self.span("attention", layer):
                return self.caches[layer].attend(q, softmax)
        out = self.retrieve(layer, self.retrieval[layer], q, softmax)
        count_disk(self.context, layer, self.caches[layer])
        return out

    def in_chain(self, softmax: Sequence[Softmax]) -> Sequence[tuple[ChainTokens, Pages | None]] | None:
        """Return what a step attends to in every layer, the next token's row included, if it can be one loop.

        A step can if all that it does is to attend to these tokens, in some layers after it speculated among pages, and
        nobody looks at it. Whoever does that in its place calls `take_rows` in place of every layer's `attend`.
        """
        kind, context, plan = type(self), self.context, self.plan
        usual = kind.attend is Method.attend and kind.attend_to is Method.attend_to
        usual = usual and (kind.retrieve is Method.retrieve or kind.attends_to_rows)
        more = plan.prepare, plan.turn, plan.rounds, plan.evict
        does_more = any(each is not None for each in more)
        if not usual or (does_more and self.retrieval) or context.timeline.enabled or context.attention_observer:
            return None
        found = list[tuple[ChainTokens, Pages | None]]()
        for layer, cache in enumerate(self.caches):
            if (tokens := cache.tokens_in_chain()) is not None:
                found.append((tokens, None))
            elif layer in self.retrieval and (pages := pages_in_chain(self, layer, softmax[layer])) is not None:
                found.append(pages)
            else:
                return None
        return found

    def take_rows(self, found: Sequence[Speculated | None]) -> None:
        """Count the token that was written to its row in every layer, and take what speculation found there."""
        for layer, (cache, speculated) in enumerate(zip(self.caches, found, strict=True)):
            self.count(layer, Count.BYTES_TO_HOST, cache.take_row())
            if speculated is not None:
                take_speculated(self, layer, speculated)
            count_disk(self.context, layer, cache)

    def attended(self, layer: int) -> Tensor:
        """Return which tokens the last `attend` read, the current one included: bool [Hk, length]."""
        return self.caches[layer].attended()

    def take_next_query(self, layer: int, q: Tensor) -> None:
        """Receive a prediction, made one layer earlier, of the query q [H, d] that `layer` will have at this step.

        Called before that layer attends, for layers of `new_cache` except the model's first layer.
        """

    def attend_window(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Append the next n <= `prefill_window` tokens k, v [Hk, n, d], attend with q [H, n, d]; return [H, n, d]."""
        if layer in self.retrieval:
            return attend_window(self, layer, q, k, v, softmax)
        return self.plain[layer].attend_window(q, k, v, softmax)

    @property
    def step_plan(self) -> StepPlan | None:
        """The plan of a step in layers of `new_cache`; None where, with these settings, only `retrieve` defines it."""
        return None

    @cached_property
    def plan(self) -> StepPlan:
        """The `step_plan`, computed once; an empty plan where the method has none."""
        return self.step_plan or StepPlan()

    def leave_phases(self) -> None:
        """Free what only `Phases` needs: from now on a batch is served over slots."""

    @property
    def stays_in_place(self) -> bool:
        """Whether settings and caches allow every step of this sequence to be one CUDA graph."""
        in_place = self.config.stays_in_place and all(cache.keeps_form for cache in self.caches)
        # Slots are made for one attention a step, and for what a method selects.
        return in_place and not self.shared and not self.selected_for

    def take_tally(self, layer: int, tally: Mapping[str, int]) -> None:
        """Add the named counts of a layer's `Rule` to `statistics`."""

    def footprint(self) -> Footprint:
        """Count the bytes this sequence holds in each tier."""
        context = self.context
        caches = (context.placed(cache.footprint(), context.device(at)) for at, cache in enumerate(self.caches))
        return sum(caches, self.state_footprint())

    def state_footprint(self) -> Footprint:
        """Count the bytes of the layers' fixed-size state."""
        states = zip(self.states.footprints(), self.context.keeping, strict=True)
        return sum((self.context.placed(*each) for each in states), Footprint())

    def traffic(self, layer: int, length: int) -> Traffic:
        """Estimate the data that a step moves in a layer once `length` tokens were seen; works on the meta device."""
        return self.caches[layer].traffic(length)

    def statistics(self) -> dict[str, Any]:
        """Return statistics that only this method knows: plain data, named for the JSON report."""
        return {}

    def share(self, other: Method[ConfigT, CacheT], tokens: int) -> None:
        """Refer to the KV of the first `tokens` tokens that `other` holds in host memory.

        `other` must take over each layer's KV first.
        """
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            mine.share(theirs, tokens)

    def fork(self, counters: Counters, track: str) -> Method[ConfigT, CacheT]:
        """Copy the whole state, except the observer, for another continuation; the prompt in host memory is shared."""
        return self._copy_for(replace(self.context, counters=counters, track=track, attention_observer=None))

    def branch(self) -> Method[ConfigT, CacheT]:
        """Copy the state for tokens that may be taken back: either the copy goes on or this object, never both.

        So they share what only grows. What is small or changes at every step is copied.
        """
        return branched(self, self._kept_by_copies(self.context))

    def take_over(self, other: Method[ConfigT, CacheT]) -> None:
        """Become a copy of `other`, which has the same settings, is no larger, and has read this prompt's beginning."""
        vars(self).update(vars(other._copy_for(self.context)))

    def _copy_for(self, context: SequenceContext) -> Method[ConfigT, CacheT]:
        return copy.deepcopy(self, self._kept_by_copies(context))

    def _kept_by_copies(self, context: SequenceContext) -> dict[int, Any]:
        return {id(self.context): context, **{id(rotary): rotary for rotary in context.rotary}}

    def count(self, layer: int, count: Count, amount: int) -> None:
        """Add to a counter of the current step."""
        self.context.counters.add(layer, count, amount)

    def count_heads(self, layer: int, count: Count, amounts: Sequence[int]) -> None:
        """Add to a counter of the current step per KV head: `amounts` [Hk]."""
        self.context.counters.add_heads(layer, count, amounts)

    def count_selected(self, layer: int, selected: Tensor, readers: int = 1) -> None:
        """Count the pages that a layer requests at this step.

        `selected` [Hk * readers, k]: each page counts once per KV head.
        """
        self.count_heads(layer, Count.PAGES_REQUESTED, distinct(selected, len(selected) // readers))

    def count_recalled(self, layer: int, misses: Sequence[int], moved: int, hidden: bool = False) -> None:
        """Count a recall: misses of each KV head, [Hk], and bytes moved to the device.

        `hidden` means that this step's attention does not wait for it.
        """
        self.count_heads(layer, Count.MISSES, misses)
        self.count(layer, Count.BYTES_TO_DEVICE, moved)
        self.count(layer, Count.BYTES_EXPOSED, 0 if hidden else moved)

    def span(self, name: str, layer: int) -> AbstractContextManager[None]:
        """Time a phase of a layer's work, if the timeline is on."""
        return self.context.timeline.span(name, self.context.track, layer=layer)


AnyMethod: TypeAlias = Method[Any, Any]
