"""Several questions on one context: rows of SCBench in both modes, and needles asked turn after turn."""

import gc
import json
import sys
import weakref

import pytest
import torch
from families import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcli.capacity.disk import disk_for
from kvcli.errors import KvcliError
from kvcli.inputs.options import DiskOptions, Template
from kvcli.inputs.variants import variants
from kvcli.methods.contract import Method
from kvcli.models.loading import ModelSpec
from kvcli.quality.eval.evaluate import evaluate
from kvcli.quality.eval.example import encode_example
from kvcli.quality.eval.formats import read_examples
from kvcli.quality.eval.runner import Evaluation
from kvcli.quality.eval.suite import EvaluationPlan
from kvcli.runtime.engine import Engine
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.observer import Observer

SMALL = {"sink": "16", "window": "16", "page_size": "16"}
CONTEXT = " ".join(f"the dog {number} sleeps under the old tree" for number in range(20))
QUERIES = [
    {"input": "Which dog sleeps?", "answer": "dog 3"},
    {"input": "Under which tree?", "answer": ["the old tree", "an old tree"]},
    {"input": "How many dogs?", "answer": "20"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


def written(tmp_path, name, *rows):
    file = tmp_path / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_query_stands_behind_the_right_answers_to_those_before_it(tmp_path):
    file = written(tmp_path, "scbench_kv", {"id": 7, "context": CONTEXT, "multi_turns": QUERIES})
    found = read_examples(file)
    assert list(found) == [f"scbench_kv turn {turn}" for turn in (1, 2, 3)]
    examples = [example for (example,) in found.values()]
    assert {example.prompt for example in examples} == {examples[0].prompt}
    assert examples[0].prompt.endswith(f"{CONTEXT}\n\nWhich dog sleeps?")
    assert examples[0].turns == ()
    assert examples[2].turns == (
        ("dog 3", "Under which tree?"),
        ("the old tree an old tree", "How many dogs?"),
    )
    assert [example.references for example in examples] == [("dog 3",), ("the old tree", "an old tree"), ("20",)]
    assert {example.metric for example in examples} == {"contains"}


def test_a_request_is_read_up_to_the_end_of_the_context(tmp_path, folder):
    """What stands before the question is the same for all of them, and together it is the whole prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    file = written(tmp_path, "scbench_qa_eng", {"context": CONTEXT, "multi_turns": QUERIES})
    alone, *others = (example for (example,) in read_examples(file, requests=True).values())
    for template in (Template(), Template(raw=True)):
        reads = [encode_example(each, template, tokenizer, None, None) for each in (alone, *others)]
        assert len({tuple(read.ids) for read in reads}) == 1
        begun = tokenizer.decode(reads[0].ids, skip_special_tokens=True)
        assert "old tree" in begun
        assert "Question:" not in begun
        assert not reads[0].question
        asked = tokenizer.decode(reads[1].turns)
        assert "Question: Under which tree?\nAnswer:" in asked
        assert "Which dog" not in asked


def test_choices_numbers_and_mixed_files_are_asked_as_published(tmp_path):
    options = {"options": ["an oak", "a fir", "an elm", "a yew"]}
    choice = {"input": "Which tree?", "answer": "a fir", **options}
    row = {"context": CONTEXT, "multi_turns": [choice, {**choice, "answer": "C"}]}
    first, second = read_examples(written(tmp_path, "scbench_choice_eng", row)).values()
    assert "B. a fir\n" in first[0].prompt
    assert (first[0].references, second[0].references) == (("a fir", "B"), ("an elm", "C"))
    number = {"input": "You should answer with only one number. The largest number is", "answer": 9}
    (found,) = read_examples(written(tmp_path, "scbench_mf", {"context": [3, 9], "multi_turns": [number]})).values()
    assert found[0].prompt.startswith("What is the largest number?\n\n[3, 9]\n\nYou should")
    queries = [
        {"input": "Summarise.", "answer": "Dogs.", "task": "scbench_summary"},
        {"input": "The key?", "answer": "77", "task": "scbench_passkey"},
    ]
    mixed = written(tmp_path, "scbench_summary_with_needles", {"context": CONTEXT, "multi_turns": queries})
    assert [example.metric for (example,) in read_examples(mixed).values()] == ["rouge_lsum", "first_integer"]


def test_what_cannot_be_asked_so_is_refused(tmp_path):
    row = {"context": CONTEXT, "multi_turns": QUERIES}
    with pytest.raises(KvcliError, match="scored by a parser of code"):
        read_examples(written(tmp_path, "scbench_repoqa", row))
    with pytest.raises(KvcliError, match="no task 'dogs'"):
        read_examples(written(tmp_path, "dogs", row))
    with pytest.raises(KvcliError, match="no queries on one context"):
        read_examples(written(tmp_path, "plain", {"context": "a", "question": "b", "answer": "c"}), requests=True)
    with pytest.raises(KvcliError, match="line 1: multi_turns"):
        read_examples(written(tmp_path, "scbench_kv", {"context": CONTEXT, "multi_turns": []}))


def run(folder, tasks, tmp_path, monkeypatch, methods=("full", "snapkv", "freekv"), **options):
    """Evaluate; returns the answers by task and variant, and the lengths of the prompts that were read."""
    prefill, read = Engine.prefill, []

    def noted(engine, ids, *rest, **more):
        read.append(len(ids))
        return prefill(engine, ids, *rest, **more)

    monkeypatch.setattr(Engine, "prefill", noted)
    lines = tmp_path / "p.jsonl"
    table = evaluate(
        EvaluationPlan(
            ModelSpec(str(folder)), variants(methods, [], (80,), SMALL), tasks, predictions=lines, **options
        ),
        Observer(),
    )
    found = {}
    for answer in map(json.loads, lines.read_text().splitlines()[1:]):
        found.setdefault((answer["task"], answer["variant"]), []).append(answer)
    return table, found, read


@pytest.mark.exhaustive
def test_needles_are_scored_turn_by_turn_and_the_document_is_read_once(folder, tmp_path, monkeypatch):
    """The last turn is that of the task `turns`, for a method that cuts the prompt by its first question, too."""
    tasks = ["needle_turns", "turns"]
    methods = "snapkv", "freekv"
    table, found, read = run(folder, tasks, tmp_path, monkeypatch, methods, lengths=[400], limit=1, max_tokens=5)
    assert len(read) == 2, "once for all turns, and once for the task beside them"
    assert len({result.task for result in table.results}) == 5
    for variant in {variant for _, variant in found}:
        last, whole = found["needle_turns turn 4", variant], found["turns", variant]
        assert [answer["text"] for answer in last] == [answer["text"] for answer in whole]
        steps = [sum(answer["steps"] for answer in found[f"needle_turns turn {turn}", variant]) for turn in range(1, 5)]
        assert steps == sorted(steps)
        assert steps[0] < steps[3]


def test_what_shares_a_disk_s_cache_is_counted(folder, tmp_path, monkeypatch):
    """Of two variants each prompt, a copy of one for a question, and one more sample of its answer."""
    made, tiers, most = weakref.WeakSet(), [], 0

    def noted(function):
        def call(*arguments):
            made.add(method := function(*arguments))
            return method

        return call

    def sequence(*arguments):
        nonlocal most
        gc.collect()
        most = max(most, len(made))
        return take_up(*arguments)

    def disk(*arguments):
        tiers.append(disk_for(*arguments))
        return tiers[-1]

    take_up = Evaluation._sequence
    monkeypatch.setattr(Engine, "method", noted(Engine.method))
    monkeypatch.setattr(Method, "fork", noted(Method.fork))
    monkeypatch.setattr(Evaluation, "_sequence", sequence)
    monkeypatch.setattr(sys.modules[evaluate.__module__], "disk_for", disk)
    file = written(tmp_path, "scbench_vt", {"context": CONTEXT, "multi_turns": QUERIES})
    sampling = Sampling(num_samples=2, temperature=1.0)
    options = {"max_tokens": 3, "sampling": sampling, "disk": DiskOptions(tmp_path, 1 << 20)}
    run(folder, [f"requests:{file}"], tmp_path, monkeypatch, ("freekv", "offload"), **options)
    (tier,) = tiers
    assert tier.sequences == most == 2 + 1 + 1


def test_requests_are_answered_as_prompts_of_their_own_from_one_reading(folder, tmp_path, monkeypatch):
    rows = [{"context": f"{name} {CONTEXT}", "multi_turns": QUERIES} for name in ("Ann.", "Bob.")]
    file = written(tmp_path, "scbench_vt", *rows)
    _, found, read = run(folder, [f"requests:{file}"], tmp_path, monkeypatch, max_tokens=5)
    assert len(read) == 2
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for number, query in enumerate(QUERIES, 1):
        for row, answer in zip(rows, found[f"scbench_vt request {number}", "full"], strict=True):
            said = [{"role": "user", "content": f"{row['context']}\n\n{query['input']}"}]
            ids = torch.tensor([tokenizer.apply_chat_template(said, add_generation_prompt=True).input_ids])
            whole = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
            assert answer["text"] == tokenizer.decode(whole, skip_special_tokens=True)
            assert answer["prompt_tokens"] < ids.shape[1]
