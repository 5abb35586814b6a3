"""Files that are read, mutated with fixed seeds: each is either taken or refused by one clear line."""

import json
import random
import struct
from dataclasses import asdict, replace

import pytest
import torch
from answers import ONE
from safetensors.torch import save

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.variants import Variant
from kvcli.kv.calibration_file import CalibrationMatrices, read_tensor
from kvcli.quality.eval import layout
from kvcli.quality.eval.example import Cell
from kvcli.quality.eval.formats import read_examples
from kvcli.quality.eval.predictions import Predictions
from kvcli.quality.eval.scorers import SCORERS, score
from kvcli.quality.eval.table import EvaluationTable, results

VALUES = [
    None, True, False, 0, -1, 3, 0.5, 1e300, -1e300, 2**63, 10**400, "", " ", "x", "12", "-7", "1.5", "A", "\x1b]0;t",
    "naïve 中文", "{context} {0}", "y" * 5000, [], [[]], ["a"], [1, 2], [[1, 4]], [None], [True], {}, {"a": {"b": []}},
    "qa_f1", "function_choice", "classification", "leading_integers", "first_number", "trec", "hotpotqa", "math_find",
]  # fmt: skip
RAW = [b"", b"[" * 400, b"{" * 400, b"9" * 5000, b"1e999", b"NaN", b"-Infinity", b"\xff", b"\x00", b'"\\ud800"', b"\n"]
ROWS = [
    ("vt.jsonl", {"index": 0, "input": "Hay. What?", "outputs": ["1"], "task": "vt", "question": "What?"}),
    ("any.jsonl", {"context": "c", "input": "i", "answers": ["A"], "all_classes": ["A", "B"], "dataset": "trec"}),
    ("data.jsonl", {"context": "c", "question": "q", "answer": "C"} | {f"choice_{each}": each for each in "ABCD"}),
    ("code_debug.jsonl", {"context": "c", "input": "i", "answer": ["u"], "options": ["u", "v", "w", "x"]}),
    ("math_find.jsonl", {"context": "c", "input": "The largest number of", "answer": [58], "options": ""}),
    ("math_calc.jsonl", {"context": "c", "input": "1 + 3", "answer": [[1, 4]], "options": ""}),
    ("code_run.jsonl", {"context": "c", "input": "func_1(2)", "answer": [7], "options": ""}),
    ("test.jsonl", {"problem": "p", "answer": "1", "unique_id": "u"}),
    ("aime.jsonl", {"problem": "p", "answer": 25, "url": "u"}),
    ("gpqa.jsonl", {"Question": "q", "Correct Answer": "r"} | {f"Incorrect Answer {n}": f"w{n}" for n in (1, 2, 3)}),
    ("mine.jsonl", {"context": "c", "question": "q", "answer": "a", "metric": "qa_f1"}),
]
NEED_LIBRARIES = {"rouge_l", "rouge_l_zh", "rouge_lsum", "qa_f1_zh", "math_verify"}
RUN = {"model": "demo", "seed": 0}


def mutated(rng, entry):
    """An object of JSON with a field changed, dropped, added, or with bytes of its text changed."""
    entry = dict(entry)
    name = rng.choice([*entry, "metric", "extra"])
    kind = rng.randrange(4)
    if kind == 0:
        entry.pop(name, None)
    else:
        entry[name] = rng.choice(VALUES)
    text = json.dumps(entry, ensure_ascii=rng.random() < 0.5).encode()
    return changed(rng, text) if kind == 3 else text


def changed(rng, data):
    """Bytes cut, overwritten or with a stretch put in."""
    at = rng.randrange(len(data))
    kind = rng.randrange(3)
    if kind == 0:
        return data[:at] + data[at + rng.randint(1, 9) :]
    if kind == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    return data[:at] + rng.choice(RAW) + data[at:]


