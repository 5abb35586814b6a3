"""Rows of every task: determinism, length, depth, uniqueness of the needle and RULER's row format."""

import json
import random
import re
from collections import Counter

import pytest

from kvcli.errors import ExitCode, KvcliError
from kvcli.quality.tasks import TASKS, make_row, recall
from kvcli.quality.tasks.__main__ import main
from kvcli.quality.tasks.phrases import NAMES, VOCABULARY, sentence, sentences

SCATTERED = ("fwe", "cwe", "counting", "records_json")  # what they ask for stands all over the document
DERIVED = ("counting", "records_json")  # their outputs stand in no document


def count_tokens(text):
    """One token a word, a mark or a group of three digits."""
    return len(re.findall(r"[A-Za-z]+|\d{1,3}|[^\sA-Za-z\d]", text))


def row(task, *, length=777, seed=3, **options):
    return make_row(task, length=length, seed=seed, count_tokens=count_tokens, **options)


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_row(task):
    assert row(task, index=2) == row(task, index=2)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("change", [{"seed": 4}, {"index": 1}, {"split": "train"}])
def test_another_seed_index_or_split_is_another_row(task, change):
    first, second = row(task), row(task, **change)
    assert first.document != second.document
    assert first.outputs != second.outputs


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [501, 777, 2048])
def test_length_is_reached_and_never_passed(task, length):
    got = row(task, length=length)
    assert got.length == count_tokens(got.input)
    # Short by less than one sentence of filler; the word lists of fwe round every count down.
    slack = {"fwe": 40, "niah_multikey_3": 70}.get(task, 25)
    assert length - slack <= got.length <= length


@pytest.mark.parametrize("task", [task for task in TASKS if task not in SCATTERED])
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.9, 1.0])
def test_depth_is_honoured(task, depth):
    got = row(task, length=1500, depth=depth)
    assert got.depth == pytest.approx(depth, abs=0.03)
    # What `depth` is about, measured in characters: a chain's number, otherwise the first value asked for.
    needle = got.document.index(got.outputs[-1] if task == "vt" else got.outputs[0])
    assert needle / len(got.document) == pytest.approx(depth, abs=0.06)


@pytest.mark.parametrize("seed", range(5))
def test_depth_is_spread_when_it_is_not_given(seed):
    depths = [row("niah_single", seed=seed, index=i).depth for i in range(12)]
    assert min(depths) < 0.4 < 0.6 < max(depths)


@pytest.mark.parametrize("task", ["niah_single", "niah_multikey", "niah_multiquery", "niah_multivalue"])
def test_each_needle_stands_once_in_the_document_and_never_in_the_question(task):
    got = row(task)
    for value in got.outputs:
        assert re.fullmatch(r"\d{9}", value)
        assert got.document.count(value) == 1
        assert value not in got.question


def test_single_states_one_fact_and_multikey_many_of_the_same_form():
    stated = re.compile(r"access code of (\w+) is (\d{9})\.")
    assert len(stated.findall(row("niah_single").document)) == 1
    facts = stated.findall(row("niah_multikey", length=1601, spacing=80).document)
    assert len(facts) == 1601 // 80
    assert len({name for name, _ in facts}) == len(facts)


def test_multikey_asks_for_the_fact_whose_value_it_expects():
    got = row("niah_multikey")
    name = re.search(r"code of (\w+)", got.question).group(1)
    assert f"access code of {name} is {got.outputs[0]}." in got.document


def test_multivalue_expects_all_values_of_the_name_in_the_order_of_the_document():
    got = row("niah_multivalue", values=3)
    name = re.search(r"codes of (\w+)", got.question).group(1)
    assert re.findall(rf"code of {name} is (\d{{9}})\.", got.document) == list(got.outputs)
    assert len(got.outputs) == 3


def test_multiquery_names_every_name_it_expects_a_value_of():
    got = row("niah_multiquery", queries=3)
    for value in got.outputs:
        name = re.search(rf"code of (\w+) is {value}\.", got.document).group(1)
        assert name in got.question


