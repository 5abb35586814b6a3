import pytest

from kvcli.quality.tasks import recall, string_match_all


@pytest.mark.parametrize(
    ("text", "outputs", "expected"),
    [
        ("The access code of Amber is 482913057.", ["482913057"], 1.0),
        ("482 913 057", ["482913057"], 0.0),
        ("amber, OTTO", ["Amber", "Otto", "Bruno", "Cora"], 0.5),
        ("", ["Amber"], 0.0),
        ("one two", ["two", "one", "three"], 2 / 3),
    ],
)
def test_recall_is_the_share_of_outputs_found(text, outputs, expected):
    assert recall(text, outputs) == pytest.approx(expected)


def test_string_match_all_is_the_mean_in_per_cent():
    # 1 of 1, 1 of 2, 0 of 1: (1 + 0.5 + 0) / 3
    assert string_match_all(["a", "b", "c"], [["A"], ["b", "x"], ["y"]]) == pytest.approx(50.0)


def test_rows_and_answers_must_be_as_many():
    with pytest.raises(ValueError, match="argument"):
        string_match_all(["a"], [["a"], ["b"]])


def test_a_row_without_outputs_cannot_be_scored():
    with pytest.raises(ValueError, match="without outputs"):
        recall("text", [])
