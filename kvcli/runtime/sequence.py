"""One running sequence: its tokens, its KV, its sampler, and its statistics so far."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint
from kvcli.methods.contract import AnyMethod
from kvcli.runtime.detokenizer import StreamingDetokenizer
from kvcli.runtime.sampling import NOT_FINITE, Sampler, all_finite
from kvcli.telemetry import report
from kvcli.telemetry.counters import Counters


@dataclass
class RunningSequence:
    """A prompt being continued, made by `Engine.sequence`.

    `index` is its place in the report. `reference` is full attention that has read the same prompt, if the sequence is
    compared with it.
    """

    not_state: ClassVar[tuple[str, ...]] = ("logits", "ttft_from_start_ms")

    index: int
    source: str
    sample: int
    prompt_tokens: int
    method: AnyMethod
    counters: Counters
    sampler: Callable[[Tensor], int]
    detokenizer: StreamingDetokenizer
    eos: Collection[int]
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    reference: AnyMethod | None = None
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    ttft_from_start_ms: float | None = None
    """As `ttft_ms`, but from when the user began to wait; None where that is not known."""
    decode_ms: list[float] = field(default_factory=list)
    compile_ms: float = 0.0
    finish_reason: str | None = None
    error: str | None = None
    question: str | None = None
    id: str | None = None
    kv: report.KVOrigin = field(default_factory=report.KVOrigin)
    drafts: report.DraftCounts | None = None
    """None unless full attention checks what the method drafts."""
    prefill: Mapping[str, Any] = field(default_factory=dict)
    """Statistics of a prefill that was not exact."""
    logits: Tensor | None = None
    """Logits [vocab] from which the newest token was chosen."""

    @property
    def running(self) -> bool:
        """Tell whether another token is wanted."""
        return self.finish_reason is None

    @property
    def length(self) -> int:
        """Tokens in the cache: the newest one has no KV yet."""
        return self.prompt_tokens + len(self.token_ids) - 1

    @property
    def greedy(self) -> bool:
        """Tell whether the next token is always the likeliest one by the model's logits alone."""
        return isinstance(self.sampler, Sampler) and self.sampler.likeliest

    def accept(self, logits: Tensor, token: int | None = None) -> str:
        """Choose the next token from logits [vocab] and see whether the sequence ends; return the new text.

        `token` is the choice if it was made already, `NOT_FINITE` if it could not be made. Logits of NaN or infinity
        end the sequence with `finish_reason` "error".
        """
        self.logits = logits
        if token == NOT_FINITE or (token is None and not all_finite(logits)):
            self.error = f"NaN or infinity in the logits of token {len(self.token_ids) + 1} of the output"
            return self.end("error")
        token = self.sampler(logits) if token is None else token
        self.token_ids.append(token)
        if token in self.eos:
            return self.end("eos")
        piece = self.detokenizer.push(token)
        if self.detokenizer.stopped:
            return piece + self.end("stop")
        if len(self.token_ids) >= self.max_tokens:
            return piece + self.end("length")
        return piece

    def end(self, reason: str) -> str:
        """Finish for `reason`; return the text that was held back."""
        self.finish_reason = reason
        return self.detokenizer.finish()

    def footprint(self) -> Footprint:
        """Count the bytes that the sequence holds in each tier.

        If drafts are checked, the method is a copy of the first one, which is gone: what it shared is now its own.
        """
        held = self.method.footprint()
        if self.drafts is None:
            return held
        assert self.reference is not None
        shared = self.kv.shared_bytes
        return Footprint(held.device, held.host + held.shared - shared, shared) + self.reference.footprint()

    def settled(self) -> list[Settled]:
        """List what no later step changes, the counts included: blocking steps have counted all of their work."""
        return [Settled(each, 0, len(each)) for each in (self.token_ids, self.decode_ms, self.counters.counts)]

    def report(self) -> report.Sequence:
        """Make the entry of this sequence in the run's report."""
        thoughts, answer = self.detokenizer.thoughts or (None, None)
        return report.Sequence(
            source=self.source,
            sample=self.sample,
            text=self.detokenizer.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason or "interrupted",
            prompt_tokens=self.prompt_tokens,
            output_tokens=len(self.token_ids),
            timing=report.Timing.of(
                self.prefill_ms, self.ttft_ms, self.decode_ms, self.compile_ms, self.ttft_from_start_ms
            ),
            correction=self.counters.correction(),
            cache=self.counters.cache(),
            steps=self.counters.steps(self.decode_ms),
            method={**self.prefill, **self.method.statistics()},
            error=self.error,
            question=self.question,
            id=self.id,
            kv=self.kv,
            budget=getattr(self.method.config, "budget", None),
            sink=getattr(self.method.config, "sink", None),
            window=getattr(self.method.config, "window", None),
            drafts=self.drafts,
            thoughts=thoughts,
            answer=answer,
        )
