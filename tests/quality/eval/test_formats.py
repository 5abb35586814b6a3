"""Benchmark files: recognised by their fields, with the benchmark's prompt, references and lengths; bad lines named."""

import csv
import json
import sys
from importlib import import_module

import pytest

from kvcli.errors import ExitCode, KvcliError
from kvcli.quality.eval.formats import read_examples
from kvcli.quality.tasks import make_row

LONGBENCH = {"context": "Text {with} braces.", "input": "Who?", "answers": ["A", "B"], "all_classes": ["A", "C"]}
V2 = {
    "_id": "1",
    "context": " Long. ",
    "question": "Which?",
    "choice_A": "a",
    "choice_B": "b",
    "choice_C": "c",
    "choice_D": "d",
    "answer": "C",
}
MATH = {"problem": "Solve {x}.", "solution": "s", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 2} | {
    "unique_id": "test/algebra/1.json"
}
AIME = {"id": 60, "problem": "Find $m$.", "solution": "s", "answer": "025", "url": "u", "year": "2024"}
GPQA = {"Question": "Which? ", "Correct Answer": "right\n"} | {f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}
INFINITE = {"id": 0, "context": "Hay.", "input": "What is it?", "answer": ["71"], "options": ""}


def read(folder, name, *rows):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows))
    return read_examples(path)


def one(folder, name, row):
    ((task, (example,)),) = read(folder, name, row).items()
    return task, example


def test_ruler(tmp_path):
    row = {"index": 0, "input": "Hay. What?", "outputs": ["1", "2"], "length": 9, "answer_prefix": " It is"}
    task, example = one(tmp_path, "vt/validation.jsonl", row)
    assert (task, example.metric, example.max_tokens) == ("vt", "recall", 30)
    assert (example.prompt, example.references, example.answer_prefix) == ("Hay. What?", ("1", "2"), " It is")
    assert one(tmp_path, "niah_multikey_2.jsonl", row)[1].max_tokens == 128
    assert one(tmp_path, "qa_1.jsonl", row)[1].metric == "contains"


KVPRESS = {"context": "Hay.", "question": " What?", "answer_prefix": "It is", "task": "niah_single_2"}


@pytest.mark.parametrize(
    ("task", "answers", "metric", "tokens"),
    [
        ("niah_single_2", {"answer": ["1", "2"]}, "recall", 128),
        ("vt", {"answer": ["1"], "max_new_tokens": 31}, "recall", 31),
        ("qa_1", {"answer": ["1"]}, "contains", 32),
        ("hotpotqa", {"answers": ["1"], "all_classes": None}, "qa_f1", 32),
    ],
)
def test_rows_as_kvpress_has_them(tmp_path, task, answers, metric, tokens):
    name, example = one(tmp_path, "any.jsonl", KVPRESS | {"task": task} | answers)
    assert (name, example.metric, example.max_tokens) == (task, metric, tokens)
    assert (example.prompt, example.question, example.answer_prefix) == ("Hay. What?", "What?", "It is")
    asked = read_examples(tmp_path / "any.jsonl", requests=True)[task][0]
    assert (asked.shared, asked.question) == ("Hay.", "")


def test_fields_that_nothing_reads_are_named(tmp_path):
    said = []
    row = {"context": "a", "question": "b", "answer": "c", "task": "t", "max_new_tokens": 9}
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"hint": 1}))
    read_examples(tmp_path / "own.jsonl", notice=said.append)
    assert [line.rpartition(": ")[2] for line in said] == ["hint, max_new_tokens, task"]
    said.clear()
    (tmp_path / "vt.jsonl").write_text(json.dumps({"index": 0, "input": "Hay.", "outputs": ["1"], "length": 9}))
    read_examples(tmp_path / "vt.jsonl", notice=said.append)
    assert not said


def test_an_array_of_rows_is_read_like_lines(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps([V2, V2], indent=1))
    assert len(read_examples(tmp_path / "data.json")["longbench_v2"]) == 2
    (tmp_path / "data.json").write_text('[{"a": 1}, 2]')
    with pytest.raises(KvcliError, match=r"row 1|row 2"):
        read_examples(tmp_path / "data.json")


