"""The engine: a model with kvcli's attention, linear layers and rotary tables in place, and what all runs share.

An `Engine` makes method objects and sequences, reads a prompt into methods (once, for any number of them) and decodes.
`kvcli.generate` uses it, and so do measuring, calibrating and evaluating.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from kvcli.inputs.encoding import refuse_unembedded
from kvcli.inputs.profiles import Profile
from kvcli.kernels._numba import compiling
from kvcli.kv.parking import Parking
from kvcli.memory.disk_tier import DiskTier
from kvcli.methods import get_method
from kvcli.methods.contract import AnyMethod, SequenceContext
from kvcli.models.geometry import LayerGeometry
from kvcli.models.loading import Model
from kvcli.models.rope import Rope, installed
from kvcli.runtime.attention_hook import Hook, attached
from kvcli.runtime.cpu_layers import cpu_layers
from kvcli.runtime.decode import decode
from kvcli.runtime.detokenizer import StreamingDetokenizer
from kvcli.runtime.device_transfer import current
from kvcli.runtime.layer_major import streamed
from kvcli.runtime.next_query import check_next_queries
from kvcli.runtime.pipeline import Pipeline, alike, stepper_for
from kvcli.runtime.prefill import Branches, PrefillConsumer, prefill
from kvcli.runtime.read_together import check_reads_exactly, read_together
from kvcli.runtime.repetition import find_documents, with_repetitions
from kvcli.runtime.retrieval_heads import HeadScores, RepeatedTokens, head_scores
from kvcli.runtime.sampling import Sampler, Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.runtime.streamed_weights import awaiting_weights, streamed_weights
from kvcli.runtime.windowed import extend, windowed_prefill
from kvcli.telemetry.timeline import Timeline

_HEAD_SCORES: WeakKeyDictionary[nn.Module, HeadScores] = WeakKeyDictionary()  # of models that were probed


class Engine:
    """Runs methods on one model; made by `engine`."""

    def __init__(
        self, model: Model, hook: Hook, rope: Rope, notice: Callable[[str], None], disk: DiskTier | None = None
    ):
        self.model, self.hook, self.rope, self.notice, self.disk = model, hook, rope, notice, disk

    @property
    def layers(self) -> Sequence[LayerGeometry]:
        """The layers that attend."""
        return self.model.geometry.layers

    @property
    def depth(self) -> int:
        """Number of decoder layers that a token passes."""
        return self.model.geometry.depth

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end a text: the generation config's, else the tokenizer's."""
        config, tokenizer = self.model.module.generation_config, self.model.tokenizer
        ids = config.eos_token_id if config is not None and config.eos_token_id is not None else tokenizer.eos_token_id
        return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)

    def context(
        self,
        prompt_tokens: int,
        max_tokens: int,
        question: Sequence[int] = (),
        timeline: Timeline | None = None,
        track: str = "sequence 0",
        capacity: int | None = None,
    ) -> SequenceContext:
        """Make the context for the method object of a sequence; `question` holds the prompt's last tokens.

        `capacity`, one of the engine's, leaves room for more tokens than the sequence will have.

        Raises:
            KvcliError: the model has an embedding for each position, and too few of them (usage).
        """
        capacity = capacity or prompt_tokens + max_tokens
        self.model.geometry.beyond_positions(prompt_tokens + max_tokens, self.model.name)
        context = SequenceContext.of(
            len(self.layers),
            self.model.device,
            self.model.dtype,
            capacity,
            self.rope.rotary(capacity),
            timeline=timeline or Timeline(),
            track=track,
            question=question,
            prompt_tokens=prompt_tokens,
            states=self.model.geometry.states,
            placement=self.model.placement,
        )
        context.tiers = context.tiers.above(self.disk)
        return context

    def method(self, profile: Profile, context: SequenceContext, waits: bool = False) -> AnyMethod:
        """Make the object that serves one sequence.

        With `waits`, what it holds on the device for a long prompt waits in host memory until `prefill_branches` has
        read all layers.

        Raises:
            KvcliError: the method needs queries a layer ahead, and this model's cannot be made; the method refuses a
                budget that is a share of the prompt (usage).
        """
        assert context.prompt_tokens is not None
        profile = profile.for_prompt(context.prompt_tokens)
        context.prepared, model = self.learn(profile), self.model
        if waits and streamed(model.geometry, context.prompt_tokens, model.dtype.itemsize, model.device):
            context.parking = Parking(context.tiers)
        method = get_method(profile.method)(profile.settings, self.layers, context)
        if method.prefill_window is not None:  # reads window by window through all layers
            check_reads_exactly(profile.method, profile.settings)
            method.be_present()
        if method.wants_next_query:
            check_next_queries(self.hook, self.rope, method)
        return method

    def sequence(
        self,
        method: AnyMethod,
        sampling: Sampling,
        *,
        index: int = 0,
        sample: int = 0,
        source: str = "prompt",
        sampler: Callable[[Tensor], int] | None = None,
        first_token: int | None = None,
        reference: AnyMethod | None = None,
        ids: Sequence[int] = (),
    ) -> RunningSequence:
        """Make the sequence that continues what was read into `method`.

        Its next step is to `accept` the prefill's logits or, if `first_token` follows the prompt, to decode. Tokens are
        drawn as `sampling` says, unless a `sampler` is given; `ids` is the prompt, for a repetition penalty.
        """
        context = method.context
        assert context.prompt_tokens is not None
        return RunningSequence(
            index=index,
            source=source,
            sample=sample,
            prompt_tokens=context.prompt_tokens,
            method=method,
            counters=context.counters,
            sampler=sampler or Sampler(sampling, sample, self.model.device, ids),
            detokenizer=StreamingDetokenizer(self.model.tokenizer, sampling.stop),
            eos=frozenset() if sampling.ignore_eos else self.eos,
            max_tokens=sampling.max_tokens,
            token_ids=[] if first_token is None else [first_token],
            reference=reference,
            prefill=context.prefill_statistics or {},
        )

    def prefill(
        self,
        ids: Sequence[int],
        methods: Sequence[AnyMethod],
        advance: Callable[[int], None] = lambda _: None,
        chunk: int | None = None,
    ) -> list[Tensor]:
        """Read one prompt into methods of equal capacity; return for each the logits [vocab] of the next token.

        Methods with exact prefill share one reading, the others read by windows of their own. `advance` is called with
        the number of tokens that a layer has just processed.
        """
        return self.prefill_branches(Branches((), [ids]), [methods], advance, chunk)[0]

    def prefill_branches(
        self,
        branches: Branches,
        methods: Sequence[Sequence[AnyMethod]],
        advance: Callable[[int], None] = lambda _: None,
        chunk: int | None = None,
        watchers: Sequence[PrefillConsumer] = (),
    ) -> list[list[Tensor]]:
        """Read prompts that begin alike, each into methods of its own; return their logits as `prefill` does.

        `methods` has a row for each prompt and a column for each profile; `watchers` also receive the KV of the first
        prompt's exact reading. Prompts whose rotary positions differ (`Rope.alike`) must have nothing in common. The
        methods of a column share what they hold of the common tokens in host memory. Methods that read by windows share
        the whole windows of the common part, unless they preview the prompt's end (`Method.preview`). They need equal
        capacities, and no known KV is skipped for them.
        """
        for ids in (branches.common, *branches.rests):
            refuse_unembedded(ids, self.model, "prompt")
        self.rope.use([max(row[0].context.capacity for row in methods)])
        find_documents(branches, methods)
        columns = list(zip(*methods, strict=True))
        exact = [column for column in columns if column[0].prefill_window is None]
        how = branches, exact, advance, chunk, watchers
        read = iter(read_together(self.hook, self.rope, self.model.tokenizer, *how))
        logits = [
            self._windowed(branches, column, advance, window) if (window := column[0].prefill_window) else next(read)
            for column in columns
        ]
        return [list(row) for row in zip(*logits, strict=True)]

    def repeated_tokens(self, branches: Branches, methods: Sequence[Sequence[AnyMethod]]) -> int:
        """Count the tokens computed in addition to the prompts because methods want to see them repeated."""
        find_documents(branches, methods)
        parted, _ = with_repetitions(branches, methods, self.model.tokenizer)
        return len(parted.tokens) - len(branches.tokens)

    def _windowed(
        self, branches: Branches, methods: Sequence[AnyMethod], advance: Callable[[int], None], window: int
    ) -> list[Tensor]:
        """Read prompts that begin alike, each into a method that reads by windows -> logits [vocab] of each."""
        if shared := shared_windows(branches, methods, window):
            first, *others = methods
            windowed_prefill(self.hook, branches.common[:shared], first, self.layers, advance, window)
            for method in others:
                method.take_over(first)
        return [
            windowed_prefill(self.hook, [*branches.common, *rest], method, self.layers, advance, window, shared)
            for rest, method in zip(branches.rests, methods, strict=True)
        ]

    def prefill_into(
        self,
        ids: Sequence[int],
        consumer: PrefillConsumer,
        advance: Callable[[int], None] = lambda _: None,
        capacity: int | None = None,
    ) -> Tensor:
        """Read a prompt exactly for a consumer that is not a method -> logits [vocab] of the next token.

        `capacity`, by default the prompt's length, must be one of the engine's.
        """
        self.rope.use([capacity or len(ids)])
        return prefill(self.hook, ids, consumer, self.layers, advance)

    def extend(self, ids: Sequence[int], method: AnyMethod, keep: int = 1) -> Tensor:
        """Read more tokens into a method that attends by windows -> logits of the last ones [keep, vocab]."""
        self.rope.use([method.context.capacity])
        return extend(self.hook, ids, method, keep)

    def decode(
        self,
        sequences: Sequence[RunningSequence],
        timeline: Timeline | None = None,
        pipeline: Pipeline = "blocking",
        rows: int = 1,
        lossless: int | None = None,
    ) -> Iterator[list[tuple[RunningSequence, str]]]:
        """Continue sequences together until each has ended, see `kvcli.runtime.decode.decode`.

        Other sequences may join a blocking pipeline; `rows` is the least number of its rows. With `lossless`, sequences
        bring a `reference`, which checks that many drafts in a pass.
        """
        stepper = stepper_for(self.hook, self.rope, sequences, pipeline, self.notice, rows, lossless)
        return decode(stepper, sequences, timeline or Timeline())

    def learn(self, profile: Profile) -> dict[str, Any]:
        """Return what a method needs to know about the model, by name; found once, before the first prompt is read."""
        return {name: self.prepared(name) for name in get_method(profile.method).needs(profile.settings)}

    def prepared(self, name: str) -> Any:
        """Return what a method needs to know about the model (`Method.needs`), computed once.

        "head_scores": how well every KV head retrieves, `HeadScores`.
        """
        return {"head_scores": self._head_scores}[name]()

    def _head_scores(self) -> HeadScores:
        if self.model.module not in _HEAD_SCORES:
            repeated = RepeatedTokens.of(self.model)
            self.notice(
                f"no file of retrieval heads: looking for them on {len(repeated.ids):,} random tokens, which may take "
                "minutes; kvcli calibrate heads -o FILE.toml keeps them"
            )
            self.rope.cover(len(repeated.ids))
            self.rope.use([len(repeated.ids)])
            _HEAD_SCORES[self.model.module] = head_scores(self.model, self.hook, repeated)
        return _HEAD_SCORES[self.model.module]


def shared_windows(branches: Branches, methods: Sequence[AnyMethod], window: int) -> int:
    """Count the tokens of the common part, in whole windows, that are read once for all methods."""
    if len(methods) == 1 or not alike(methods) or any(method.preview for method in methods):
        return 0
    return len(branches.common) // window * window


@contextmanager
def engine(
    model: Model,
    capacities: Collection[int],
    notice: Callable[[str], None] = lambda _: None,
    disk: DiskTier | None = None,
) -> Iterator[Engine]:
    """Prepare `model` for sequences of the final lengths `capacities`, in tokens; restore the model at the end.

    `notice` receives a line for the user about work that takes time without having been asked for. A `disk` takes the
    KV that host memory is not to hold.
    """
    with (
        compiling.telling(lambda: notice("compiling loops for this processor; later runs find them cached")),
        current(model.device),
        streamed_weights(model.module) as streamed,
        attached(model.module, model.placement) as hook,
        cpu_layers(model.module),
        awaiting_weights(streamed),
        installed(model.module, capacities, model.placement) as rope,
    ):
        hook.streamed = streamed
        yield Engine(model, hook, rope, notice, disk)
