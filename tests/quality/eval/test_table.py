"""Figures of a table against figures worked out by hand."""

import math
from dataclasses import replace
from itertools import combinations

import pytest
from answers import ONE

from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.variants import Variant
from kvcli.quality.eval import layout
from kvcli.quality.eval.estimate import Estimate
from kvcli.quality.eval.example import Cell
from kvcli.quality.eval.table import EvaluationTable, VariantCost, pass_at, results

FULL = Variant("full", None, resolve_profile(method="full"))


def cell(task="vt", depth=None, metric="recall"):
    return Cell(task, 700, depth, metric, 9, lambda _: None)


def test_a_figure_is_a_mean_with_its_standard_error():
    figure = Estimate.of([1, 0, 1, 1])
    assert figure.value == 75
    assert figure.stderr == pytest.approx(100 * math.sqrt(0.25 / 4))
    assert figure.examples == 4
    alone = Estimate.of([0.5])
    assert (alone.value, alone.stderr, alone.examples) == (50, None, 1)


@pytest.mark.parametrize(("samples", "right"), [(5, 0), (5, 1), (5, 3), (4, 4)])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples, right, k):
    draws = list(combinations([True] * right + [False] * (samples - right), k))
    assert pass_at(samples, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_samples_of_an_example_are_averaged_before_examples_are():
    given = [replace(ONE, index=i, sample=s, score=x) for i, s, x in [(0, 0, 1), (0, 1, 0), (1, 0, 0.5), (1, 1, 0.5)]]
    (result,) = results([cell()], [FULL], given)
    assert result.score == Estimate.of([0.5, 0.5])
    assert set(result.pass_at) == {1, 2}
    assert result.pass_at[1] == Estimate.of([0.5, 0])
    assert result.pass_at[2] == Estimate.of([1, 0])


def test_an_example_of_which_samples_are_missing_does_not_count():
    given = [replace(ONE, index=i, sample=s, score=x) for i, s, x in [(0, 0, 1), (0, 1, 0), (1, 0, 1)]]
    (result,) = results([cell()], [FULL], given, 2)
    assert result.score == Estimate.of([0.5])
    fed = replace(ONE, nll=2.0, score=None)
    assert results([cell(metric="ppl")], [FULL], [fed], 2)[0].score.examples == 1
    assert results([cell()], [FULL], given[2:], 2) == []


def test_costs_weigh_every_step_the_same():
    cost = VariantCost.sum(
        [VariantCost.of(ONE), VariantCost.of(replace(ONE, steps=12, decode_ms=60.0, attended=20.0, bytes_to_device=0))]
    )
    assert (cost.steps, cost.step_ms, cost.attended, cost.bytes_to_device_step) == (16, 4.5, 40, 5)
    assert (cost.heads_checked, cost.heads_corrected, cost.pages_requested, cost.misses) == (12, 6, 20, 8)
    nothing = VariantCost.of(replace(ONE, steps=0, attended=None, attended_share=None))
    assert nothing.step_ms is None
    assert VariantCost.sum([nothing]).attended is None
    assert VariantCost.sum([nothing, VariantCost.of(ONE)]).attended == 100


def table(cells, given, variants=(FULL,)):
    return EvaluationTable({}, {"model": "demo", "tasks": []}, "", variants, results(cells, variants, given), True)


def test_results_follow_the_run_whatever_the_order_of_predictions():
    given = [replace(ONE, task=task, index=i, score=i / 2) for task in ("fwe", "vt") for i in (1, 0, 2)]
    cells = [cell("vt"), cell("fwe"), cell("cwe")]
    assert [result.task for result in results(cells, [FULL], given)] == ["vt", "fwe"]
    assert results(cells, [FULL], given) == results(cells, [FULL], given[::-1])


def test_the_mean_over_tasks_leaves_perplexity_out():
    given = [replace(ONE, task="vt"), replace(ONE, task="fwe", score=0.5), replace(ONE, task="ppl", nll=5.0)]
    (title, scores), *_ = layout.tables(table([cell("vt"), cell("fwe"), cell("ppl", metric="ppl")], given))
    assert scores.columns == ("", "vt", "fwe", "ppl", "mean")
    assert scores.rows == [("full", "100.0 (21 to 100)", "50.0 (5 to 95)", "2.72 (n = 1)", "75.0 (30 to 97)")]
    assert "700 tokens" in title
    assert "ppl is perplexity ± standard error, over 5 tokens in 1 text" in title


def test_closeness_has_a_table_of_its_own_and_no_part_in_the_mean():
    fed = replace(ONE, task="fidelity:a.txt", score=None, decode_ms=None)
    given = [
        ONE,
        replace(fed, kl=0.03, same_top=0.9, nll_gap=0.011),
        replace(fed, index=1, kl=0.05, same_top=1.0, nll_gap=-0.001),
    ]
    made = table([cell(), cell("fidelity:a.txt", metric="fidelity")], given)
    (title, close), (_, scores), (_, costs) = layout.tables(made)
    what = "next token, against full attention; mean ± standard error over 10 tokens in 2 texts"
    assert title == f"fidelity:a.txt at 700 tokens: {what}"
    assert close.rows == [("full", "0.040 ±0.010", "95.0 ±5.0", "+0.0050 ±0.0060", "100")]
    assert scores.columns == ("", "vt")
    assert costs.rows[0][-1] == "3.00 ms"
    (alone, *_) = layout.tables(table([cell("fidelity:a.txt", metric="fidelity")], given[1:2]))
    assert alone[1].rows == [("full", "0.030 (n = 1)", "90.0 (n = 1)", "+0.011 (n = 1)", "100")]
    assert layout.overview(made).means["full"][0].value == 100


def test_heat_maps_have_a_row_a_depth_and_a_gap_where_nothing_was_asked():
    given = [replace(ONE, task="needle_grid", depth=depth, score=score) for depth, score in [(0.0, 1), (1.0, 0)]]
    given.append(replace(ONE, task="needle_grid", depth=0.0, length=99))
    cells = [cell("needle_grid", depth) for depth in (0.0, 1.0)]
    (found,) = layout.heat_maps(table([*cells, replace(cells[0], length=99)], given))
    assert (found.rows, found.columns) == (["0 %", "100 %"], ["99", "700"])
    assert found.values == [[100, 100], [None, 0]]


def test_json_has_every_figure():
    text = table([cell()], [ONE, replace(ONE, index=1, score=0.0)]).to_json()
    assert text.startswith('{"schema_version": 1, ')
    assert '"score": {"value": 50.0, "stderr": 50.0, "examples": 2, "low": 9.4' in text
    assert '"step_ms": 3.0' in text


QUEST = Variant("quest", None, resolve_profile(method="quest"))


def answers(task, variant, scores, **more):
    return [replace(ONE, task=task, variant=variant, index=i, score=score, **more) for i, score in enumerate(scores)]


def test_methods_are_compared_with_full_attention_on_the_documents_that_both_have():
    given = [*answers("vt", "full", [1, 1, 0, 1]), *answers("vt", "quest", [0, 1, 0])]
    made = table([cell()], given, (FULL, QUEST))
    full, quest = made.results
    assert full.difference is None
    assert quest.difference == Estimate.difference([0, 1, 0], [1, 1, 0])
    (_, (title, apart), _) = layout.tables(made)
    assert title == "less full attention at 700 tokens: points of % (95 % interval), on the same documents"
    assert apart.rows == [("quest", "-33.3 (-86 to +46)")]
    alone = table([cell()], answers("vt", "quest", [1]), (QUEST,))
    assert (alone.results[0].difference, alone.results[0].full_fails) == (None, None)
    assert [title.partition(" ")[0] for title, _ in layout.tables(alone)] == ["score", "cost"]


def test_perplexity_is_compared_in_nats_per_token():
    fed = {"task": "ppl", "score": None}
    given = [replace(ONE, **fed, index=i, nll=nll) for i, nll in enumerate((5.0, 6.0))]
    given += [replace(ONE, **fed, index=i, nll=nll, variant="quest") for i, nll in enumerate((5.5, 6.0))]
    made = table([cell("ppl", metric="ppl")], given, (FULL, QUEST))
    assert made.results[1].difference == Estimate.over_tokens([0.5, 0.0], [5, 5])
    (_, (title, apart), _) = layout.tables(made)
    assert title.endswith("of ppl nats per token ± standard error, on the same documents")
    assert apart.rows == [("quest", "+0.050 ±0.050")]
    assert [result.full_fails for result in made.results] == [None, None]


def test_a_task_that_full_attention_fails_is_marked_and_the_mark_explained():
    cells = [cell("vt"), cell("cwe"), cell("hotpotqa", metric="qa_f1")]
    given = [
        each
        for name in ("full", "quest")
        for task, scores in {"vt": [1, 1], "cwe": [0.1, 0.3], "hotpotqa": [0.2, 0.2]}.items()
        for each in answers(task, name, scores)
    ]
    made = table(cells, given, (FULL, QUEST))
    assert [result.full_fails for result in made.results] == [False, False, True, True, None, None]
    ((_, scores), *_) = layout.tables(made)
    assert scores.columns == ("", "vt", "cwe †", "hotpotqa", "mean")
    ((mark, why),) = layout.notes(made)
    assert mark == "†"
    assert why.endswith(
        "less than 50 %: the model fails the task, and a comparison of methods by it says little: cwe at 700 (20 %)"
    )
    assert layout.notes(table(cells[:1], given, (FULL, QUEST))) == []


def test_the_title_and_the_json_say_how_much_was_truncated():
    made = table([cell()], [*answers("vt", "full", [1], cut_tokens=7), replace(ONE, index=1, cut_tokens=90)])
    ((title, _), *_) = layout.tables(made)
    assert "documents a task: 2, 2 of them truncated in the middle by up to 90 tokens" in title
    assert '"cut": 2, "cut_tokens": 90' in made.to_json()


def test_bounds_of_a_narrow_interval_have_a_digit_more():
    assert layout.share(Estimate(96.21, 0.5, 2000, 95.28, 96.96)) == "96.2 (95.3 to 97.0)"
    assert layout.share(Estimate(5.0, None, 1, 0.4, 60.2)) == "5.00 (0 to 60)"
    assert layout.signed(Estimate(0.0, 0.0, 3, -55.4, 55.4)) == "+0.0 (-55 to +55)"
