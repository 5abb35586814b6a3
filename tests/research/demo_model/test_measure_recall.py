"""The shipped checkpoint: its size and format, and that it answers the example prompts."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from kvcli.quality.tasks import make_row
from kvcli.quality.tasks.__main__ import main as write_task

sys.path.append(str(Path(__file__).parents[3] / "research" / "demo_model"))

from measure_recall import CARD, MODEL, answer, hide, load, main, measure

EXAMPLES = Path(__file__).parents[3] / "examples"
PROMPTS = sorted(EXAMPLES.glob("*.txt"))


@pytest.fixture(scope="module")
def loaded():
    return load(MODEL)


def facts(document):
    return dict(re.findall(r"access code of (\w+) is (\d{9})\.", document))


def asked(text):
    document, question = text.rstrip("\n").split("\n\n")
    name = re.search(r"access code of (\w+)", question).group(1)
    return name, facts(document)


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in MODEL.iterdir() if path.is_file()) <= 16 * 2**20


def test_it_is_a_plain_llama_in_single_precision(loaded):
    model, tokenizer = loaded
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"]["rope_type"] == "default"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert config["max_position_embeddings"] == 16384
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id


def test_every_example_is_made_by_the_command_beside_it(tmp_path):
    lines = (EXAMPLES / "README.md").read_text().splitlines()
    commands = [
        shlex.split(line)[3:] for line in lines if line.startswith("python -m kvcli.quality.tasks") and "--text" in line
    ]
    assert len(commands) == len(PROMPTS) == 3
    for command in commands:
        *options, target = command
        assert write_task([*options, str(tmp_path / "made.txt")]) == 0
        assert (tmp_path / "made.txt").read_bytes() == (EXAMPLES / Path(target).name).read_bytes()


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=pytest.mark.exhaustive if "8k" in path.stem else ()) for path in PROMPTS],
)
def test_it_answers_the_examples(loaded, path):
    text = path.read_text(encoding="utf-8")
    name, codes = asked(text)
    assert answer(*loaded, text) == f" The access code of {name} is {codes[name]}."


def test_it_answers_from_the_document_and_not_from_memory(loaded):
    tokenizer = loaded[1]
    rows = [
        make_row("niah_single", length=900, seed=1, index=i, count_tokens=lambda text: len(tokenizer.encode(text)))
        for i in range(2)
    ]
    hidden = hide(*rows)
    assert rows[0].outputs[0] in answer(*loaded, rows[0].input)
    assert rows[0].outputs[0] not in answer(*loaded, hidden.input)
    assert rows[1].outputs[0] in answer(*loaded, hidden.input)


def test_measure_reports_recall_in_per_cent(loaded):
    measured = measure(*loaded, "niah_multikey", 700, rows=3)
    assert (measured.task, measured.length, measured.rows) == ("niah_multikey", 700, 3)
    assert measured.recall == 100.0


def test_tokenizer_loads_by_auto_class():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.chat_template
    assert tokenizer.model_max_length == 16384


def test_the_last_of_several_turns_is_what_is_measured(loaded):
    assert measure(*loaded, "turns", 700, 2).recall == 100


def test_the_card_says_what_its_command_measures():
    lengths, said = (4096, 8192, 16_384), set()
    for line in (MODEL / "README.md").read_text().splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == len(lengths):
            task = name.split("`")[1]
            counts = [re.search(r"\((\d+)\)$", cell) for cell in cells]
            said |= {(task, length, int(n[1])) for length, n in zip(lengths, counts, strict=True) if n}
    assert said == {(task, length, rows) for tasks, length, rows, hidden in CARD if not hidden for task in tasks}


def test_tasks_and_lengths_are_measured_in_turn(capsys):
    main(["--tasks", "niah_single,niah_direct", "--lengths", "512", "--rows", "1", "--hidden", "--threads", "1"])
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["task"], second["task"]) == ("niah_single", "niah_direct")
    assert first["hidden"]
    assert first["recall"] == 0