def test_a_long_field_of_a_table_is_read(tmp_path):
    with (tmp_path / "own.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["context", "question", "answer"], ["word " * 100_000, "b", "c"]])
    ((example,),) = read_examples(tmp_path / "own.csv").values()
    assert len(example.prompt) > 500_000


def test_answers_within_an_object_are_read(tmp_path):
    row = {"context": "a", "question": "b", "answer": {"text": ["c", "d"], "answer_start": [0, 0]}}
    assert one(tmp_path, "squad.jsonl", row)[1].references == ("c", "d")


@pytest.mark.parametrize(
    ("dataset", "metric", "tokens", "raw", "first_line"),
    [
        ("hotpotqa", "qa_f1", 32, False, False),
        ("hotpotqa_e", "qa_f1", 32, False, False),
        ("qasper", "qa_f1", 128, False, False),
        ("multifieldqa_zh", "qa_f1_zh", 64, False, False),
        ("dureader", "rouge_l_zh", 128, False, False),
        ("gov_report", "rouge_l", 512, False, False),
        ("trec", "classification", 64, True, True),
        ("triviaqa", "qa_f1", 32, True, True),
        ("samsum", "rouge_l", 128, True, True),
        ("passage_count", "count", 32, False, False),
        ("passage_retrieval_zh", "retrieval", 32, False, False),
        ("repobench-p", "code_similarity", 64, True, False),
    ],
)
def test_longbench(tmp_path, dataset, metric, tokens, raw, first_line):
    task, example = one(tmp_path, "any.jsonl", LONGBENCH | {"dataset": dataset})
    assert (task, example.metric, example.max_tokens) == (dataset, metric, tokens)
    assert (example.raw, example.first_line) == (raw, first_line)
    assert "Text {with} braces." in example.prompt
    assert example.references == ("A", "B")


def test_longbench_prompt_puts_the_question_behind_the_text(tmp_path):
    _, example = one(tmp_path, "any.jsonl", LONGBENCH | {"dataset": "multifieldqa_en"})
    assert example.prompt.startswith(
        "Read the following text and answer briefly.\n\nText {with} braces.\n\nNow, answer"
    )
    assert example.prompt.endswith("\n\nQuestion: Who?\nAnswer:")
    assert example.question.startswith("Now, answer")
    assert example.question.endswith("Question: Who?\nAnswer:")


def test_a_file_of_several_datasets_is_several_tasks(tmp_path):
    rows = [LONGBENCH | {"dataset": name} for name in ("musique", "trec", "musique")]
    found = read(tmp_path, "all.jsonl", *rows)
    assert {task: len(examples) for task, examples in found.items()} == {"musique": 2, "trec": 1}


def test_longbench_v2(tmp_path):
    task, example = one(tmp_path, "data.jsonl", V2)
    assert (task, example.metric, example.references) == ("longbench_v2", "choice_in_sentence", ("C",))
    assert "<text>\nLong.\n</text>" in example.prompt
    assert "question: Which?\nChoices:\n(A) a\n(B) b\n(C) c\n(D) d\n" in example.prompt


def test_infinitebench(tmp_path):
    task, example = one(tmp_path, "passkey.jsonl", INFINITE)
    assert (task, example.metric, example.max_tokens, example.raw) == ("passkey", "first_integer", 6, True)
    assert example.prompt.endswith("Hay.\n\nWhat is it?\n\nThe pass key is")
    run = INFINITE | {"input": "Give func_12(-3) please", "answer": [-7]}
    _, example = one(tmp_path, "code_run.jsonl", run)
    assert example.references == ("-7",)
    assert "called func_12 in" in example.prompt
    assert example.prompt.endswith("The value of func_12(-3) is")
    chosen = INFINITE | {"answer": ["w"], "options": ["u", "v", "w", "x"]}
    _, example = one(tmp_path, "longbook_choice_eng.jsonl", chosen)
    assert example.references == ("w", "C")
    assert "A. u\nB. v\nC. w\nD. x" in example.prompt
    letter = INFINITE | {"answer": ["B"], "options": ["u", "v", "w", "x"]}
    assert one(tmp_path, "code_debug.jsonl", letter)[1].references == ("v", "B")
    found = INFINITE | {"input": "The largest number of the list is:", "answer": [58]}
    assert one(tmp_path, "math_find.jsonl", found)[1].prompt.startswith("What is the largest number in the following")
    assert one(tmp_path, "math_calc.jsonl", INFINITE | {"answer": [[1, 4]]})[1].references == ("1", "4")


def test_any_other_file_with_context_question_and_answer(tmp_path):
    row = {"context": "Text.", "question": "Who?", "answer": "Amber"}
    task, example = one(tmp_path, "mine.jsonl", row)
    assert (task, example.prompt, example.question) == ("mine", "Text.\n\nWho?", "Who?")
    assert (example.metric, example.references) == ("qa_f1", ("Amber",))
    assert one(tmp_path, "mine.jsonl", row | {"metric": "contains", "answer": ["a", 5]})[1].references == ("a", "5")


SAID = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 3, "abcde", strict=False)]
MRCR = {
    "prompt": json.dumps(SAID),
    "answer": "x9b",
    "random_string_to_prepend": "x9",
    "n_needles": 2,
    "desired_msg_index": 1,
    "total_messages": 5,
    "n_chars": 5,
    "date_added": "04-12-2025",
}


