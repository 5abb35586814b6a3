"""A mean with its certainty: of shares an interval that is never empty, of other figures a standard error.

A share lies in [0, 1] and has a 95 % interval by Wilson's score (1927): three right answers of three are 100 % (44 to
100), not 100 % ±0. Scores between 0 and 1 vary less than right-or-wrong ones of the same mean, so that for them it is
wide rather than narrow. The difference of two shares on the same examples has Wald's interval with the adjustment of
Bonett and Price (2012), which adds one example that either side wins. A mean of several tasks has the square-and-add
interval (MOVER; Zou and Donner, 2008).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LARGEST_MEAN = 700.0  # nats per token, beyond which a perplexity overflows a double
_Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A value over `examples`, with its standard error (None for a single example).

    `low` and `high` are its 95 % interval, of shares and their differences alone. A figure of texts that are fed has
    the number of `tokens` that it is over.
    """

    value: float
    stderr: float | None
    examples: int
    low: float | None = None
    high: float | None = None
    tokens: int | None = None

    @classmethod
    def of(cls, scores: Sequence[float]) -> Estimate:
        """Return the mean in per cent of scores 0..1, one for each example, with Wilson's interval."""
        count, share = len(scores), statistics.mean(scores)
        weight = _Z * _Z / count
        centre = (share + weight / 2) / (1 + weight)
        half = math.sqrt(weight * (share * (1 - share) + weight / 4)) / (1 + weight)
        low, high = max(0.0, centre - half), min(1.0, centre + half)
        return cls(100 * share, _error([100 * score for score in scores]), count, 100 * low, 100 * high)

    @classmethod
    def difference(cls, scores: Sequence[float], others: Sequence[float]) -> Estimate:
        """Return in points of per cent by how much scores 0..1 lie above `others` on the same examples."""
        apart = [score - other for score, other in zip(scores, others, strict=True)]
        count = len(apart) + 2
        centre = sum(apart) / count
        squares = (sum(each * each for each in apart) + 2) / count
        half = _Z * math.sqrt((squares - centre * centre) / count)
        low, high = max(-1.0, centre - half), min(1.0, centre + half)
        return cls(
            100 * statistics.mean(apart), _error([100 * each for each in apart]), len(apart), 100 * low, 100 * high
        )

    @classmethod
    def over_tokens(cls, sums: Sequence[float], tokens: Sequence[int]) -> Estimate:
        """Return the mean over all tokens of several texts, from the sum over each and its number of tokens.

        The tokens of a text depend on each other, so a text is one block of the error: that of a ratio of two sums over
        blocks, to first order. Of blocks of one length it is that of the mean of their means.
        """
        count, total = len(sums), sum(tokens)
        mean = sum(sums) / total
        if count < 2:
            return cls(mean, None, count, tokens=total)
        squares = sum((each - mean * length) ** 2 for each, length in zip(sums, tokens, strict=True))
        return cls(mean, math.sqrt(squares * count / (count - 1)) / total, count, tokens=total)

    @classmethod
    def perplexity(cls, nlls: Sequence[float], tokens: Sequence[int]) -> Estimate:
        """Return the perplexity over all tokens, from every text's negative log-likelihood in nats, and its tokens."""
        log = cls.over_tokens(nlls, tokens)
        value = math.exp(min(log.value, _LARGEST_MEAN))
        return cls(value, None if log.stderr is None else value * log.stderr, log.examples, tokens=log.tokens)


def mean(figures: Sequence[Estimate]) -> Estimate:
    """Return the mean over tasks, each weighted equally; their errors are independent of each other."""
    value = statistics.mean(figure.value for figure in figures)
    low = _together([None if each.low is None else each.value - each.low for each in figures])
    high = _together([None if each.high is None else each.high - each.value for each in figures])
    tokens = [figure.tokens for figure in figures if figure.tokens is not None]
    return Estimate(
        value,
        _together([figure.stderr for figure in figures]),
        sum(figure.examples for figure in figures),
        None if low is None else value - low,
        None if high is None else value + high,
        sum(tokens) if tokens else None,
    )


def by_task(given: Iterable[tuple[str, Estimate]]) -> dict[str, Estimate]:
    """Average the figures of each task, such as those of several depths."""
    figures: dict[str, list[Estimate]] = {}
    for task, figure in given:
        figures.setdefault(task, []).append(figure)
    return {task: mean(own) for task, own in figures.items()}


def _error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _together(errors: Sequence[float | None]) -> float | None:
    """Return the error of a mean of figures with independent errors; None if one is not known."""
    known = [error for error in errors if error is not None]
    return math.sqrt(sum(error**2 for error in known)) / len(errors) if len(known) == len(errors) else None
