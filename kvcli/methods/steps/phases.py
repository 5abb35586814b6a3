"""A plan of a step carried out for one sequence, phase after phase: what defines to what a step attends.

Each phase is timed and counted where it stands. Whatever overlaps phases, or does them for a batch, must choose the
same and give the same output.

Shapes: q [H, d] -> [H, d]; H query heads, Hk KV heads, d head dimension, k pages or tokens chosen, n candidates.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.query_similarity import query_similarity
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import topk_pages
from kvcli.methods.steps.choices import Best
from kvcli.methods.steps.plan import Correction, FromHost, StepPlan
from kvcli.methods.steps.step import LayerStep, Picked, Read, Remembered
from kvcli.telemetry.counters import Count

if TYPE_CHECKING:
    from kvcli.methods.base import AnyMethod


class Phases(LayerStep):
    """A step of one layer of one sequence, carried out."""

    def __init__(self, method: AnyMethod, layer: int, softmax: Softmax):
        self.method, self.layer, self.softmax = method, layer, softmax
        self.plan: StepPlan = method.step_plan or StepPlan()
        self.cache = method.retrieval[layer]
        self.kept: Remembered = method.remembered[layer]
        self.candidates: range = self.cache.candidates if self.plan.index is not None else range(0)
        self.foretold = False

    def attend(self, q: Tensor) -> Tensor:
        """Attend with q, the newest token appended."""
        plan, cache = self.plan, self.cache
        if plan.turn is not None:
            q = plan.turn.turned(cache, q)
        if plan.index is None or not cache.active:  # nothing is left out, or nothing is there to be left out
            with self.span("attention"):
                out: Tensor = cache.attend(q, self.softmax)
            if plan.evict is not None:
                with self.span("score"):
                    plan.evict.look_back(cache, q, self.softmax)
            return out
        if plan.correction is not None:
            return self._speculate(plan.correction, q)
        picked, self.kept.ahead = self.kept.ahead or self._choose_and_fetch(q), None
        with self.span("attention"):
            return self._attend_to(picked, q)

    def choose_ahead(self, q: Tensor) -> None:
        """Choose and fetch for the next attention, with a query that is foretold; the newest token is yet to come."""
        length = self.cache.length + 1
        if length > self.cache.budget.total:
            self.candidates, self.foretold = self.cache.budget.candidates(length), True
            self.kept.ahead = self._choose_and_fetch(q, later=True)

    @override
    def scores(self, q: Tensor) -> Tensor:
        assert self.plan.index is not None
        with self.span("score"):
            return self.plan.index.scores(self.cache, q, self.candidates, self.softmax)

    @override
    def best(self, scores: Tensor, count: int) -> Tensor:
        with self.span("select"):
            return topk_pages(scores, count) + self.candidates.start

    @override
    def tally(self, **numbers: int) -> None:
        self.method.take_tally(self.layer, numbers)

    @override
    def span(self, name: str) -> AbstractContextManager[None]:
        return self.method.span(name, self.layer)

    def _speculate(self, correction: Correction, q: Tensor) -> Tensor:
        """Attend to the last step's choice, corrected where the query turned; then fetch for the next step."""
        kept = self.kept
        with self.span("correction"):
            corrected = self._corrected(correction, q)  # [Hk] bool
        last, kept.picked = kept.picked, self._choose(q)
        selected = kept.picked.pages  # [Hk, k]
        kept.read = Read(corrected, selected, selected if last is None else last.pages)
        if corrected.any():
            self._fetch(selected, heads=corrected)
        with self.span("attention"):
            out: Tensor = self.cache.attend(q, self.softmax)
        if not corrected.all():  # for the other heads: a corrected one misses nothing any more
            self._fetch(selected, later=True, hidden=True)
        kept.query = q.clone()
        return out

    def _corrected(self, correction: Correction, q: Tensor) -> Tensor:
        """Flag the KV heads that must not reuse: all of them at the first retrieval."""
        heads = len(self.cache.resident)
        if self.kept.query is None:
            self.method.count(self.layer, Count.FIRST_RETRIEVALS, heads)
            return q.new_ones(heads).bool()
        corrected = query_similarity(q, self.kept.query, heads, correction.pooling) < correction.below[self.layer]
        self.method.count_heads(self.layer, Count.HEADS_CHECKED, [1] * heads)
        self.method.count_heads(self.layer, Count.HEADS_CORRECTED, corrected.int().tolist())
        return corrected

    def _choose(self, q: Tensor) -> Picked:
        picked = (self.plan.choose or Best()).pick(self, q)
        self.method.count_selected(self.layer, picked.pages, self.cache.readers)
        return picked

    def _choose_and_fetch(self, q: Tensor, **how: Any) -> Picked:
        picked = self._choose(q)
        if isinstance(self.plan.fetch, FromHost):
            self._fetch(picked.pages, **how)
        return picked

    def _fetch(self, pages: Tensor, hidden: bool = False, **how: Any) -> None:
        """Bring what is missing of pages [Hk, k], see the cache's `recall`; `hidden`: this attention does not wait."""
        with self.span("recall"):
            misses, moved = self.cache.recall(pages, **how)
        self.method.count_recalled(self.layer, misses, moved, hidden)

    def _attend_to(self, picked: Picked, q: Tensor) -> Tensor:
        pages, tokens, kept = picked
        if kept is None:
            return self.cache.attend_selected(q, pages, self.softmax)  # type: ignore[no-any-return]
        return self.cache.attend_tokens(q, tokens, kept, self.softmax)  # type: ignore[no-any-return]
