"""From predictions to figures: an estimate in every cell, by how much it differs from full attention's, and costs."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvcli.inputs.variants import Variant
from kvcli.quality.eval.estimate import Estimate
from kvcli.quality.eval.example import Cell
from kvcli.quality.eval.predictions import Prediction
from kvcli.quality.eval.scorers import OVERLAP
from kvcli.quality.eval.suite import FED

SCHEMA_VERSION = 1
FAILING = 50.0
"""Score of full attention in per cent, below which the model fails a task and a comparison of methods says little."""


def pass_at(samples: int, right: int, k: int) -> float:
    """Return the chance that one of k answers is right, from `samples`, `right` of them right (arXiv 2107.03374)."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


@dataclass(frozen=True)
class VariantCost:
    """The cost of a variant: means over predictions, or None if nothing was decoded.

    `attended` is tokens per KV head and layer of retrieval, `attended_share` of all KV over all layers; `_step` is per
    decode step.
    """

    attended: float | None
    attended_share: float | None
    device_kv_bytes: float
    host_kv_bytes: float
    bytes_to_device_step: float | None
    step_ms: float | None
    steps: int
    heads_checked: int
    heads_corrected: int
    pages_requested: int
    misses: int

    @classmethod
    def sum(cls, costs: Sequence[VariantCost]) -> VariantCost:
        """Return the cost of several together: bytes weighted equally, figures of a step by their steps."""

        def together(name: str) -> Any:
            values = [getattr(cost, name) for cost in costs]
            if name in _HELD:
                return statistics.mean(values)
            if name in _PER_STEP:
                known = [(value, cost.steps) for value, cost in zip(values, costs, strict=True) if value is not None]
                weight = sum(count for _, count in known)
                return sum(value * count for value, count in known) / weight if weight else None
            return sum(values)

        return cls(**{each.name: together(each.name) for each in fields(cls)})

    @classmethod
    def of(cls, prediction: Prediction) -> VariantCost:
        """Return the cost of one prediction."""
        steps = prediction.steps
        figures: dict[str, Any] = {each.name: getattr(prediction, each.name, None) for each in fields(cls)}
        if steps:
            figures |= {
                "bytes_to_device_step": prediction.bytes_to_device / steps,
                "step_ms": None if prediction.decode_ms is None else prediction.decode_ms / steps,
            }
        return cls(**figures)


_PER_STEP = ("attended", "attended_share", "bytes_to_device_step", "step_ms")
_HELD = ("device_kv_bytes", "host_kv_bytes")


@dataclass(frozen=True)
class Closeness:
    """How close a variant comes to full attention on texts that it is fed; a text is one block of the error.

    `kl` is KL(full || variant) of the next token in nats, `nll_gap` by how many nats per token the text is less likely
    than under full attention (the difference of log-perplexities).
    """

    kl: Estimate
    nll_gap: Estimate


@dataclass(frozen=True)
class CellScore:
    """One variant in one cell.

    `score` is a mean in per cent over examples, each the mean of its samples (avg@k). For the metric ppl it is the
    perplexity, for fidelity the tokens in per cent at which full attention has the same likeliest token. `pass_at` maps
    numbers of samples k to how often one of k is entirely right.
    """

    variant: str
    task: str
    length: int | None
    depth: float | None
    metric: str
    score: Estimate
    pass_at: dict[int, Estimate]
    cost: VariantCost
    closeness: Closeness | None = None
    cut: int = 0
    """Examples whose prompts were truncated in the middle to fit the model or --max-length."""
    cut_tokens: int = 0
    """The most tokens that one of them lost."""
    difference: Estimate | None = None
    """From full attention on the same examples, in points of per cent; for ppl in nats per token of log-perplexity."""
    full_fails: bool | None = None
    """Whether full attention itself scores less than `FAILING`; None without it, and for what has no such bound."""


@dataclass(frozen=True)
class EvaluationTable:
    """The results of a run of `kvcli eval`. `complete` is False if examples are missing."""

    environment: dict[str, Any]
    configuration: dict[str, Any]
    hash: str
    variants: Sequence[Variant]
    results: Sequence[CellScore]
    complete: bool

    @property
    def full(self) -> Variant | None:
        """The variant with full attention, with which the others are compared."""
        return full_of(self.variants)

    def to_json(self) -> str:
        """Return one JSON object, `schema_version` first."""
        body = {
            "schema_version": SCHEMA_VERSION,
            "hash": self.hash,
            "complete": self.complete,
            "environment": self.environment,
            "configuration": self.configuration,
            "variants": [variant.as_dict() for variant in self.variants],
            "results": [asdict(result) for result in self.results],
        }
        return json.dumps(body, ensure_ascii=False)


