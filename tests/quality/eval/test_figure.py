"""The picture of `kvcli eval`: every format, whole labels and one column's width, whatever was compared."""

from dataclasses import replace
from pathlib import Path

import pytest
from answers import ONE
from pictures import texts_of

from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.variants import Variant
from kvcli.quality.eval.example import Cell
from kvcli.quality.eval.figure import figure
from kvcli.quality.eval.table import EvaluationTable, results
from kvcli.sizes import Share

BUDGETED = ("quest", "freekv", "arkvale", "snapkv", "fier", "loki", "infllm", "raas", "tova", "h2o", "shadowkv")


def variant(name, budget=None):
    return Variant(name, budget, resolve_profile(method=name, overrides={} if budget is None else {"budget": budget}))


def table(names, budgets, lengths=(8192,), depths=(None,), missing=(), task="vt", metric="recall", **more):
    """Two answers of every method in every cell, one right and one wrong, unless `more` says otherwise."""
    variants = [variant(name, budget) for name in names for budget in (budgets if name in BUDGETED else (None,))]
    cells = [Cell(task, length, depth, metric, 2, lambda _: None) for length in lengths for depth in depths]
    answers = [
        replace(
            ONE, task=task, length=cell.length, depth=cell.depth, variant=each.label, index=index, score=float(index)
        )
        for cell in cells
        for each in variants
        for index in range(2)
        if (each.label, cell.length) not in missing
    ]
    answers = [replace(each, **{key: of(each) for key, of in more.items()}) for each in answers]
    return EvaluationTable(
        {}, {"model": "demo", "tasks": [task]}, "", variants, results(cells, variants, answers), True
    )


def drawn(made):
    """The texts of a picture as SVG, and the notes on it."""
    content, notes = figure(made, Path("a.svg"))
    return texts_of(content), notes


@pytest.mark.parametrize(("suffix", "start"), [(".svg", "<svg"), (".pdf", b"%PDF"), (".png", b"\x89PNG")])
def test_every_format_is_made(suffix, start):
    assert figure(table(["full", "quest"], [2048, 4096]), Path("a" + suffix)).content.startswith(start)


def test_scores_stand_over_budgets_with_a_chart_for_each_length():
    made = table(["full", "quest", "freekv"], [2048, 4096], lengths=(8192, 16384), missing={("freekv 2048", 8192)})
    texts, notes = drawn(made)
    assert {"score, %", "budget, tokens", "2K", "4K", "full", "quest", "freekv", "8,192 tokens"} <= set(texts)
    assert texts.count("quest") == 1
    assert notes == ["a.svg shows vt; bars are 95 % intervals"]


@pytest.mark.parametrize("names", [["quest"], ["full"], ["full", *BUDGETED]])
@pytest.mark.parametrize("budgets", [[2048], [2048, 4096, Share("50%")]])
def test_one_method_and_twelve_have_whole_names_at_one_budget_and_at_several(names, budgets):
    texts, _ = drawn(table(names, budgets))
    several = len(budgets) > 1 and names != ["full"]
    labels = [name if several or name not in BUDGETED else f"{name} 2048" for name in names]
    assert [text for text in texts if text.partition(" ")[0] in names] == labels
    assert not any("…" in text for text in texts)
    assert ("50%" in texts) == several


def test_with_one_budget_lengths_or_depths_vary():
    texts, _ = drawn(table(["full", "quest"], [2048], lengths=(4096, 8192)))
    assert {"prompt, tokens", "4K", "8K", "full", "quest 2048"} <= set(texts)
    texts, _ = drawn(table(["full", "quest"], [2048], depths=(0.0, 0.25, 1.0), task="needle_grid"))
    assert {"depth of the needle, %", "0", "25", "100"} <= set(texts)


def test_closeness_and_perplexity_are_drawn_where_there_are_no_scores():
    kl = {"full": 0.0, "quest 2048": 0.9, "quest 4096": 0.01}
    close = {"kl": lambda each: kl[each.variant], "same_top": lambda _: 0.9, "nll_gap": lambda _: 0.0}
    close["score"] = lambda _: None
    made = table(["full", "quest"], [2048, 4096], task="fidelity:a.txt", metric="fidelity", **close)
    texts, notes = drawn(made)
    assert "KL from full attention, nats" in texts
    assert notes[0].endswith("bars are standard errors")
    assert "does not show full: it is 0" in notes[1]
    fed = {"nll": lambda each: 5.0 + each.index, "score": lambda _: None}
    perplexity = table(["full", "quest"], [2048, 4096], task="ppl", metric="ppl", **fed)
    assert "perplexity" in drawn(perplexity)[0]
    scores = table(["full", "quest"], [2048, 4096])
    both = replace(scores, results=[*scores.results, *perplexity.results])
    assert drawn(both)[1][1] == "a.svg does not show ppl: a picture has one kind of figure"


def test_nothing_is_drawn_of_a_run_without_a_result():
    assert figure(replace(table(["full"], []), results=[]), Path("a.svg")) is None
