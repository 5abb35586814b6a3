"""kvcli as a model of lm-evaluation-harness, on a task defined here; skipped where the harness is not installed."""

import json

import pytest

pytest.importorskip("lm_eval", exc_type=ImportError)

from kvcli.errors import KvcliError
from kvcli.quality.eval.harness import KvcliModel
from kvcli.quality.tasks import make_row

SMALL = {"budget": 256, "sink": 32, "window": 32}


@pytest.fixture(scope="module")
def model():
    return KvcliModel(method="freekv", **SMALL)


@pytest.fixture
def task(model, tmp_path):
    """Three documents with a needle each, as the harness wants them."""

    def count_tokens(text):
        return len(model.model.tokenizer.encode(text, add_special_tokens=False))

    rows = [make_row("niah_single", length=600, seed=1, index=index, count_tokens=count_tokens) for index in range(3)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"input": row.input, "value": row.outputs[0]}) + "\n" for row in rows))
    return {
        "task": "needles",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{value}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 30, "do_sample": False},
        "filter_list": [{"name": "digits", "filter": [{"function": "regex", "regex_pattern": "([0-9]{9})"}]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def test_a_local_task_is_answered_through_the_harness(model, task, tmp_path, monkeypatch):
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    manager = TaskManager(include_defaults=False)
    found = lm_eval.simple_evaluate(
        model, tasks=[task], task_manager=manager, apply_chat_template=True, log_samples=False, bootstrap_iters=0
    )
    assert found["results"]["needles"]["exact_match,digits"] == 1.0


def test_stop_strings_and_lengths_are_kept(model):
    class SuiteRequest:
        def __init__(self, **settings):
            self.args = ("The quick dog", settings)

    long, short, stopped = model.generate_until(
        [
            SuiteRequest(max_gen_toks=12, until=[]),
            SuiteRequest(max_gen_toks=3),
            SuiteRequest(max_gen_toks=12, until=" "),
        ]
    )
    assert long.startswith(short)
    assert len(short) < len(long)
    assert " " not in stopped


def test_a_profile_of_another_model_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('method = "quest"\n[provenance]\nmodel = "other"\nmodel_hash = "123456789abc"\n')
    with pytest.raises(KvcliError, match="calibrated for other"):
        KvcliModel(profile=str(file))


def test_likelihoods_are_refused(model):
    with pytest.raises(KvcliError, match="likelihoods"):
        model.loglikelihood([])
    with pytest.raises(KvcliError, match="likelihoods"):
        model.loglikelihood_rolling([])