def test_vt_chain_can_be_followed():
    got = row("vt", hops=3)
    reached = [re.search(r"value of (\w+)", got.question).group(1)]
    while step := re.search(rf"The value of {reached[-1]} is (\w+)\.", got.document):
        reached.append(step.group(1))
    assert tuple(reached[1:]) == got.outputs
    assert len(got.outputs) == 4
    assert re.fullmatch(r"\d{9}", got.outputs[-1])


def test_fwe_expects_the_three_most_frequent_words():
    got = row("fwe")
    words = re.findall(r"\w+", got.document.split(":")[1])
    ranked = sorted(set(words), key=words.count, reverse=True)
    assert tuple(ranked[:3]) == got.outputs
    assert words.count(ranked[2]) > words.count(ranked[3])


def test_noise_repeats_its_five_sentences_around_the_fact():
    got = row("niah_single_1", length=1200)
    parts = re.split(r"(?<=\.) ", got.document)
    facts = [part for part in parts if got.outputs[0] in part]
    assert len(facts) == 1
    assert len({part for part in parts if part not in facts}) == 5
    assert len(parts) > 50


@pytest.mark.parametrize(
    ("task", "name", "value"),
    [
        ("niah_multikey_2", r"[A-Z][a-z]+ [A-Z][a-z]+", r"\d{9}"),
        ("niah_multikey_3", r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", r"[0-9a-f-]{36}"),
    ],
)
def test_a_haystack_of_needles_holds_nothing_else_and_asks_for_one(task, name, value):
    got = row(task, length=1500)
    facts = re.findall(rf"access code of ({name}) is ({value})\.", got.document)
    assert len(facts) == len(re.findall(r"access code", got.document)) == got.document.count(". ") + 1
    assert len(facts) > 15
    assert len({fact[0] for fact in facts}) == len({fact[1] for fact in facts}) == len(facts)
    (asked,) = [fact for fact in facts if fact[1] == got.outputs[0]]
    assert asked[0] in got.question


@pytest.mark.parametrize(("length", "common", "uncommon"), [(500, 10, 1), (2048, 30, 3), (20000, 70, 7)])
def test_cwe_has_ten_words_ten_times_as_often_as_the_others(length, common, uncommon):
    got = row("cwe", length=length)
    words = re.findall(r"\d+\. (\w+)", got.document)
    counted = Counter(words)
    assert [int(number) for number in re.findall(r"(\d+)\.", got.document)] == list(range(1, len(words) + 1))
    assert {word for word, times in counted.items() if times == common} == set(got.outputs)
    assert set(counted.values()) == {common, uncommon}
    assert len(got.outputs) == 10


@pytest.mark.parametrize("task", TASKS)
def test_the_full_answer_contains_every_output_and_the_input_is_document_and_question(task):
    got = row(task)
    assert all(output in got.answer for output in got.outputs)
    assert task in DERIVED or all(output in got.document for output in got.outputs)
    assert got.input == got.document + "\n\n" + (got.turns[0][0] if got.turns else got.question)


@pytest.mark.parametrize("task", TASKS)
def test_row_format(task):
    got = json.loads(json.dumps(row(task, index=5).as_dict()))
    assert got["index"] == 5
    assert isinstance(got["input"], str)
    assert isinstance(got["outputs"], list)
    assert isinstance(got["length"], int)
    assert got["task"] == task
    assert got["seed"] == 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: row("niah_sinlge"), "niah_sinlge"),
        (lambda: row("niah_single", length=10), "10 tokens is too short"),
        (lambda: row("niah_single", depth=1.5), "1.5"),
        (lambda: row("vt", depth=-0.1), "-0.1"),
        (lambda: row("vt", length=40), "too short"),
        (lambda: row("vt", hops=1000), "2002 variables"),
        (lambda: row("fwe", depth=0.5), "0.5"),
        (lambda: row("fwe", length=60), "60 tokens is too short"),
        (lambda: row("cwe", depth=0.5), "0.5"),
        (lambda: row("cwe", length=300), "300 tokens is too short"),
        (lambda: row("niah_single_1", length=10), "10 tokens is too short"),
        (lambda: row("niah_multikey_2", depth=2), "2"),
        (lambda: row("niah_multikey", keys=0), "0 names"),
        (lambda: row("niah_multivalue", values=0), "0 values"),
        (lambda: row("records_json", depth=0.5), "0.5"),
        (lambda: row("records_json", records=1000), "1000 records"),
        (lambda: row("counting", count=10), "10 occurrences"),
        (lambda: row("counting", length=20, count=9), "20 tokens is too short"),
        (lambda: row("near_duplicates", spacing=0), "0 tokens"),
        (lambda: row("late_needle", queries=0), "0 names"),
        (lambda: row("turns", turns=0), "0 turns"),
    ],
)
def test_what_cannot_be_had_is_a_usage_error(call, said):
    with pytest.raises(KvcliError, match=said) as raised:
        call()
    assert raised.value.exit_code == ExitCode.USAGE
    assert raised.value.hint


