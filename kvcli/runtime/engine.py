"""A model made ready: kvcli's attention, linear layers and rotary tables in place, and the moves that all runs share.

Whatever runs methods stands on an `Engine`: it makes their objects, reads a prompt into them (once, however many they
are) and decodes. `generate` is one user of it; measuring, calibrating and evaluating are others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kvcli.inputs.profiles import Profile
from kvcli.methods import get_method
from kvcli.methods.base import Method, SequenceContext
from kvcli.models.geometry import LayerGeometry
from kvcli.models.loading import Model
from kvcli.models.rope import Rope, installed
from kvcli.runtime.attention_hook import Hook, attached
from kvcli.runtime.compiled import CompiledStepper
from kvcli.runtime.decode import BlockingStepper, DecodingSequence, Stepper, decode, forward_step
from kvcli.runtime.gpu.stepper import SlotStepper
from kvcli.runtime.linear import onednn_linears
from kvcli.runtime.next_query import check_next_queries
from kvcli.runtime.prefill import PrefillConsumer, prefill
from kvcli.runtime.retrieval_heads import HeadScores, RepeatedTokens, head_scores
from kvcli.runtime.sequence import RunningSequence
from kvcli.runtime.windowed import extend, read_prompt
from kvcli.store.cache import Tiers
from kvcli.telemetry.counters import Counters
from kvcli.telemetry.timeline import Timeline

Pipeline = Literal["blocking", "overlapped", "compiled"]
"""How a step runs: phase after phase; over slots (`kvcli.runtime.gpu`), for methods that have a `slot_rule` and that
nobody watches or times phase by phase; with what lies between attention compiled, over slots on a GPU, phase after
phase on a CPU."""

_HEAD_SCORES: WeakKeyDictionary[nn.Module, HeadScores] = WeakKeyDictionary()  # of models that were probed


class Engine:
    """Runs methods on one model; made by `engine`."""

    def __init__(self, model: Model, hook: Hook, rope: Rope, notice: Callable[[str], None]):
        self.model, self.hook, self.rope, self.notice = model, hook, rope, notice

    @property
    def layers(self) -> Sequence[LayerGeometry]:
        """The model's decoder layers."""
        return self.model.geometry.layers

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
    ) -> SequenceContext:
        """What a method object for a prompt and its continuation is given; `question` are the prompt's last tokens."""
        capacity = prompt_tokens + max_tokens
        return SequenceContext(
            capacity=capacity,
            tiers=Tiers.for_device(self.model.device, self.model.dtype),
            counters=Counters(len(self.layers)),
            timeline=timeline or Timeline(),
            rotary=self.rope.rotary(capacity),
            track=track,
            question=question,
            prompt_tokens=prompt_tokens,
        )

    def method(self, profile: Profile, context: SequenceContext) -> Method[Any, Any]:
        """Make the object that serves one sequence.

        Raises:
            KvcliError: the method wants queries a layer ahead, and this model's cannot be made (usage).
        """
        method_class = get_method(profile.method)
        context.prepared = {name: self.prepared(name) for name in method_class.needs(profile.settings)}
        method = method_class(profile.settings, self.layers, context)
        if method.wants_next_query:
            check_next_queries(self.model.module, self.hook, self.rope, method)
        return method

    def prepared(self, name: str) -> Any:
        """Find out what a method needs to know about the model (`Method.needs`), once.

        "head_scores": how well every KV head retrieves, `HeadScores`.
        """
        return {"head_scores": self._head_scores}[name]()

    def _head_scores(self) -> HeadScores:
        if self.model.module not in _HEAD_SCORES:
            probe = RepeatedTokens.of(self.model)
            self.notice(f"no file of retrieval heads: looking for them on {len(probe.ids):,} random tokens")
            self.rope.cover(len(probe.ids))
            self.rope.use([len(probe.ids)])
            _HEAD_SCORES[self.model.module] = head_scores(self.model, self.hook, probe)
        return _HEAD_SCORES[self.model.module]

    def read(
        self,
        ids: Sequence[int],
        methods: Sequence[Method[Any, Any]],
        advance: Callable[[int], None] = lambda _: None,
    ) -> list[Tensor]:
        """Read one prompt into methods of equal capacity; returns for each the logits [vocab] of the next token.

        Those with exact prefill share one reading. `advance` is called with the tokens that a layer has just done.
        """
        self.rope.use([methods[0].context.capacity])
        return read_prompt(self.model.module, self.hook, ids, methods, self.layers, advance)

    def show(self, ids: Sequence[int], taker: PrefillConsumer, advance: Callable[[int], None] = lambda _: None) -> None:
        """Read a prompt exactly for somebody who keeps what they want of it; as long as a capacity of the engine."""
        self.rope.use([len(ids)])
        prefill(self.model.module, self.hook, ids, taker, self.layers, advance)

    def extend(self, ids: Sequence[int], method: Method[Any, Any], keep: int = 1) -> Tensor:
        """Read more tokens into a method that attends by windows -> logits of the last ones [keep, vocab]."""
        self.rope.use([method.context.capacity])
        return extend(self.model.module, self.hook, ids, method, keep)

    def step(self, batch: Sequence[DecodingSequence]) -> Tensor:
        """Run the newest token of every sequence through the model -> logits [b, vocab]."""
        return forward_step(self.model.module, self.hook, batch, self.rope)

    def decode(
        self,
        sequences: Sequence[RunningSequence],
        timeline: Timeline | None = None,
        pipeline: Pipeline = "blocking",
    ) -> Iterator[list[tuple[RunningSequence, str]]]:
        """Continue sequences together until each has ended; see `decode.decode`."""
        stepper: Stepper
        model, compiled = self.model.module, pipeline == "compiled"
        if pipeline == "blocking":
            stepper = BlockingStepper(model, self.hook, self.rope)
        elif compiled and self.model.device.type == "cpu":
            stepper = CompiledStepper(model, self.hook, self.rope)
        else:
            stepper = SlotStepper(model, self.hook, sequences, self.rope, self.notice, compiled)
        return decode(stepper, sequences, timeline or Timeline())


@contextmanager
def engine(
    model: Model, capacities: Collection[int], notice: Callable[[str], None] = lambda _: None
) -> Iterator[Engine]:
    """Make `model` ready for sequences of these lengths when they end, in tokens; leaves the model as it was.

    `notice` is told in one line what takes time that nobody asked for.
    """
    here = torch.cuda.device(model.device if model.device.type == "cuda" else -1)  # -1: none; Triton launches on it
    with (
        here,
        attached(model.module) as hook,
        onednn_linears(model.module),
        installed(model.module, capacities) as rope,
    ):
        yield Engine(model, hook, rope, notice)