def results(
    cells: Sequence[Cell], variants: Sequence[Variant], predictions: Iterable[Prediction], samples: int = 1
) -> list[CellScore]:
    """Average predictions by cell and variant, in the order of the run; a cell without any is left out.

    An example counts once all of its `samples` are there, because the first ones to end are the short ones.
    """
    by_place: dict[Any, list[Prediction]] = defaultdict(list)
    for prediction in sorted(predictions, key=lambda prediction: (prediction.index, prediction.sample)):
        place = prediction.task, prediction.length, prediction.depth, prediction.variant
        by_place[place].append(prediction)
    full, found = full_of(variants), []
    for cell in cells:
        where = cell.task, cell.length, cell.depth
        every = {variant.label: _whole(by_place[*where, variant.label], samples) for variant in variants}
        compared = every[full.label] if full is not None else []
        fails = fails_by(cell.metric, _figures(compared)[0]) if compared else None
        for label, given in every.items():
            if given:
                score, passes = _figures(given)
                costs = VariantCost.sum([VariantCost.of(each) for each in given])
                cut = {each.index: each.cut_tokens for each in given if each.cut_tokens}
                found.append(
                    CellScore(
                        *(label, *where, cell.metric),
                        score=score,
                        pass_at=passes,
                        cost=costs,
                        closeness=_closeness(given),
                        cut=len(cut),
                        cut_tokens=max(cut.values(), default=0),
                        difference=None if given is compared else _difference(given, compared),
                        full_fails=fails,
                    )
                )
    return found


def full_of(variants: Sequence[Variant]) -> Variant | None:
    """Return the variant with full attention, if there is one."""
    return next((variant for variant in variants if variant.profile.method == "full"), None)


def fails_by(metric: str, score: Estimate) -> bool | None:
    """Tell whether a score of full attention is that of a model that fails the task; None if no bound tells."""
    return None if metric in (*FED, *OVERLAP) else score.value < FAILING


def _whole(given: Sequence[Prediction], samples: int) -> list[Prediction]:
    """Leave out examples with missing samples; a text that is fed has only one."""
    counts = Counter(each.index for each in given)
    return [each for each in given if each.score is None or counts[each.index] >= samples]


def _closeness(given: Sequence[Prediction]) -> Closeness | None:
    tokens = [each.output_tokens for each in given]
    kls, gaps = (
        [value * each.output_tokens for each in given if (value := getattr(each, name)) is not None]
        for name in ("kl", "nll_gap")
    )
    if len(kls) < len(given) or len(gaps) < len(given):
        return None
    return Closeness(Estimate.over_tokens(kls, tokens), Estimate.over_tokens(gaps, tokens))


def _difference(given: Sequence[Prediction], full: Sequence[Prediction]) -> Estimate | None:
    """Compare a variant with full attention on the examples that both have; None without any, or of closeness."""
    if any(each.same_top is not None for each in given):
        return None
    own, others = _scored(given), _scored(full)
    if both := [index for index in own if index in others]:
        return Estimate.difference([own[index] for index in both], [others[index] for index in both])
    nlls = {each.index: each.nll for each in full if each.nll is not None}
    fed = [each for each in given if each.nll is not None and each.output_tokens and each.index in nlls]
    gaps = [(each.nll or 0.0) - nlls[each.index] for each in fed]
    return Estimate.over_tokens(gaps, [each.output_tokens for each in fed]) if fed else None


def _scored(given: Sequence[Prediction]) -> dict[int, float]:
    """Return the score of each example, the mean over its samples; those of texts that are fed have none."""
    scores: dict[int, list[float]] = defaultdict(list)
    for prediction in given:
        if prediction.nll is None and prediction.same_top is None:
            scores[prediction.index].append(prediction.score or 0.0)
    return {index: statistics.mean(each) for index, each in scores.items()}


def _figures(given: Sequence[Prediction]) -> tuple[Estimate, dict[int, Estimate]]:
    """Return score and pass@k of the predictions of one variant in one cell."""
    alike = [(each.same_top * each.output_tokens, each.output_tokens) for each in given if each.same_top is not None]
    if alike:
        same, tokens = zip(*alike, strict=True)
        return Estimate.over_tokens([100 * count for count in same], tokens), {}
    fed = [(each.nll, each.output_tokens) for each in given if each.nll is not None and each.output_tokens]
    if fed:
        nlls, tokens = zip(*fed, strict=True)
        return Estimate.perplexity(nlls, tokens), {}
    scores: dict[int, list[float]] = defaultdict(list)
    for prediction in given:
        scores[prediction.index].append(prediction.score or 0.0)
    figure = Estimate.of([statistics.mean(each) for each in scores.values()])
    samples = min(map(len, scores.values()))
    counts = [2**power for power in range(samples.bit_length()) if 2**power < samples] + [samples]
    passes = {
        k: Estimate.of([pass_at(len(each), sum(score == 1 for score in each), k) for each in scores.values()])
        for k in counts
    }
    return figure, passes if samples > 1 else {}