@pytest.mark.parametrize(
    ("text", "outputs", "expected"),
    [
        ("The access code of Amber is 482913057.", ["482913057"], 1.0),
        ("482 913 057", ["482913057"], 0.0),
        ("amber, OTTO", ["Amber", "Otto", "Bruno", "Cora"], 0.5),
        ("", ["Amber"], 0.0),
        ("one two", ["two", "one", "three"], 2 / 3),
    ],
)
def test_recall_is_the_share_of_outputs_found(text, outputs, expected):
    assert recall(text, outputs) == pytest.approx(expected)


def test_a_row_without_outputs_cannot_be_scored():
    with pytest.raises(ValueError, match="without outputs"):
        recall("text", [])


def test_names_and_filler_words_are_distinct():
    assert len(set(NAMES)) == len(NAMES) >= 256
    assert not set(NAMES) & set(VOCABULARY)


def test_filler_says_only_words_of_the_vocabulary():
    rng = random.Random(0)
    words = {word for _ in range(2000) for word in re.findall(r"[A-Za-z]+", sentence(rng))}
    assert words <= set(VOCABULARY)
    assert len(words) > 0.95 * len(VOCABULARY)


def test_an_article_goes_with_its_word():
    rng = random.Random(0)
    found = re.findall(r"\b[Aa] (\w+)", " ".join(sentence(rng) for _ in range(5000)))
    assert {word for word in found if word[0] in "aeiou"} <= {"useful"}
    assert {"useful", "small", "nurse"} <= set(found)


def test_filler_stays_within_its_tokens():
    text = sentences(random.Random(1), 313, count_tokens)
    assert 280 < sum(count_tokens(" " + part) for part in text) <= 313
    assert sentences(random.Random(1), 2, count_tokens) == []


@pytest.fixture
def tokenizer_folder(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_command_writes_rulers_rows(tokenizer_folder, capsys):
    assert main(["vt", "--tokenizer", str(tokenizer_folder), "--length", "400", "--rows", "3"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [got["index"] for got in rows] == [0, 1, 2]
    assert all(350 < got["length"] <= 400 for got in rows)


def test_command_writes_a_bare_prompt(tokenizer_folder, tmp_path):
    path = tmp_path / "prompt.txt"
    assert main(["niah_single", "--tokenizer", str(tokenizer_folder), "--length", "99", "--text", "-o", str(path)]) == 0
    document, question = path.read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    assert "access code of" in question
    assert "access code of" in document


def test_command_reports_what_it_cannot_do(tokenizer_folder, capsys):
    assert main(["niah_single", "--tokenizer", str(tokenizer_folder), "--length", "5"]) == ExitCode.USAGE
    assert "too short" in capsys.readouterr().err
