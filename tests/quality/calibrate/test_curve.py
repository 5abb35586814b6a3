import math
from dataclasses import replace

import pytest

from kvcli.quality.calibrate.sweep import Cost, PassageSums, Point, choose
from kvcli.quality.fidelity import Fidelity, StepFidelity

COST = Cost("bytes_exposed", "recall", "bytes")


def point(tau, added, bound, cost, mass=0.5, base=0.0):
    return Point(
        settings={"tau": tau},
        loss=base + added,
        loss_bound=base + bound,
        added=added,
        added_bound=bound,
        agreement=1.0,
        mass=mass,
        recall=1.0,
        error=0.0,
        attended=10.0,
        heads_corrected=None,
        bytes_exposed=cost,
        bytes_to_device=0.0,
        device_kv_bytes=0.0,
    )


def test_the_cheapest_whose_bound_is_within_is_chosen():
    points = [point(0.0, 0.005, 0.02, 1), point(0.7, 0.006, 0.009, 5), point(0.8, 0.0, 0.001, 7), point(1.0, 0, 0, 9)]
    chosen = choose(points, COST, 0.01)
    assert chosen.point is points[1]  # the first is cheaper, but only its mean is within
    assert "3 of 4" in chosen.reason
    assert choose(points, COST, 0.02).point is points[0]
    assert choose(points, COST, 0.0).point is points[3]


def test_of_equally_cheap_ones_the_closest_is_chosen():
    points = [point(0.0, 0.004, 0.005, 3), point(0.5, 0.003, 0.006, 3)]
    assert choose(points, COST, 0.01).point is points[1]


def test_where_none_is_within_none_is_chosen_and_the_nearest_named():
    chosen = choose([point(0.0, 0.5, 0.9, 1), point(0.9, 0.1, 0.2, 8)], COST, 0.01)
    assert chosen.point is None
    assert "tau 0.9" in chosen.reason
    assert "0.2" in chosen.reason


def test_a_loss_that_counts_from_the_last_setting_is_told_from_full_attention_too():
    points = [point(0.8, 0.004, 0.006, 1, base=0.369), point(1.0, 0, 0, 9, base=0.369)]
    reason = choose(points, COST, 0.01, relative=True).reason
    assert "add at most 0.01 nats to tau 1.0 (this one 0.004, at most 0.006)" in reason
    assert "from full attention it is 0.373 nats, at most 0.375" in reason


def test_text_that_fits_into_the_budget_says_nothing():
    chosen = choose([replace(point(tau, 0, 0, 0), mass=1.0) for tau in (0.0, 1.0)], COST, 0.01)
    assert chosen.point is None
    assert "longer" in chosen.reason


def tally(losses):
    steps = [StepFidelity(0, 0.5, 0.5, 0.5, 8.0, loss, True) for loss in losses]
    return PassageSums({"tau": 0.5}, Fidelity({}, steps), list(losses), 10, 4, 100, 300, 50)


def test_a_point_is_the_mean_of_the_passages_and_two_standard_errors():
    losses, least = [0.4, 0.1, 0.4, 0.3], [0.1, 0.1, 0.2, 0.0]
    alone, beside = tally(losses).point(), tally(losses).point(least)
    assert alone.loss == beside.loss == pytest.approx(0.3)
    assert alone.added == alone.loss
    assert alone.added_bound == alone.loss_bound == beside.loss_bound > alone.loss
    added = [0.3, 0.0, 0.2, 0.3]
    deviation = math.sqrt(sum((a - 0.2) ** 2 for a in added) / 3)
    assert beside.added == pytest.approx(0.2)
    assert beside.added_bound == pytest.approx(0.2 + 2 * deviation / 2)
    assert alone.heads_corrected == 0.4
    assert alone.bytes_exposed == 25
    assert alone.device_kv_bytes == 12.5
    assert alone.mass is None  # no layer chose anything
    assert tally([0.7]).point().added_bound == 0.7  # one passage says nothing of the spread
