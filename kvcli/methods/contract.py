"""The contract of a method: one cache a layer, and what to attend to at each step.

A method object serves one sequence. The loop calls `prefill` once a layer with the prompt's KV, then `attend` once a
layer and token. Sliding-window layers and the leading dense layers need no retrieval and are handled here; a method
says which cache its other layers get (`new_cache`) and how they attend (`retrieve`).
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
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import DenseCache, LayerCache, Tiers
from kvcli.kv.pages import distinct
from kvcli.kv.parking import Parking, Waits
from kvcli.kv.recurrent import RecurrentState
from kvcli.kv.sliding import SlidingCache, windowed_cache
from kvcli.memory.tiers import Footprint, Traffic
from kvcli.methods.config import MethodConfig
from kvcli.methods.step import Phases, Remembered, StepPlan
from kvcli.models.devices import Placement
from kvcli.models.geometry import LayerGeometry, StateGeometry
from kvcli.telemetry.counters import Count, Counters
from kvcli.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from kvcli.models.rope import Rotary


class AttentionObserver(Protocol):
    """What watches a method attend."""

    def __call__(self, method: AnyMethod, layer: int, q: Tensor, out: Tensor, softmax: Softmax) -> None:
        """See what a layer's query q [H, d] got from attention, out [H, d]; not to be changed, nor kept."""


