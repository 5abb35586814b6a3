"""From predictions to figures: a mean with its standard error in every cell, and the cost of a variant."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any

from kvcli.inputs.variants import Variant
from kvcli.quality.eval.example import Cell
from kvcli.quality.eval.predictions import Prediction

SCHEMA_VERSION = 1
_LARGEST_MEAN = 700.0  # nats per token, beyond which a perplexity overflows a double


@dataclass(frozen=True)
class Estimate:
    """A value over `examples` with its standard error (None for a single example)."""

    value: float
    stderr: float | None
    examples: int

    @classmethod
    def of(cls, scores: Sequence[float]) -> Estimate:
        """Return the mean in per cent of scores 0..1, one for each example."""
        return cls.mean([100 * score for score in scores])

    @classmethod
    def mean(cls, values: Sequence[float]) -> Estimate:
        """Return the mean of values in their own unit, one for each example."""
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.mean(values), error, len(values))

    @classmethod
    def perplexity(cls, nlls: Sequence[float], tokens: Sequence[int]) -> Estimate:
        """Return the perplexity over all tokens, from every example's negative log-likelihood in nats, and its tokens.

        The error is that of a ratio of two sums over examples, to first order.
        """
        count, total = len(nlls), sum(tokens)
        mean = sum(nlls) / total
        value = math.exp(min(mean, _LARGEST_MEAN))
        if count < 2:
            return cls(value, None, count)
        squares = sum((nll - mean * length) ** 2 for nll, length in zip(nlls, tokens, strict=True))
        return cls(value, value * math.sqrt(squares * count / (count - 1)) / total, count)


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


@dataclass(frozen=True)
class EvaluationTable:
    """The results of a run of `kvcli eval`. `complete` is False if examples are missing."""

    environment: dict[str, Any]
    configuration: dict[str, Any]
    hash: str
    variants: Sequence[Variant]
    results: Sequence[CellScore]
    complete: bool

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
    found = []
    for cell, variant in product(cells, variants):
        if given := _whole(by_place[cell.task, cell.length, cell.depth, variant.label], samples):
            score, passes = _figures(given)
            cost = VariantCost.sum([VariantCost.of(each) for each in given])
            where = variant.label, cell.task, cell.length, cell.depth
            cut = len({each.index for each in given if each.cut_tokens})
            found.append(CellScore(*where, cell.metric, score, passes, cost, _closeness(given), cut))
    return found


def _whole(given: Sequence[Prediction], samples: int) -> list[Prediction]:
    """Leave out examples with missing samples; a text that is fed has only one."""
    counts = Counter(each.index for each in given)
    return [each for each in given if each.score is None or counts[each.index] >= samples]


def _closeness(given: Sequence[Prediction]) -> Closeness | None:
    kls, gaps = ([getattr(each, name) for each in given] for name in ("kl", "nll_gap"))
    return None if None in kls or None in gaps else Closeness(Estimate.mean(kls), Estimate.mean(gaps))


def _figures(given: Sequence[Prediction]) -> tuple[Estimate, dict[int, Estimate]]:
    """Return score and pass@k of the predictions of one variant in one cell."""
    alike = [each.same_top for each in given if each.same_top is not None]
    if alike:
        return Estimate.of(alike), {}
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