def test_mrcr_is_a_conversation_that_is_read_whole(tmp_path):
    task, example = one(tmp_path, "2needle.jsonl", MRCR)
    assert (task, example.metric, example.references) == ("2needle", "mrcr", ("x9b", "x9"))
    assert (example.prompt, example.turns, example.question) == ("a", (("b", "c"), ("d", "e")), "e")
    assert example.whole
    assert example.turns_read
    for prompt, said in (("a", "not a JSON list"), ('[{"role": "assistant", "content": "a"}]', "in turns")):
        with pytest.raises(KvcliError, match=said):
            one(tmp_path, "2needle.jsonl", MRCR | {"prompt": prompt})


LOOGLE = {
    "input": "Hay {1}.",
    "title": "t",
    "qa_pairs": "[{'Q': 'Who?', 'A': 'Ann', 'type': 'x', 'S': ['Hay.']}, {'S': 'Hay.', 'Q': 'When?', 'A': 12}]",
    "output": "none",
}


def test_loogle_asks_every_question_of_a_document(tmp_path):
    first, second = read(tmp_path, "longdep_qa.jsonl", LOOGLE)["longdep_qa"]
    wording = "Please answer the question based on the long texts below. \nHay {1}.\nQuestion: "
    assert (first.prompt, second.prompt) == (f"{wording}Who?\nAnswer: ", f"{wording}When?\nAnswer: ")
    assert (first.metric, first.max_tokens, second.references) == ("rouge_l_recall", 500, ("12",))
    asked = read_examples(tmp_path / "longdep_qa.jsonl", requests=True)["longdep_qa"][0]
    assert (asked.shared, asked.question) == (wording.removesuffix("\nQuestion: "), "")
    paper = LOOGLE | {"qa_pairs": "none", "output": "It says hay.", "question": "none"}
    _, example = one(tmp_path, "longdep_summarization.jsonl", paper)
    assert example.prompt == "Please generate a summary of the below paper. \nHay {1}.\n Summarization: "
    assert example.references == ("It says hay.",)
    masked = LOOGLE | {"qa_pairs": str([{"Q": "<mask-0> ran.", "S": "s", "A": {"<mask-0>": "Ann"}}])}
    _, example = one(tmp_path, "shortdep_cloze.jsonl", masked)
    assert (example.metric, example.references, example.max_tokens) == ("cloze", ('{"<mask-0>": "Ann"}',), 50)
    assert "{'<mask-0>': 'Bob'," in example.prompt
    with pytest.raises(KvcliError, match="loogle has no task 'other'"):
        one(tmp_path, "other.jsonl", LOOGLE)
    with pytest.raises(KvcliError, match="questions Q with answers A"):
        one(tmp_path, "longdep_qa.jsonl", LOOGLE | {"qa_pairs": "[{'Q': 1}]"})
    with pytest.raises(KvcliError, match="neither questions nor an output"):
        one(tmp_path, "longdep_qa.jsonl", LOOGLE | {"qa_pairs": "[]"})


def test_loogle_as_the_hub_and_kvpress_have_it(tmp_path):
    hub = {"context": "Hay.", "question": "Who?", "answer": "Ann", "evidence": ["Hay."], "title": "t"}
    task, example = one(tmp_path, "shortdep_qa.jsonl", hub)
    assert (task, example.metric, example.max_tokens) == ("shortdep_qa", "rouge_l_recall", 300)
    assert example.prompt.endswith("below. \nHay.\nQuestion: Who?\nAnswer: ")
    row = KVPRESS | {"task": "shortdep_cloze", "answer": '{"<mask-0>": "Ann"}', "max_new_tokens": 50}
    assert one(tmp_path, "test.jsonl", row)[1].metric == "cloze"


