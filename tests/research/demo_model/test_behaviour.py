"""What is measured of the heads of a model, on the one that ships."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "research" / "demo_model"))

from behaviour import Attention, find, kind, mean, measure, table
from measure_recall import MODEL, load


@pytest.fixture(scope="module")
def found():
    return measure(*load(MODEL), 300, 0)


def test_shares_are_those_of_every_head(found):
    shape = found.asked.shape
    for share in vars(found).values():
        assert share.shape == shape
        assert share.max() <= 1 + 1e-5
    assert min(found.asked.min(), found.sink.min(), found.near.min()) >= 0
    assert (found.asked <= found.asked_by_question).all()


def test_heads_of_the_first_layer_are_local_and_one_head_finds_the_asked_fact(found):
    assert found.near[0].max() > 0.9
    assert found.asked_by_question.max() > 0.4
    assert "retrieval" in table(mean([found, found]))


def test_a_mean_is_taken_by_head_and_kinds_go_by_the_largest_share():
    ones = Attention(*(torch.full((2, 3), value) for value in (0.0, 0.2, 0.4, 0.1, 0.9)))
    twos = Attention(*(torch.full((2, 3), value) for value in (0.4, 0.6, 0.2, 0.1, 0.7)))
    assert mean([ones, twos]).asked_by_question.tolist() == [[pytest.approx(0.4)] * 3] * 2
    assert [kind(0.5, 0.4, 0.3), kind(0.1, 0.4, 0.3), kind(0.1, 0.2, 0.6), kind(0.1, 0.2, 0.2)] == [
        "retrieval",
        "sink",
        "local",
        "spread",
    ]


def test_a_part_that_is_missing_is_an_error():
    assert find([1, 2, 3, 2, 4], [2, 4]) == 3
    with pytest.raises(ValueError, match="does not occur"):
        find([1, 2], [3])
