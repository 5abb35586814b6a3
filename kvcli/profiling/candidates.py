"""What is run: a method under a profile, by kvcli's own loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from kvcli.engine import engine
from kvcli.floors import Work, step_work
from kvcli.model import Model
from kvcli.profile import Profile
from kvcli.profiling.modules import module_spans
from kvcli.profiling.sources import Load, Source
from kvcli.sampling import Sampler, Sampling
from kvcli.sequence import RunningSequence
from kvcli.stats import Count, Counters
from kvcli.store.cache import Footprint
from kvcli.text import TextStream
from kvcli.timeline import Timeline

# The token that a context ends with: any will do, as long as it is the same in all runs.
_FIRST_TOKEN = 1


@dataclass(frozen=True)
class Run:
    """One run: the wall time of each timed step, and what a method's loop knows beside it."""

    steps_ms: list[float]
    counters: Sequence[Counters] = ()
    footprint: Footprint | None = None
    work: dict[str, Work] = field(default_factory=dict)


class Candidate(Protocol):
    """Something that decodes, and can be run again and again from the same start."""

    @property
    def label(self) -> str:
        """A name that no other candidate has."""

    @property
    def kind(self) -> str:
        """See `report.Case.kind`."""

    @property
    def profile(self) -> Profile | None:
        """Method and settings, for those of kvcli."""

    def run(self, load: Load, timeline: Timeline) -> Run:
        """Decode once. Where `timeline` is on, the step is taken apart on it, if that is possible at all."""


@dataclass(frozen=True)
class Decoding:
    """A method of kvcli, from the context that `source` gives."""

    label: str
    kind: str
    profile: Profile
    model: Model
    source: Source

    def run(self, load: Load, timeline: Timeline) -> Run:
        """See `Candidate.run`; what is timed is `decode`, the loop of `kvcli generate`."""
        with ExitStack() as stack:
            ready = stack.enter_context(engine(self.model, [load.capacity]))
            methods = self.source.methods(ready, self.profile, load, timeline)
            sequences = [
                RunningSequence(
                    index=row,
                    source=self.label,
                    sample=0,
                    prompt_tokens=load.context,
                    method=method,
                    counters=method.context.counters,
                    sampler=Sampler(Sampling(), row, self.model.device),
                    stream=TextStream(self.model.tokenizer),
                    eos=(),
                    max_tokens=load.max_tokens,
                    prefill_ms=0.0,
                    token_ids=[_FIRST_TOKEN],
                )
                for row, method in enumerate(methods)
            ]
            if timeline.enabled:
                stack.enter_context(module_spans(self.model.module, timeline))
            for _ in ready.decode(sequences, timeline):
                pass
        counters = [sequence.counters for sequence in sequences]
        asked, missed = (_total(counters, count) for count in (Count.PAGES_REQUESTED, Count.MISSES))
        held = [(method, sequence.length) for method, sequence in zip(methods, sequences, strict=True)]
        work = step_work(self.model.geometry, self.model.dtype.itemsize, held, missed / asked if asked else 1.0)
        footprint = sum((method.footprint() for method in methods), Footprint())
        return Run(sequences[0].decode_ms[load.warmup :], counters, footprint, work)


def _total(counters: Sequence[Counters], count: Count) -> int:
    return sum(layer[count] for each in counters for step in each.counts for layer in step)