def rerank(qid, *grades):
    passages = [{"id": str(n), "text": f"t{n}", "label": grade} for n, grade in enumerate(grades, 1)]
    return {"qid": qid, "query": f"query {qid}", "ctxs": passages}


def test_helmets_ranking_comes_after_two_examples_of_other_questions(tmp_path):
    with pytest.raises(KvcliError, match="k10_dep3"):
        one(tmp_path, "none/k50.jsonl", rerank("a", 0, 2))
    shown = [rerank(qid, 1, 0, 3) for qid in "aabbccdd"]
    for number, row in enumerate(shown):
        row["ctxs"][0] |= {"text": f"row {number}", "title": "T"}
    (tmp_path / "test_reranking_data_k10_dep3.jsonl").write_text("\n".join(map(json.dumps, shown)))
    task, example = one(tmp_path, "k50.jsonl", rerank("a", 0, 2))
    assert (task, example.metric, example.references) == ("k50", "ndcg_10", ("2 2",))
    assert (example.raw, example.first_line, example.max_tokens) == (True, True, 200)
    _, _, rest = example.prompt.partition("Ranking: ID3 > ID1 > ID2\n\n")
    ranked = "[ID: 1] Document (Title: T): row {}\n\n[ID: 2] Document: t2\n\n"
    ranked += "[ID: 3] Document: t3\n\nQuery: query {}\nRanking: 3 > 1 > 2\n\n"
    own = "[ID: 1] Document: t1\n\n[ID: 2] Document: t2\n\nQuery: query a\nRanking:"
    # The rows that HELMET's own lines chose with the package datasets, 5.2: filter, shuffle, one of each question.
    assert rest == ranked.format(2, "b") + ranked.format(4, "c") + own
    _, example = one(tmp_path, "k50.jsonl", rerank("b", 1, 2))
    assert ranked.format(6, "d") + ranked.format(1, "a") in example.prompt


@pytest.mark.parametrize(
    ("name", "targets", "metric", "references"),
    [
        ("retrieval_nq_128k_test", (("35",),), "recall_1", ("35",)),
        ("retrieval_musique_1m_dev", (("35", "7"),), "mrecall_5", ("35", "7")),
        ("rag_nq_32k_test", (("Spain", "Rome"),), "subspan", ("Spain", "Rome")),
        ("rag_quest_128k_test", (("Spain",),), "subspans", ("Spain",)),
        ("sql_spider_128k_test", ((("Gates", 1), ("Hall", 2)),), "same_rows", ("['Gates', 1]", "['Hall', 2]")),
        ("icl_date_understanding_32k_test", ((("(D)",),),), "first_entry", ("(D)",)),
    ],
)
def test_loft_as_its_script_writes_prompts(tmp_path, name, targets, metric, references):
    path = tmp_path / f"{name}:few_shot_with_cot.csv"
    prompt = "ID: 35 | CONTENT: hay\n====== Now let's start! ======\nquery: who?"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["", "prompt_id", "prompt", "targets"], [0, "q1", prompt, str(targets)]])
    ((task, (example,)),) = read_examples(path).items()
    assert (task, example.metric, example.references) == (name, metric, references)
    assert (example.prompt, example.question, example.whole) == (prompt, "query: who?", True)


@pytest.mark.parametrize(
    ("name", "targets", "said"),
    [
        ("mine", "(('35',),)", "not that of a prompt of LOFT"),
        ("rag_nq_32k_test", "(('a',), ('b',))", "one turn"),
        ("rag_nq_32k_test", "a", "one turn"),
    ],
)
def test_what_is_no_prompt_of_loft_is_named(tmp_path, name, targets, said):
    row = {"prompt_id": "q", "prompt": "p", "targets": targets}
    with pytest.raises(KvcliError, match=said):
        one(tmp_path, f"{name}.jsonl", row)


