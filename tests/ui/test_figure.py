"""Pictures for papers: what is refused before the work, and what is left to the eye."""

from pathlib import Path

import pytest

from kvcli.errors import ExitCode, KvcliError
from kvcli.ui import html
from kvcli.ui.figure import Mark, check_figure, line_chart, places_of


@pytest.mark.parametrize("name", ["a.jpg", "a", "a.html"])
def test_a_format_that_is_none_is_refused(name):
    with pytest.raises(KvcliError) as error:
        check_figure(Path(name))
    assert error.value.exit_code == ExitCode.USAGE
    assert f"--figure {name}: a picture is .svg, .pdf, .png" in error.value.what


def test_a_missing_library_is_said_with_the_way_out(monkeypatch):
    check_figure(Path("a.SVG"))
    monkeypatch.setattr(html, "find_spec", lambda name: None)
    with pytest.raises(KvcliError) as error:
        check_figure(Path("a.svg"))
    assert "a picture needs altair" in error.value.what
    assert "kvcli[html]" in error.value.hint


def test_methods_are_told_apart_by_colour_and_shape_and_stand_apart():
    names = [f"m{number}" for number in range(12)]
    points = [Mark(name, place, 50.0, 40.0, 60.0) for name in ("full", *names) for place in (256, 512)]
    chart = line_chart(points, places_of([256, 512]), "budget", "score", "full").to_dict()
    marks = chart["layer"][2]["encoding"]
    looks = set(zip(marks["color"]["scale"]["range"], marks["shape"]["scale"]["range"], strict=True))
    assert len(looks) == 13
    at = [row["place"] for row in chart["layer"][2]["data"]["values"]]
    assert len(set(at)) == len(at)


def test_places_of_plain_numbers_keep_their_distances():
    assert [(place.at, place.name) for place in places_of([256, 1024])] == [(8.0, "256"), (10.0, "1K")]
    assert [(place.at, place.name) for place in places_of([None, 1500])] == [(0, "files"), (1, "1500")]
    assert [(place.at, place.name) for place in places_of([0.0, 25.0])] == [(0.0, "0"), (25.0, "25")]
