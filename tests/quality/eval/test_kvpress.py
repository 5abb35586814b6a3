"""A run in the form of kvpress's leaderboard, read as that reads it."""

import ast
import csv
import json
from pathlib import Path

import pytest

from kvcli.errors import KvcliError
from kvcli.inputs.variants import variants
from kvcli.models.loading import ModelSpec
from kvcli.quality.eval.evaluate import evaluate
from kvcli.quality.eval.suite import EvaluationPlan
from kvcli.quality.tasks import make_row
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.observer import Observer


def ruler(path: Path, count: int = 3) -> Path:
    """Write rows as kvpress distributes RULER: of two tasks, the question behind the context."""
    rows = []
    for index in range(count):
        row = make_row(
            "niah_single", length=400, frame=9, seed=0, index=index, count_tokens=lambda text: len(text) // 4
        )
        context = row.input.removesuffix(row.question)
        found = {"context": context, "question": row.question, "answer_prefix": "", "answer": [*row.outputs]}
        rows.append(found | {"task": ("niah_single_1", "qa_1")[index % 2], "max_new_tokens": 12})
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def plan(task, output, methods=("full", "snapkv"), **options):
    settings = {"snapkv.budget": "25%", "snapkv.window": "16"} if "snapkv" in methods else {}
    chosen = variants(methods, (), [], settings)
    sampling = options.pop("sampling", Sampling())
    return EvaluationPlan(ModelSpec(), chosen, [str(task)], sampling=sampling, kvpress=output, **options)


def reported(folder):
    """Read a folder as kvpress and its leaderboard do: tables, JSON, YAML."""
    yaml = pytest.importorskip("yaml")
    with (folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((folder / "metrics.json").read_text()), yaml.safe_load((folder / "config.yaml").read_text())


def string_match(rows):
    """Score as kvpress does (benchmarks/ruler/calculate_metrics.py): the best reference for qa, or the share found."""
    answers = [(ast.literal_eval(row["answer"]), row["predicted_answer"].lower()) for row in rows]
    hits = [[answer.lower() in said for answer in wanted] for wanted, said in answers]
    best = rows[0]["task"].startswith("qa")
    return round(100 * sum(max(each) if best else sum(each) / len(each) for each in hits) / len(rows), 2)


def test_a_run_is_written_as_kvpress_writes_it(tmp_path):
    path = ruler(tmp_path / "4096" / "test-00000-of-00001.jsonl")
    table = evaluate(plan(f"requests:{path}", tmp_path / "results"), Observer())
    full, cut = sorted(each.name for each in (tmp_path / "results").iterdir())
    assert full == f"ruler__4096__{table.configuration['model']}__full__0.00"
    assert "__snapkv_25__0." in cut
    for folder, label, press in ((full, "full", "full"), (cut, "snapkv 25%", "snapkv_25")):
        rows, metrics, config = reported(tmp_path / "results" / folder)
        assert [row["task"] for row in rows] == ["niah_single_1", "qa_1", "niah_single_1"]
        assert all(row["question"] for row in rows)
        assert {row["max_new_tokens"] for row in rows} == {"12"}
        assert "context" not in rows[0]
        for task in metrics:
            assert metrics[task]["string_match"] == string_match([row for row in rows if row["task"] == task])
            (score,) = (each.score.value for each in table.results if (each.task, each.variant) == (task, label))
            assert metrics[task]["string_match"] == round(score, 2)
        assert (config["dataset"], config["data_dir"], config["press_name"]) == ("ruler", "4096", press)
        assert (config["query_aware"], config["fraction"]) == (False, 1)
        assert f"{config['compression_ratio']:.2f}" == folder.rpartition("__")[2]
    assert 0.5 < config["compression_ratio"] < 0.8  # a quarter of the prompt is kept


def test_a_part_of_the_rows_and_the_question_first_are_told(tmp_path):
    path = ruler(tmp_path / "own" / "vt.jsonl", 4)
    evaluate(plan(path, tmp_path / "results", ["full"], limit=1), Observer())
    (folder,) = (tmp_path / "results").iterdir()
    assert folder.name.endswith("__full__0.00__fraction0.500__query_aware")
    rows, _, config = reported(folder)
    assert config["query_aware"]
    assert config["data_dir"] is None
    assert {row["question"] for row in rows} == {""}


@pytest.mark.parametrize("samples", [1, 2])
def test_another_run_is_refused_before_the_weights_are_read(tmp_path, samples):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"context": "a", "question": "b", "answer": "c", "metric": "contains"}))
    sampling = Sampling(num_samples=samples, temperature=1.0)
    with pytest.raises(KvcliError, match="--kvpress"):
        evaluate(plan(path, tmp_path / "results", ["full"], sampling=sampling), Observer())
    with pytest.raises(KvcliError, match="--kvpress"):
        evaluate(plan("vt", tmp_path / "results", ["full"]), Observer())
    assert not (tmp_path / "results").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    path = ruler(tmp_path / "4096" / "vt.jsonl")
    (tmp_path / "results").write_text("")
    with pytest.raises(KvcliError, match=r"--kvpress .*results"):
        evaluate(plan(path, tmp_path / "results", ["full"]), Observer())
