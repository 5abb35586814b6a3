"""One sequence while it runs: its tokens, its KV, its sampler, and what is known about it so far."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvcli.methods.base import Method
from kvcli.runtime.detokenizer import StreamingDetokenizer
from kvcli.runtime.sampling import Sampler
from kvcli.telemetry import report
from kvcli.telemetry.counters import Counters


@dataclass
class RunningSequence:
    """A prompt being continued. `index` is its place in the report, `length` the tokens whose KV exists."""

    index: int
    source: str
    sample: int
    prompt_tokens: int
    method: Method[Any, Any]
    counters: Counters
    sampler: Callable[[Tensor], int]
    stream: StreamingDetokenizer
    eos: Collection[int]
    max_tokens: int
    prefill_ms: float
    ttft_ms: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    logits: Tensor | None = None
    """What the newest token was chosen from: [vocab]."""

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
        """Tell whether the next token is always the likeliest one."""
        return isinstance(self.sampler, Sampler) and self.sampler.greedy

    def accept(self, logits: Tensor, token: int | None = None) -> str:
        """Choose the next token from logits [vocab] and see whether the sequence ends; returns the new text.

        `token` is the choice where it was made already.
        """
        self.logits = logits
        token = self.sampler(logits) if token is None else token
        self.token_ids.append(token)
        if token in self.eos:
            return self.end("eos")
        piece = self.stream.push(token)
        if self.stream.stopped:
            return piece + self.end("stop")
        if len(self.token_ids) >= self.max_tokens:
            return piece + self.end("length")
        return piece

    def end(self, reason: str) -> str:
        """Finish for `reason`; returns the text that was held back."""
        self.finish_reason = reason
        return self.stream.finish()

    def report(self) -> report.Sequence:
        """Say what became of it."""
        return report.Sequence(
            source=self.source,
            sample=self.sample,
            text=self.stream.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason or "interrupted",
            prompt_tokens=self.prompt_tokens,
            output_tokens=len(self.token_ids),
            timing=report.Timing.of(self.prefill_ms, self.ttft_ms, self.decode_ms),
            correction=self.counters.correction(),
            cache=self.counters.cache(),
            steps=self.counters.steps(self.decode_ms),
            method=self.method.statistics(),
        )
