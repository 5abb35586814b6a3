"""Which values of its own a layer gets tried with."""

from kvcli.quality.calibrate.sweep import LayerPoint, layerwise

VALUES = (0.0, 0.7, 1.0)


def curve(*points):
    return [LayerPoint(cost, error) for cost, error in points]


def test_the_layer_that_gains_most_for_its_cost_comes_first():
    curves = {
        1: curve((0, 0.4), (10, 0.1), (20, 0.0)),  # 0.015 a byte, then 0.001
        3: curve((0, 0.2), (100, 0.1), (110, 0.0)),  # 0.0003 a byte, both steps at once 0.00036
    }
    found = layerwise(VALUES, curves, 4, 9)
    assert found == [(0, 0.7, 0, 0), (0, 1.0, 0, 0)]  # then both have the last value, as has been measured


def test_what_costs_nothing_comes_before_all_else_and_what_gains_nothing_never():
    curves = {0: curve((5, 0.2), (5, 0.1), (9, 0.1)), 1: curve((0, 0.9), (1, 0.3), (3, 0.2))}
    assert layerwise(VALUES, curves, 2, 9) == [(0.7, 0.0), (0.7, 1.0)]


def test_no_more_than_asked_for_spread_from_cheap_to_dear():
    curves = {layer: curve((0, 0.5 + layer / 10), (10, 0.2), (30, 0.0)) for layer in range(8)}
    every, some = layerwise(VALUES, curves, 8, 99), layerwise(VALUES, curves, 8, 4)
    assert len(some) == 4
    assert [each for each in every if each in some] == some
    assert some[-1] == every[-1]
    assert all(len(set(each)) > 1 for each in every)


def test_nothing_is_tried_where_layers_have_nothing_to_gain():
    assert layerwise(VALUES, {0: curve((0, 0.1), (1, 0.1), (2, 0.1))}, 1, 9) == []