@dataclass
class SequenceContext:
    """What a method object is given: room for `capacity` tokens, memory tiers, counters, spans, and RoPE.

    Where layers lie on several devices, `tiers` are those of the layer whose cache is being made, else the first one's.
    """

    stateless: ClassVar[bool] = True
    capacity: int
    tiers: Tiers
    counters: Counters
    timeline: Timeline
    rotary: Sequence[Rotary | None]
    track: str = "sequence 0"
    question: Sequence[int] = ()  # token ids of the one after the document, where the prompt has one
    prompt_tokens: int | None = None  # of `capacity`, where that is known: the others are generated
    document_tokens: int | None = None  # of these, those before the question, once the prompt is there; None: all
    prepared: Mapping[str, Any] | None = None
    """What `Method.needs` asked for, by name; None while memory is planned and nothing is known of the model."""
    states: Sequence[StateGeometry] = ()  # the layers that keep one
    placement: Placement | None = None  # of the layers, where they lie on several devices
    parking: Parking | None = None  # where what layers hold on the device waits while a long prompt is read
    attention_observer: AttentionObserver | None = None  # called after every `Method.attend`
    prefill_statistics: Mapping[str, Any] | None = None  # what a prefill that was not exact left out

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
        """Make the context of a sequence of `capacity` tokens; `known` are further fields.

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
        """Say where a layer lies, by its number among those that attend."""
        return self.tiers.device if self.placement is None else self.placement.attending[layer]

    @property
    def keeping(self) -> Sequence[torch.device]:
        """Where the layers lie that keep a state."""
        return [self.tiers.device] * len(self.states) if self.placement is None else self.placement.keeping

    def placed(self, held: Footprint, device: torch.device) -> Footprint:
        """Say on which device that is what is held, where there are several."""
        if self.placement is None:
            return held
        devices = self.placement.devices
        return held.on(devices.index(device), len(devices))


def tiers_for(layers: Sequence[LayerGeometry], tiers: Tiers, name: str, refused: str | None) -> Tiers:
    """Say in how many parts caches of these layers keep a token; `refused` is why method `name` keeps no latents.

    Raises:
        KvcliError: the layers have latents, which the method cannot keep (usage).
    """
    if layers[0].parts == tiers.parts:
        return tiers
    if refused is not None:
        raise usage_error(f"{name} keeps no latents: {refused}", "take another method, such as freekv")
    return replace(tiers, parts=layers[0].parts)


def tiers_of_layer(method: AnyMethod, layers: Sequence[LayerGeometry], dense: int, tiers: Tiers) -> Tiers:
    """The memory of one layer, where all that are neither sliding nor among the `dense` first have as much of a disk.

    Raises:
        KvcliError: the layers have latents, which the method cannot keep (usage).
    """
    tiers = tiers_for(layers, tiers, type(method).__name__, method.no_latents)
    if tiers.disk is None:
        return tiers
    retrieving = sum(layer.window is None and layer.index >= dense for layer in layers)
    return replace(tiers, disk=tiers.disk.divided(retrieving))


def count_disk(context: SequenceContext, layer: int, cache: LayerCache) -> None:
    """Count what a layer's cache asked of the disk since the last time, and show its waits on a line of their own."""
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
    """The part of a method that a prompt passes through in parts."""

    caches: list[LayerCache]
    context: SequenceContext

    def take_part(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Take what can leave of a layer's k, v [Hk, m, d] of the first tokens; `prefill` comes with all of them."""
        self.open(layer)
        if k.shape[1] >= self.caches[layer].first_part:
            self.context.counters.add(layer, Count.BYTES_TO_HOST, self.caches[layer].take(k, v))

    def lend(self, layer: int, length: int) -> Tensor | None:
        """Lend rows [t, Hk, length, d] in which a layer's KV is collected, where `prefill` would copy it there."""
        self.open(layer)
        return self.caches[layer].lend(length)

    @property
    def repeated(self) -> Sequence[slice]:
        """Parts of the prompt's document that the model is to repeat behind it, for `observe_repeated` to see."""
        return ()

    def observe_repeated(self, layer: int, part: slice, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """See how a layer reads a part of the document once more, asked to repeat it, in pieces, before `prefill`.

        The repetition's next queries q [H, n, d], all keys up to them k [Hk, m, d]: those of the document, and from
        there on its own, the request's among them. The caller uses the tensors again afterwards.
        """

    @property
    def waiting(self) -> Sequence[Waits]:
        """What can wait in host memory while a layer that needs none of it is read: where KV goes there anyway."""
        offloads = getattr(self, "offloads", False) or getattr(getattr(self, "config", None), "offload", False)
        return self.caches if offloads else ()

    def wait(self, made: Waits, keeps: bool = True) -> None:
        """Let what was just made wait, if the prompt is so long; what `keeps` nothing of it needs no host memory."""
        if self.context.parking is not None and any(each is made for each in self.waiting):
            self.context.parking.enter(made, keeps)

    def open(self, layer: int) -> None:
        """Have what a layer holds on the device there."""
        if self.context.parking is not None:
            self.context.parking.open(self.caches[layer])

    def close(self, layer: int) -> None:
        """Let it wait, after `prefill`; nobody reads any more what was lent."""
        if self.context.parking is not None:
            self.context.parking.close(self.caches[layer])

    def be_present(self) -> None:
        """Have everything there from now on."""
        if self.context.parking is not None:
            self.context.parking.leave()
            self.context.parking = None


def last_used_here(*tensors: Tensor) -> None:
    """Keep memory of the stream that reads the prompt from its next user until the one that stores the prompt is done.

    For tensors that are made in `observe` and let go of in `prefill`.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


WindowCacheT = TypeVar("WindowCacheT", bound=LayerCache, contravariant=True)


class PromptWindows:
    """The part of a method that a prompt passes through by windows, each through all layers before the next."""

    @property
    def prefill_window(self) -> int | None:
        """Tokens that the prompt is read by, each window through all layers by `attend_window`; None: see `prefill`."""
        return None

    @property
    def preview(self) -> Sequence[int]:
        """Token ids that the method wants to see, read alone, before the prompt is read by windows."""
        return ()

    def take_preview(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> None:
        """Take a layer's queries q [H, 1 + n, d], keys and values k, v [Hk, 1 + n, d] of the preview.

        The first is that of the prompt's first token, at position 0; of a long preview it is the last n tokens.
        """

    @property
    def wants_logits(self) -> bool:
        """Whether `take_logits` wants to see what the model expects behind every token of the prompt."""
        return type(self).take_logits is not PromptWindows.take_logits

    def take_logits(self, first: int, ids: Sequence[int], logits: Tensor) -> None:
        """Take a window that all layers have read: its tokens `ids` [n] from position `first` on, logits [n, vocab]."""


@runtime_checkable
class AttendsWindows(Protocol[WindowCacheT]):
    """Attends with several tokens of a prompt at once."""

    def retrieve_window(
        self, layer: int, cache: WindowCacheT, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
    ) -> Tensor:
        """Do what `Method.attend_window` says in a layer of `Method.new_cache`."""


def attend_window(method: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """Do so in a layer of `Method.new_cache`, and count what was asked of a disk."""
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
    """What a step attends to, in a few words; this and the next five are literals (`kvcli.methods.card` reads them)."""
    paper: ClassVar[str]
    long_generation: ClassVar[bool]
    """Whether generated tokens are treated like the prompt's, however many there are; by default settings."""
    offloads: ClassVar[bool]
    """Whether KV lies in host memory; by default settings."""
    group_consistent: ClassVar[bool]
    """Whether, as published, all query heads of a KV head read the same KV; elsewhere pooling over them sees to it."""
    device_memory: ClassVar[str]
    """KV on the device per layer that is neither sliding nor dense, in tokens: O(...) in `card.MEMORY_SYMBOLS`."""
    exact: ClassVar[dict[str, Any]] = {}
    """Settings with which an ample budget is full attention, where the defaults are not."""
    true_kv: ClassVar[dict[str, Any] | None] = {}
    """Settings with which a KV head's query heads read the same of the model's own keys and values in their places;
    None: there are none."""
    ablation: ClassVar[dict[str, dict[str, Any]]] = {}
    """What the method is built of, part after part: names of steps towards it, with the settings that stop there."""
    planned_is_bound: ClassVar[bool] = False
    """Whether the footprint is that of the plan or less, because what a prompt needs shows only when it is read."""
    budget_is_mean: ClassVar[bool] = False
    """Whether the layers share their budget, so that not each of them but their mean keeps to it."""
    budget_is_bound: ClassVar[bool] = False
    """Whether a step may attend to fewer tokens than the budget holds, because their scores decide how many."""
    reads_by_chance: ClassVar[bool] = False
    """Whether chance decides how much a step reads, so that `traffic` can only tell what to expect."""
    no_latents: ClassVar[str | None] = None
    """Why latents, which are key and value both, cannot be kept; None: they can."""
    wants_next_query: ClassVar[bool] = False
    """Whether `take_next_query` is to be called, one layer ahead of `attend`."""

    def __init__(self, config: ConfigT, layers: Sequence[LayerGeometry], context: SequenceContext):
        tiers = context.tiers = tiers_of_layer(self, layers, config.leading_dense_layers, context.tiers)
        self.config, self.context, self.caches = config, context, list[LayerCache]()
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
        """Name what has to be found out about the model before a sequence can be served; see `Engine.prepared`."""
        return ()

    @abstractmethod
    def new_cache(self, layer: LayerGeometry) -> CacheT:
        """Make the cache of a layer that is neither sliding nor dense."""

    def retrieve(self, layer: int, cache: CacheT, q: Tensor, softmax: Softmax) -> Tensor:  # noqa: ARG002
        """Attend with q [H, d] in a layer of `new_cache`, the current token appended -> [H, d].

        As the `step_plan` says; where there is none, to all that the device holds.
        """
        return Phases(self, layer, softmax).attend(q)

    @property
    def query_rows(self) -> int:
        """How many of the prompt's last queries `prefill` wants to see."""
        return 0

    @property
    def observes(self) -> bool:
        """Whether `observe` wants to see all of the prompt's queries."""
        return type(self).observe is not Method.observe

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """See how a layer reads the prompt, in parts: its next queries q [H, n, d], all keys up to them k [Hk, m, d].

        Called before `prefill`; the caller uses the tensors again afterwards.
        """

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:
        """Take over the prompt's KV of a layer: k, v [Hk, s, d], and its last `query_rows` queries q [H, r, d].

        The caller uses the tensors again afterwards.
        """
        self.open(layer)
        if layer in self.retrieval:
            self.take_prompt(layer, self.retrieval[layer], k, v, q, softmax)
            count_disk(self.context, layer, self.caches[layer])
        else:
            self.count(layer, Count.BYTES_TO_HOST, self.caches[layer].load(k, v))

    def take_prompt(self, layer: int, cache: CacheT, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:  # noqa: ARG002
        """Do what `prefill` says in a layer of `new_cache`."""
        self.count(layer, Count.BYTES_TO_HOST, cache.load(k, v))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Append the current token's k, v [Hk, d] and attend with q [H, d] -> [H, d]."""
        with self.span("append", layer):
            written = self.caches[layer].append(k, v)
        self.count(layer, Count.BYTES_TO_HOST, written)
        if layer in self.retrieval:
            out = self.retrieve(layer, self.retrieval[layer], q, softmax)
            count_disk(self.context, layer, self.caches[layer])
        else:
            with self.span("attention", layer):
                out = self.caches[layer].attend(q, softmax)
        if self.context.attention_observer is not None:
            self.context.attention_observer(self, layer, q, out, softmax)
        return out

    def attended(self, layer: int) -> Tensor:
        """Work out which tokens the last `attend` looked at, the current one among them: bool [Hk, length]."""
        return self.caches[layer].attended()

    def take_next_query(self, layer: int, q: Tensor) -> None:
        """Take the query q [H, d] that `layer` will have at this step, as far as the layer before it can tell.

        Called before that layer attends, in layers of `new_cache` but the model's first.
        """

    def attend_window(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Append the next n <= `prefill_window` tokens k, v [Hk, n, d], attend with q [H, n, d] -> [H, n, d]."""
        if layer in self.retrieval:
            return attend_window(self, layer, q, k, v, softmax)
        return self.plain[layer].attend_window(q, k, v, softmax)

    @property
    def step_plan(self) -> StepPlan | None:
        """What a step does in layers of `new_cache`; None: only `retrieve` knows. Settings may keep it on the host."""
        return None

    @cached_property
    def plan(self) -> StepPlan:
        """The `step_plan`, made once; that of a method which has none says nothing."""
        return self.step_plan or StepPlan()

    def leave_phases(self) -> None:
        """Free what only phases need: from now on a batch is served over slots."""

    @property
    def stays_in_place(self) -> bool:
        """Whether its settings and its caches let a step of this sequence be one CUDA graph, to the end."""
        return self.config.stays_in_place and all(cache.keeps_form for cache in self.caches)

    def take_tally(self, layer: int, tally: Mapping[str, int]) -> None:
        """Add what a layer's `Rule` has counted, by name, to what `statistics` says."""

    def footprint(self) -> Footprint:
        """Count the bytes this sequence holds in each tier."""
        context = self.context
        caches = (context.placed(cache.footprint(), context.device(at)) for at, cache in enumerate(self.caches))
        return sum(caches, self.state_footprint())

    def state_footprint(self) -> Footprint:
        """Count the bytes of what layers keep in a fixed size."""
        states = zip(self.states.footprints(), self.context.keeping, strict=True)
        return sum((self.context.placed(*each) for each in states), Footprint())

    def traffic(self, layer: int, length: int) -> Traffic:
        """Say what a step has to move in a layer once `length` tokens were seen; works on the meta device."""
        return self.caches[layer].traffic(length)

    def statistics(self) -> dict[str, Any]:
        """Say what this method alone knows about the sequence: plain data, named for the JSON report."""
        return {}

    def share(self, other: Method[ConfigT, CacheT], tokens: int) -> None:
        """Refer to what `other`, which takes over each layer's KV first, has in host memory of the same tokens."""
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            mine.share(theirs, tokens)

    def fork(self, counters: Counters, track: str) -> Method[ConfigT, CacheT]:
        """Copy the whole state, without its observer, for another continuation; the prompt in host memory is shared."""
        return self._copy_for(replace(self.context, counters=counters, track=track, attention_observer=None))

    def take_over(self, other: Method[ConfigT, CacheT]) -> None:
        """Become a copy of `other`, of the same settings and no smaller, which has read this prompt's beginning."""
        vars(self).update(vars(other._copy_for(self.context)))

    def _copy_for(self, context: SequenceContext) -> Method[ConfigT, CacheT]:
        shared = {id(rotary): rotary for rotary in context.rotary}
        return copy.deepcopy(self, {id(self.context): context, **shared})

    def count(self, layer: int, count: Count, amount: int) -> None:
        """Count in the current step."""
        self.context.counters.add(layer, count, amount)

    def count_heads(self, layer: int, count: Count, amounts: Sequence[int]) -> None:
        """Count in the current step, head by head: `amounts` [Hk]."""
        self.context.counters.add_heads(layer, count, amounts)

    def count_selected(self, layer: int, selected: Tensor, readers: int = 1) -> None:
        """Count what a layer asks for at this step: of `selected` [Hk * readers, k], each page of a KV head once."""
        self.count_heads(layer, Count.PAGES_REQUESTED, distinct(selected, len(selected) // readers))

    def count_recalled(self, layer: int, misses: Sequence[int], moved: int, hidden: bool = False) -> None:
        """Count a recall: the misses of each KV head, [Hk], and the bytes moved to the device.

        `hidden` says that this step's attention does not wait for it.
        """
        self.count_heads(layer, Count.MISSES, misses)
        self.count(layer, Count.BYTES_TO_DEVICE, moved)
        self.count(layer, Count.BYTES_EXPOSED, 0 if hidden else moved)

    def span(self, name: str, layer: int) -> AbstractContextManager[None]:
        """Time a phase of a layer's work, where the timeline is on."""
        return self.context.timeline.span(name, self.context.track, layer=layer)


AnyMethod: TypeAlias = Method[Any, Any]
