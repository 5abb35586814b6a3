"""The page of `kvcli eval`: what stands first, and charts in which nothing covers anything."""

import json
import re
from dataclasses import replace

import pytest
from answers import ONE

from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.variants import Variant
from kvcli.quality.eval.example import Cell
from kvcli.quality.eval.html import page
from kvcli.quality.eval.table import EvaluationTable, results

NAMES = ("full", "quest", "freekv")
VARIANTS = [Variant(name, None, resolve_profile(method=name)) for name in NAMES]


def made(score, depths=(None,)):
    cells = [Cell("vt", length, depth, "recall", 2, lambda _: None) for length in (512, 1024) for depth in depths]
    answers = [
        replace(ONE, length=cell.length, depth=cell.depth, index=index, variant=name, score=score)
        for cell in cells
        for name in NAMES
        for index in range(2)
    ]
    configuration = {"model": "demo", "tasks": ["vt"]}
    return page(EvaluationTable({}, configuration, "", VARIANTS, results(cells, VARIANTS, answers), True))


def charts(text):
    return [json.loads(spec) for spec in re.findall(r'lite\+json">(.*?)</script>', text)]


def test_scores_stand_before_charts_and_maps_side_by_side():
    text = made(1.0, depths=(0.0, 1.0)).partition("</main>")[0]
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == ["Scores", "Score against what is read", "Needle grid", "Costs", "Where this comes from"]
    assert text.index("<table>") < text.index("<figure>")
    (multiples,) = re.findall(r'<div class="multiples">(.*)', text)
    assert multiples.count("<figure>") == 3


@pytest.mark.parametrize(("score", "bottom"), [(1.0, 90), (0.5, 0)])
def test_scores_that_are_all_high_fill_the_axis(score, bottom):
    (trade,) = charts(made(score))
    assert trade["encoding"]["y"]["scale"]["domain"] == [bottom, 100]


def test_points_in_one_place_stand_side_by_side():
    (trade,) = charts(made(1.0))
    places = [(row["shown"], row["score"]) for row in trade["data"]["values"]]
    assert len(set(places)) == len(places) == 6


def test_several_budgets_are_curves_with_their_intervals():
    variants = [Variant("full", None, resolve_profile(method="full"))]
    variants += [
        Variant(name, budget, resolve_profile(method=name, overrides={"budget": budget}))
        for name in ("quest", "freekv")
        for budget in (2048, 4096)
    ]
    cell = Cell("vt", 8192, None, "recall", 2, lambda _: None)
    answers = [
        replace(ONE, length=8192, depth=None, index=index, variant=variant.label, score=float(index))
        for variant in variants
        for index in range(2)
    ]
    text = page(
        EvaluationTable({}, {"model": "demo", "tasks": ["vt"]}, "", variants, results([cell], variants, answers), True)
    )
    assert "<h2>Score against cost</h2>" in text
    curves = [chart for chart in charts(text) if "layer" in chart]
    assert [chart["layer"][0]["encoding"]["x"]["field"] for chart in curves] == ["attended", "device", "moved", "step"]
    rows = curves[0]["data"]["values"]
    assert {row["method"] for row in rows} == {"quest", "freekv"}
    assert {(round(row["low"], 1), row["score"], round(row["high"], 1)) for row in rows} == {(9.5, 50.0, 90.5)}


def test_a_task_that_full_attention_fails_is_explained_below_its_scores():
    text = made(0.25)
    assert "vt †" in text
    assert "the model fails the task" in text
    assert "<caption>less full attention at 512 tokens" in text
    assert "the model fails the task" not in made(1.0)


def test_many_methods_begin_with_a_map_of_their_means():
    budgets = {"full": (None,), **dict.fromkeys(("quest", "freekv", "arkvale", "snapkv", "fier", "h2o"), (2048, 4096))}
    variants = [
        Variant(name, budget, resolve_profile(method=name, overrides={"budget": budget} if budget else {}))
        for name, own in budgets.items()
        for budget in own
    ]
    cell = Cell("vt", 8192, None, "recall", 1, lambda _: None)
    right = {"full", "quest 4096", "quest 2048", "freekv 4096"}
    answers = [
        replace(ONE, length=8192, depth=None, variant=each.label, score=float(each.label in right)) for each in variants
    ]
    text = page(
        EvaluationTable({}, {"model": "demo", "tasks": ["vt"]}, "", variants, results([cell], variants, answers), True)
    )
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings[0] == "At a glance"
    assert headings.index("Scores") == headings.index("Costs") - 1
    rows = charts(text)[0]["data"]["values"]
    assert [row["method"] for row in rows][:6] == ["full", "full", "quest", "quest", "freekv", "freekv"]
    assert [row["score"] for row in rows][:6] == [100, 100, 100, 100, 0, 100]
    assert {row["length, budget"] for row in rows} == {"8,192, 2,048", "8,192, 4,096"}
    assert "same figure under every budget" in text
