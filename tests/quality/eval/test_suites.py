"""Every suite of a paper's table, run on a tiny checkpoint and made-up files in the forms that the table is about."""

import json
from collections import defaultdict

import pytest
from families import tiny_checkpoint

from kvcli.cli.command import compared
from kvcli.conformance.crossed import some
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.options import Compared
from kvcli.inputs.variants import suites, table_suite
from kvcli.models.loading import ModelSpec
from kvcli.quality.eval.evaluate import evaluate
from kvcli.quality.eval.suite import EvaluationPlan
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.observer import Observer

TEXT = " ".join(f"the dog {number} sleeps under the old tree." for number in range(30))
ROWS = {
    "longbench": {"context": TEXT, "input": "Who?", "answers": ["dog"], "dataset": "qasper", "all_classes": None},
    "longbench2": {
        "context": TEXT,
        "question": "Who?",
        **{f"choice_{letter}": f"the dog {letter}" for letter in "ABCD"},
        "answer": "A",
    },
    "ruler": {"index": 0, "input": f"{TEXT} Who?", "outputs": ["dog"]},
    "infinitebench": {"context": TEXT, "input": "What is the pass key?", "answer": ["17"], "options": []},
    "aime": {"problem": "The dog sleeps under the old tree. Find $m$.", "answer": 25, "url": "u"},
    "gpqa": {
        "Question": f"{TEXT} Which dog sleeps?",
        "Correct Answer": "the first",
        **{f"Incorrect Answer {number}": f"dog {number}" for number in (1, 2, 3)},
    },
    "plain": {"context": TEXT, "question": "Who?", "answer": "dog"},
}
FILES = {
    "paper-freekv": {"longbench_v2": "longbench2"},
    "paper-freekv-generation": {"longgenbench": "plain"},
    "paper-freekv-reasoning": {"aime24": "aime", "gpqa": "gpqa"},
    "paper-shadowkv": {"niah_single_1": "ruler", "vt": "ruler"},
    "paper-shadowkv-longbench": {"qasper": "longbench"},
    "paper-actqkv": {"qasper": "longbench", "passkey": "infinitebench"},
    "paper-fier": {"qasper": "longbench"},
    "paper-refreekv": {"qasper": "longbench", "gpqa": "gpqa", "gsm8k": "plain"},
}
# In place of the papers': ranks for heads of few channels, a share of these short prompts that holds a page.
FITTING = {"paper-shadowkv": ["rank=8"], "paper-freekv": ["rank=8"]}
SHARE = {"paper-shadowkv": "20%"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


def test_every_suite_is_run_here():
    assert set(FILES) == set(suites())


def in_turn(rows):
    """Each method once, each budget with one of them at least: these texts are shorter than most budgets."""
    by_name = defaultdict(list)
    for row in rows:
        by_name[row.name].append(row)
    chosen = [own[place % len(own)] for place, own in enumerate(by_name.values())]
    assert {row.budget for row in chosen} >= {row.budget for row in rows if len(by_name[row.name]) > 1}
    return chosen


@pytest.mark.usefixtures("short_probe")
@pytest.mark.parametrize("name", some(FILES, FILES.keys() - {"paper-fier"}))  # whose file others read as well
def test_a_suite_runs_on_files_in_the_forms_of_its_table(folder, tmp_path, name):
    suite = table_suite(name)
    files = []
    for task, form in FILES[name].items():
        files.append(tmp_path / f"{task}.jsonl")
        files[-1].write_text(json.dumps(ROWS[form]) + "\n")
    budget = SHARE.get(name) or ",".join(suite.budgets) or None
    rows = compared(Compared(profile=suite.profile, budget=budget, settings=FITTING.get(suite.profile, ())))
    variants = in_turn(rows)
    plan = EvaluationPlan(
        ModelSpec(str(folder)),
        variants,
        [str(file) for file in files],
        max_tokens=3,
        max_length=suite.max_length,
        sampling=Sampling(temperature=suite.temperature, top_p=suite.top_p),
    )
    table = evaluate(plan, Observer())
    assert table.complete
    assert {(result.task, result.variant) for result in table.results} == {
        (task, variant.label) for task in FILES[name] for variant in variants
    }


def test_an_unknown_suite_is_a_usage_error_that_names_the_nearest():
    with pytest.raises(KvcliError, match="paper-frekv") as raised:
        table_suite("paper-frekv")
    assert raised.value.exit_code == ExitCode.USAGE
    assert "paper-freekv" in raised.value.hint
