"""Intervals and errors against published and hand-made figures."""

import math
import statistics

import pytest

from kvcli.quality.eval.estimate import Estimate, by_task, mean


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 25.53, 36.62), (15, 148, 6.24, 16.05), (0, 20, 0, 16.11), (1, 29, 0.61, 17.18)],
)
def test_the_interval_of_a_share_is_wilsons(right, count, low, high):  # the examples of Newcombe (1998), table I
    figure = Estimate.of([1.0] * right + [0.0] * (count - right))
    assert (figure.low, figure.high) == (pytest.approx(low, abs=0.005), pytest.approx(high, abs=0.005))


@pytest.mark.parametrize("count", [1, 3, 20])
def test_examples_that_are_all_right_or_all_wrong_leave_room_for_doubt(count):
    right, wrong = Estimate.of([1.0] * count), Estimate.of([0.0] * count)
    assert right.low < 84 < right.value == right.high == 100
    assert wrong.low == wrong.value == 0 < 16 < wrong.high
    assert right.low == pytest.approx(100 - wrong.high)


def test_a_difference_is_paired_and_has_the_interval_of_bonett_and_price():
    mine, others = [1, 1, 0, 0, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1, 0, 0]
    figure = Estimate.difference(mine, others)
    won, lost = (1 + 1) / (8 + 2), (3 + 1) / (8 + 2)
    half = statistics.NormalDist().inv_cdf(0.975) * math.sqrt((won + lost - (won - lost) ** 2) / (8 + 2))
    assert figure.value == pytest.approx(-25)
    assert (figure.low, figure.high) == (
        pytest.approx(100 * (won - lost - half)),
        pytest.approx(100 * (won - lost + half)),
    )
    same = Estimate.difference([0.5] * 20, [0.5] * 20)
    assert same.value == 0
    assert -same.low == same.high == pytest.approx(12.6, abs=0.05)
    assert Estimate.difference([1] * 3, [0] * 3).high == 100


def test_pairs_tell_apart_what_two_intervals_do_not():
    full, method = [1.0] * 30 + [0.0] * 30, [1.0] * 20 + [0.0] * 40
    assert Estimate.of(method).high > Estimate.of(full).low
    assert Estimate.difference(method, full).high < 0


def test_the_error_over_tokens_is_that_of_the_means_of_blocks():
    sums, tokens = [20.0, 26.0, 31.0], [10, 10, 10]
    figure = Estimate.over_tokens(sums, tokens)
    assert (figure.value, figure.tokens, figure.examples) == (pytest.approx(77 / 30), 30, 3)
    assert figure.stderr == pytest.approx(statistics.stdev([2.0, 2.6, 3.1]) / math.sqrt(3))
    assert figure.low is figure.high is None
    assert Estimate.over_tokens([20.0], [10]) == Estimate(2.0, None, 1, tokens=10)


def test_perplexity_counts_tokens_not_examples():
    figure = Estimate.perplexity([2.0, 9.0], [1, 9])
    assert figure.value == pytest.approx(math.exp(1.1))
    # The ratio's residuals are 2 - 1.1 and 9 - 9.9; their variance over two examples, by the mean of 5 tokens.
    assert figure.stderr == pytest.approx(math.exp(1.1) * math.sqrt(2 * 0.81 / 2) / 5)
    assert figure.tokens == 10
    assert Estimate.perplexity([2.0], [4]) == Estimate(math.exp(0.5), None, 1, tokens=4)
    assert math.isfinite(Estimate.perplexity([1e9], [1]).value)


def test_the_interval_of_a_mean_adds_the_squares_of_both_sides():
    given = [Estimate(60, 3, 4, 50, 64), Estimate(80, 4, 4, 56, 83)]
    assert mean(given) == Estimate(70, 2.5, 8, 70 - 13, 70 + 2.5)
    assert mean(given[:1]) == given[0]
    assert mean([given[0], Estimate(3.0, None, 1, tokens=5)]) == Estimate(31.5, None, 5, tokens=5)
    grid = by_task([("grid", given[0]), ("vt", given[1]), ("grid", given[1])])
    assert grid == {"grid": mean(given), "vt": given[1]}
