"""Predicted step times: what the committed file says of every method, and how a prediction is put together."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu_predictions as predictions  # noqa: E402

from kvcli.capacity.planning.advice import GPUS, published  # noqa: E402
from kvcli.capacity.planning.estimate import PlannedRun  # noqa: E402
from kvcli.methods import method_names  # noqa: E402
from kvcli.methods.card import GRAPH, read_card  # noqa: E402
from kvcli.models.loading import ModelSpec, read_config  # noqa: E402

COUNTS = json.loads((BENCHMARKS / "results/kernel_counts.json").read_text())["methods"]
KEPT = json.loads((BENCHMARKS / "results/gpu_predictions.json").read_text())


@pytest.fixture(scope="module")
def subject():
    return PlannedRun.of(read_config(ModelSpec(predictions.MODEL, load_format="dummy")), predictions.DTYPE)


def predicted(subject, label, context=32_768, gpu="h200", **changed):
    profile = predictions.resolved(label.partition("-")[0], **changed)
    return predictions.predicted(subject, published(gpu), label, profile, context, COUNTS)


def test_every_method_has_a_row_and_is_predicted_where_a_graph_runs_its_step():
    assert {row["method"] for row in KEPT["rows"]} >= {*method_names()} - {"native"}  # of models of another kind
    for row in KEPT["rows"]:
        name = row["method"].partition("-")[0]
        if row["method"] == name:
            assert (row["step_ms"] is not None) == (read_card(name).gpu_step == GRAPH)
        assert row["step_ms"] is None or row["step_ms"] > row["floor_ms"] + row["kernels_ms"]


@pytest.mark.parametrize(("label", "changed"), [("freekv", {}), ("infinigen", {}), ("fier-offload", {"offload": True})])
def test_the_file_says_what_is_predicted_today(subject, label, changed):
    """`python benchmarks/gpu_predictions.py` writes it."""
    (kept,) = (row for row in KEPT["rows"] if (row["method"], row["context"]) == (label, 32_768))
    today = predicted(subject, label, **changed)
    assert {**today, "step_ms": None} == {**kept, "step_ms": None}
    assert today["step_ms"] == pytest.approx(kept["step_ms"], rel=1e-12)  # Python 3.12 sums otherwise


def test_what_is_recalled_before_attention_is_waited_for(subject):
    rows = {name: predicted(subject, name) for name in ("arkvale", "freekv", "infinigen", "quest")}
    waited = {name: row["exposed_ms"] for name, row in rows.items()}
    assert waited["arkvale"] > waited["freekv"] > waited["infinigen"] == waited["quest"] == 0
    bus = predictions.BUS * GPUS["h200"].bus
    least = rows["arkvale"]["recalled_bytes"] / bus
    beside = predictions.RECALL_SECONDS + predictions.LAST_SECONDS - predictions.ATTENTION_SECONDS
    assert waited["arkvale"] == pytest.approx(1000 * (least + 31 * beside))


AT = [(32_768, 0.1), *((context, corrected) for context in (32_768, 131_072) for corrected in (0.0, 0.3, 1.0))]


def near_what_was_measured(subject, context, corrected, file, monkeypatch):
    monkeypatch.setattr(predictions, "CORRECTED", corrected)
    monkeypatch.setitem(predictions.EXPOSED, "after", corrected)
    cases = {f"freekv {corrected:.0%}": predicted(subject, "freekv", context)["step_ms"]}
    cases |= {name: predicted(subject, name, context)["step_ms"] for name in ("full", "streaming")}
    parts = json.loads((BENCHMARKS / "results" / file).read_text())["parts"]
    rows = [row for part in ("speed", "peers") for row in parts[part]["rows"] if row["context"] == context]
    taken = {row["case"]: row["step_ms"]["median"] for row in rows}
    assert cases == pytest.approx({case: taken[case] for case in cases}, rel=0.05)


@pytest.mark.parametrize(("context", "corrected"), AT)
def test_predictions_are_near_what_was_measured(subject, context, corrected, monkeypatch):
    """They were made before attention recalled on a GPU, and no constant was changed since."""
    near_what_was_measured(subject, context, corrected, "gpu.json", monkeypatch)


@pytest.mark.parametrize(("context", "corrected"), AT)
def test_so_are_those_of_recall_in_front_of_attention(subject, context, corrected, monkeypatch):
    """Two constants are fitted to 30 % of the heads; with fewer or more of them corrected they have to hold, too."""
    for name, value in predictions.MEASURED.items():
        monkeypatch.setattr(predictions, name, value)
    monkeypatch.setitem(COUNTS, "freekv", {**COUNTS["freekv"], "corrected": COUNTS["freekv"]["corrected"] + 1})
    near_what_was_measured(subject, context, corrected, "gpu_before.json", monkeypatch)


def test_a_choice_is_waited_for_where_it_precedes_attention(subject):
    rows = {name: predicted(subject, name)["choice_ms"] for name in ("arkvale", "freekv", "infinigen", "full")}
    assert rows["arkvale"] > rows["freekv"] > rows["infinigen"] == rows["full"] == 0


def test_a_slower_memory_makes_a_longer_step(subject):
    slow, fast = (predicted(subject, "full", 131_072, gpu) for gpu in ("l4", "b200"))
    assert slow["kernels_ms"] == fast["kernels_ms"]
    ratio = (slow["step_ms"] - slow["kernels_ms"]) / (fast["step_ms"] - fast["kernels_ms"])
    assert ratio == pytest.approx(GPUS["b200"].bandwidth / GPUS["l4"].bandwidth, rel=1e-3)
    assert (slow["fits"], fast["fits"]) == (False, True)
