import pytest

from kvcli.quality.tasks import recall


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


def test_a_row_without_outputs_cannot_be_scored():
    with pytest.raises(ValueError, match="without outputs"):
        recall("text", [])
