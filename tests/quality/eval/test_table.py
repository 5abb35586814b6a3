"""Figures of a table against figures worked out by hand."""

import math
from dataclasses import replace
from itertools import combinations

import pytest
from answers import ONE

from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.variants import Variant
from kvcli.quality.eval import layout
from kvcli.quality.eval.example import Cell
from kvcli.quality.eval.table import Estimate, EvaluationTable, VariantCost, pass_at, results

FULL = Variant("full", None, resolve_profile(method="full"))


def cell(task="vt", depth=None, metric="recall"):
    return Cell(task, 700, depth, metric, 9, lambda _: None)


def test_a_figure_is_a_mean_with_its_standard_error():
    figure = Estimate.of([1, 0, 1, 1])
    assert figure.value == 75
    assert figure.stderr == pytest.approx(100 * math.sqrt(0.25 / 4))
    assert figure.examples == 4
    assert Estimate.of([0.5]) == Estimate(50, None, 1)


def test_perplexity_counts_tokens_not_examples():
    figure = Estimate.perplexity([2.0, 9.0], [1, 9])
    assert figure.value == pytest.approx(math.exp(1.1))
    # The ratio's residuals are 2 - 1.1 and 9 - 9.9; their variance over two examples, by the mean of 5 tokens.
    assert figure.stderr == pytest.approx(math.exp(1.1) * math.sqrt(2 * 0.81 / 2) / 5)
    assert Estimate.perplexity([2.0], [4]) == Estimate(math.exp(0.5), None, 1)
    assert math.isfinite(Estimate.perplexity([1e9], [1]).value)


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
    assert scores.rows == [("full", "100.0", "50.0", "2.72", "75.0")]
    assert "700 tokens" in title
    assert "ppl is perplexity" in title


def test_closeness_has_a_table_of_its_own_and_no_part_in_the_mean():
    fed = replace(ONE, task="fidelity:a.txt", score=None, decode_ms=None)
    given = [
        ONE,
        replace(fed, kl=0.03, same_top=0.9, nll_gap=0.011),
        replace(fed, index=1, kl=0.05, same_top=1.0, nll_gap=-0.001),
    ]
    made = table([cell(), cell("fidelity:a.txt", metric="fidelity")], given)
    (title, close), (_, scores), (_, costs) = layout.tables(made)
    what = "next token, against full attention; mean ± standard error over 2 stretches of text"
    assert title == f"fidelity:a.txt at 700 tokens: {what}"
    assert close.rows == [("full", "0.040 ±0.010", "95.0 ±5.0", "+0.0050 ±0.0060", "100")]
    assert scores.columns == ("", "vt")
    assert costs.rows[0][-1] == "3.00 ms"
    (alone, *_) = layout.tables(table([cell("fidelity:a.txt", metric="fidelity")], given[1:2]))
    assert alone[1].rows == [("full", "0.030", "90.0", "+0.011", "100")]
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
    assert '"score": {"value": 50.0, "stderr": 50.0, "examples": 2}' in text
    assert '"step_ms": 3.0' in text
