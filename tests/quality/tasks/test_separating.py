"""The tasks on which methods differ ask for what they say they do."""

import json
import re

from kvcli.quality.tasks import make_row

STATED = re.compile(r"access code of (\w+(?: \w+)?) is (\d{9})\.")


def count_tokens(text):
    """One token a word, a mark or a group of three digits."""
    return len(re.findall(r"[A-Za-z]+|\d{1,3}|[^\sA-Za-z\d]", text))


def row(task, *, length=1500, seed=3, **options):
    return make_row(task, length=length, seed=seed, count_tokens=count_tokens, **options)


def test_records_in_json_are_those_of_the_document_in_their_order():
    got = row("records_json")
    stated = re.findall(r"Record (\d{3}): code (\d{9}), price (\d{3}), for \w+ the \w+\.", got.document)
    told = json.loads(got.answer)
    assert [(each["record"], each["code"], each["price"]) for each in told] == stated
    assert [json.loads(output) for output in got.outputs] == told
    assert 40 < len(stated) <= 48
    assert len(row("records_json", length=800).outputs) < 30


def test_near_duplicates_differ_from_the_asked_pair_in_one_name():
    got = row("near_duplicates")
    facts = dict(STATED.findall(got.document))
    (asked,) = [pair for pair, value in facts.items() if value == got.outputs[0]]
    assert asked in got.question
    assert len(facts) > 15
    shared = [len(set(pair.split()) & set(asked.split())) for pair in facts if pair != asked]
    assert set(shared) == {1}


def test_a_count_is_that_of_the_list():
    for index in range(5):
        got = row("counting", index=index)
        name = re.search(r"does (\w+) occur", got.question).group(1)
        count = re.findall(r"\w+", got.document).count(name)
        assert 1 <= count <= 9
        assert got.outputs == (f"{name} occurs {count} times",)


def test_a_long_lookup_asks_for_every_fact_and_takes_many_tokens():
    got = row("long_lookup", length=4096)
    facts = dict(STATED.findall(got.document))
    assert set(facts.values()) == set(got.outputs)
    assert all(re.search(rf"\b{name}\b", got.question) for name in facts)
    assert len(facts) > 150
    assert count_tokens(got.answer) > 1200
    assert len(row("long_lookup", length=8192).outputs) == 280
    assert len(row("long_lookup", length=800).outputs) < 50


def test_a_late_needle_is_named_by_the_document_alone():
    got = row("late_needle")
    (value,) = got.outputs
    facts = {code: name for name, code in STATED.findall(got.document)}
    late = facts[value]
    assert late not in got.question
    variable = re.search(rf"The value of (\w+) is {late}\.", got.document).group(1)
    assert got.question.endswith(f"the value of {variable}?")
    assert got.answer.index(value) > 0.8 * len(got.answer)
    assert len(re.findall(r"\w+ is \d{9}\.", got.answer)) == 13


def test_turns_ask_for_different_facts_and_score_the_last():
    got = row("turns", turns=3)
    asked = [*(question for question, _ in got.turns), got.question]
    names = [re.search(r"access code of (\w+)", question).group(1) for question in asked]
    facts = dict(STATED.findall(got.document))
    assert len(set(names)) == 3
    assert got.outputs == (facts[names[-1]],)
    assert got.turn_outputs == tuple((facts[name],) for name in names[:-1])
    assert [answer for _, answer in got.turns] == [f"The access code of {n} is {facts[n]}." for n in names[:-1]]


def test_a_direct_answer_is_the_value_alone():
    got = row("niah_direct")
    assert got.answer == got.outputs[0] + "."
    assert len(STATED.findall(got.document)) == 1