def test_math500(tmp_path):
    task, example = one(tmp_path, "test.jsonl", MATH)
    assert (task, example.metric, example.references) == ("math500", "math_verify", (r"\frac{1}{2}",))
    assert example.prompt.startswith("Solve {x}.\n\n")
    assert r"\boxed{}" in example.prompt
    assert (example.max_tokens, example.whole, example.raw) == (32768, True, False)
    copied = {name: MATH[name] for name in ("problem", "answer", "subject", "level")}
    assert one(tmp_path, "test.jsonl", copied)[1] == example


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        (AIME, "25"),
        ({"ID": "2024-I-1", "Problem": "Find $m$.", "Answer": 204, "Solution": "s"}, "204"),
        ({"question": "Find $m$.", "answer": r"336^\circ"}, "336"),
        ({"problem": "Find $m$.", "answer": "000"}, "0"),
    ],
)
def test_aime(tmp_path, row, answer):
    task, example = one(tmp_path, "aime24.jsonl", row)
    assert (task, example.metric, example.references) == ("aime24", "final_integer", (answer,))
    assert example.prompt.startswith("Find $m$.\n\n")
    assert one(tmp_path, "aime25/test.jsonl", row)[0] == "aime25"


def test_gpqa_choices_come_in_an_order_that_the_row_decides(tmp_path):
    task, first = one(tmp_path, "gpqa_diamond.jsonl", GPQA)
    assert (task, first.metric) == ("gpqa_diamond", "final_letter")
    (letter,) = first.references
    assert f"\n{letter}. right\n" in first.prompt
    assert all(f". wrong {n}\n" in first.prompt for n in (1, 2, 3))
    rows = [GPQA | {"Question": f"Which {n}?"} for n in range(40)]
    examples = read(tmp_path, "gpqa.jsonl", *rows)["gpqa"]
    assert {each.references for each in examples} == {("A",), ("B",), ("C",), ("D",)}
    assert read(tmp_path, "gpqa.jsonl", *reversed(rows))["gpqa"] == examples[::-1]


def test_csv_is_read_with_fields_of_several_lines(tmp_path):
    path = tmp_path / "gpqa_diamond.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, [*GPQA, "Record ID"])
        writer.writeheader()
        writer.writerows([GPQA | {"Question": 'One,\n"two"?', "Record ID": "r"}, GPQA | {"Record ID": "s"}])
    first, second = read_examples(path)["gpqa_diamond"]
    assert first.prompt.startswith('One,\n"two"?\n\nA. ')
    assert second == one(tmp_path, "gpqa_diamond.jsonl", GPQA)[1]


HEADER = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER + "q,r,a,b,c\nq,r,a,b\n", "row 2: not as many fields"),
        (HEADER + "q,r,a,b,c,d\n", "row 1: not as many fields"),
        (HEADER + "q,r,a,b,c\nq,,a,b,c\n", "row 2: Correct Answer is empty"),
        (HEADER + 'q,r,a,b,"c"d\n', "row 1: bad CSV"),
        (HEADER + 'q,r,a,b,"c\n', "row 1: bad CSV"),
        (HEADER.replace("Correct Answer", "Right") + "q,r,a,b,c\n", "row 1: no field 'Correct Answer'"),
        (HEADER, "holds no examples"),
        ("", "holds no examples"),
    ],
)
def test_bad_csv_is_a_usage_error_that_names_the_row(tmp_path, text, said):
    path = tmp_path / "gpqa.csv"
    path.write_text(text)
    with pytest.raises(KvcliError, match=said) as raised:
        read_examples(path)
    assert raised.value.exit_code == ExitCode.USAGE
    assert raised.value.hint