def clear(error):
    """One line with a way out and the exit code of bad usage."""
    for text in (error.what, error.hint):
        assert text
        assert len(text) < 600
        assert "\n" not in text
    assert error.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(("name", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_rows_of_benchmarks(tmp_path, name, row):
    path = tmp_path / name
    rng = random.Random(name)
    taken = 0
    for _ in range(150):
        path.write_bytes(mutated(rng, row))
        try:
            found = read_examples(path)
        except KvcliError as error:
            clear(error)
            continue
        taken += 1
        for example in (example for examples in found.values() for example in examples):
            if example.metric in NEED_LIBRARIES:
                continue
            for answer in ("", "A 12 -7 1.5", "9" * 5000, "the answer is: B"):
                assert 0 <= score(example.metric, answer, example.references, example.choices) <= 1
    assert 10 < taken < 140


@pytest.mark.parametrize("metric", sorted(set(SCORERS) - NEED_LIBRARIES))
def test_answers_of_any_form_are_scored_or_refused_beforehand(tmp_path, metric):
    path = tmp_path / "mine.jsonl"
    for value in VALUES:
        path.write_text(json.dumps({"context": "c", "question": "q", "answer": value, "metric": metric}))
        try:
            ((example,),) = read_examples(path).values()
        except KvcliError as error:
            clear(error)
            continue
        assert 0 <= score(metric, "A 12 -7 1.5", example.references) <= 1


def test_files_of_predictions(tmp_path):
    path = tmp_path / "p.jsonl"
    with Predictions(path, RUN) as predictions:
        predictions.add([ONE])
    header, _ = path.read_bytes().splitlines(keepends=True)
    variant = Variant("full", None, resolve_profile(method="full"))
    cells = [Cell("vt", 700, None, "recall", 2, lambda _: None)]
    rng = random.Random(5)
    taken = 0
    for _ in range(400):
        one = asdict(replace(ONE, index=1, nll=rng.choice([None, 3.5, 1e9]), output_tokens=rng.choice([0, 5])))
        body = mutated(rng, one) if rng.random() < 0.7 else json.dumps(one).encode()
        first = header if rng.random() < 0.7 else mutated(rng, json.loads(header)) + b"\n"
        path.write_bytes(first + json.dumps(asdict(ONE)).encode() + b"\n" + body + b"\n")
        try:
            with Predictions(path, RUN) as predictions:
                found = results(cells, [variant], predictions)
                table = EvaluationTable({}, RUN, "", [variant], found, True)
                layout.tables(table)
                json.loads(table.to_json(), parse_constant=pytest.fail)
        except KvcliError as error:
            clear(error)
            continue
        taken += 1
    assert 40 < taken < 350


def test_calibrated_matrices(tmp_path):
    path = tmp_path / "m.safetensors"
    whole = save({"layer.0": torch.ones(2, 3, 3), "layer.1": torch.ones(2, 3, 3), "heads": torch.ones(2, 2).bool()})
    (size,) = struct.unpack("<Q", whole[:8])
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    rng = random.Random(3)
    taken = 0
    for _ in range(400):
        if rng.random() < 0.5:
            changes = json.loads(json.dumps(header))
            entry = rng.choice([changes, *changes.values()])
            name = rng.choice([*entry, "__metadata__"])
            entry[name] = rng.choice([*VALUES, "F32", "F64", "F8_E4M3", "F4", "BOOL", "I64", [2, 3, 3], [18], [0, 72]])
            text = json.dumps(changes).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        else:
            path.write_bytes(changed(rng, whole[: 8 + size]) + data)
        try:
            read_tensor(str(path), "heads", (2, 2), "heads")
            layers = CalibrationMatrices(str(path), {0: (2, 3, 3), 1: (2, 3, 3)}, "pca")
            assert all(layers[layer].dtype == torch.float32 for layer in (0, 1))
        except KvcliError as error:
            clear(error)
            continue
        taken += 1
    assert 5 < taken < 350