def test_parquet_is_read_as_the_same_rows_of_json(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "aime24" / "train-00000-of-00001.parquet"
    path.parent.mkdir()
    rows = [AIME, AIME | {"answer": "7"}]
    import_module("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    assert read_examples(path) == read(tmp_path, "aime24.jsonl", *rows)
    bad = [AIME, AIME | {"answer": "1000"}]
    import_module("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(bad), path)
    with pytest.raises(KvcliError, match="row 2: answer is not an integer from 0 to 999"):
        read_examples(path)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(KvcliError, match="not a Parquet file"):
        read_examples(path)
    with pytest.raises(KvcliError, match="no such file"):
        read_examples(tmp_path / "none.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.lib", None)
    with pytest.raises(KvcliError, match="needs pyarrow") as raised:
        read_examples(tmp_path / "aime.parquet")
    assert raised.value.hint == "pip install 'kvcli[parquet]'"


GOOD = '{"context": "c", "question": "q", "answer": "a"}'


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([GOOD, "", '{"context": '], "line 3: bad JSON"),
        ([GOOD, "[1]"], "line 2: a list, not an object"),
        (['{"context": "c", "question": "q"}'], "line 1: no field 'answer'"),
        (['{"context": "c", "question": "q", "answer": []}'], "line 1: answer holds no answers"),
        (['{"context": 5, "question": "q", "answer": "a"}'], "line 1: context should be a valid string"),
        (['{"context": " ", "question": "q", "answer": "a"}'], "line 1: context is empty"),
        (['{"context": "c", "question": "q", "answer": "a", "metric": "qa_f2"}'], "did you mean 'qa_f1'"),
        (['{"context": "c", "question": "q", "answer": "a", "metric": ["qa_f1"]}'], "line 1: metric should be a valid"),
        (['{"context": "c", "question": "q", "answer": "a", "metric": "function_choice"}'], "needs two answers"),
        (['{"context": "c", "question": "q", "answer": "x", "metric": "leading_integers"}'], "needs numbers"),
        (['{"context": "c", "question": "q", "answer": "x", "metric": "mrcr"}'], "two answers"),
        (['{"context": "c", "question": "q", "answer": "{}", "metric": "cloze"}'], "needs mappings"),
        (['{"context": "c", "question": "q", "answer": "17 0", "metric": "ndcg_10"}'], "with their grades"),
        (['{"context": "c", "question": "q", "answer": "x", "metric": "same_rows"}'], "needs lists"),
        (['{"context": "c", "question": "q", "answer": false}'], "line 1: answer holds no answers"),
        (['{"context": "c\\ud800", "question": "q", "answer": "a"}'], "line 1: bad JSON"),
        ([json.dumps(LONGBENCH | {"dataset": "trec", "all_classes": None})], "line 1: .*needs all_classes"),
        ([json.dumps(LONGBENCH | {"dataset": "trec", "all_classes": 5})], "line 1: all_classes should be a valid list"),
        (["", "\n"], "holds no examples"),
        ([json.dumps(AIME), json.dumps(AIME | {"answer": "1000"})], "line 2: answer is not an integer from 0 to 999"),
        ([json.dumps(AIME | {"answer": True})], "line 1: answer is not an integer"),
        ([json.dumps(AIME | {"answer": 20.4})], "line 1: answer is not an integer"),
        ([json.dumps(AIME | {"answer": r"\frac{1}{2}"})], "line 1: answer is not an integer"),
        ([json.dumps(AIME | {"problem": " "})], "line 1: problem is empty"),
        ([json.dumps(MATH), json.dumps(MATH | {"answer": ""})], "line 2: answer is empty"),
        (['{"problem": "Find m."}'], "line 1: no field 'answer'"),
        ([json.dumps(GPQA | {"Incorrect Answer 2": None})], "line 1: Incorrect Answer 2 should be a valid string"),
        ([json.dumps(V2 | {"answer": "E"})], "line 1: answer should be 'A', 'B', 'C' or 'D'"),
        ([json.dumps(LONGBENCH | {"dataset": "hotpotqq"})], "longbench has no task 'hotpotqq'"),
        ([json.dumps(INFINITE)], "infinitebench has no task 'bad'"),
    ],
)
def test_bad_files_are_usage_errors_that_name_the_line(tmp_path, lines, said):
    with pytest.raises(KvcliError, match=said) as raised:
        read(tmp_path, "bad.jsonl", *lines)
    assert raised.value.exit_code == ExitCode.USAGE
    assert raised.value.hint


def test_what_is_no_text_file_is_a_usage_error(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe\x00")
    for path, said in (
        (tmp_path, "is a directory"),
        (tmp_path / "no", "no such file"),
        (tmp_path / "x.jsonl", "UTF-8"),
    ):
        with pytest.raises(KvcliError, match=said):
            read_examples(path)


def test_a_row_of_several_turns_begins_with_the_first_question(tmp_path):
    row = make_row("turns", length=600, seed=0, count_tokens=lambda text: len(text.split()))
    file = tmp_path / "turns.jsonl"
    file.write_text(json.dumps(row.as_dict()) + "\n")
    (example,) = read_examples(file)["turns"]
    questions = [*(question for question, _ in row.turns), row.question]
    assert example.question == questions[0]
    assert example.prompt.endswith(questions[0])
    assert [question for _, question in example.turns] == questions[1:]
    assert [answer for answer, _ in example.turns] == [answer for _, answer in row.turns]
