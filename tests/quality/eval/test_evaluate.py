"""A whole evaluation on a tiny model in memory: what it asks, what it counts, and what it refuses."""

import json
import math
from dataclasses import replace

import pytest
import torch
from families import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcli.capacity import memory
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.options import Template
from kvcli.inputs.variants import variants
from kvcli.models.loading import ModelSpec, open_checkpoint
from kvcli.quality.eval import suite
from kvcli.quality.eval.evaluate import evaluate
from kvcli.quality.eval.example import encode_example
from kvcli.quality.eval.formats import read_examples
from kvcli.quality.eval.layout import tables
from kvcli.quality.eval.runner import Evaluation
from kvcli.quality.eval.suite import EvaluationPlan
from kvcli.runtime.detokenizer import StreamingDetokenizer
from kvcli.runtime.sampling import Sampling, TeacherForcing
from kvcli.telemetry.observer import Observer

SMALL = {"sink": "16", "window": "16", "page_size": "16"}
TEXT = " ".join(f"the dog {number} sleeps under the old tree while the fox {number * 7} runs." for number in range(60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "dogs.txt"
    file.write_text(TEXT)
    return file


def plan(folder, tasks, methods=("full", "quest"), budgets=(80,), **options):
    return EvaluationPlan(ModelSpec(str(folder)), variants(methods, [], budgets, SMALL), tasks, **options)


def test_perplexity_of_a_text_is_that_of_the_model(folder, document):
    table = evaluate(plan(folder, [f"ppl:{document}"], lengths=[150], limit=2, max_tokens=40), Observer())
    full, quest = table.results
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).double()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    nll = 0.0
    for begin in (0, 190):
        text = tokenizer.decode(ids[begin : begin + 150])
        read, fed = tokenizer(text)["input_ids"], ids[begin + 150 : begin + 190]
        with torch.no_grad():
            logits = model(torch.tensor([read + fed])).logits[0, len(read) - 1 : -1].log_softmax(-1)
        nll -= float(logits[torch.arange(40), torch.tensor(fed)].sum())
    assert full.score.value == pytest.approx(math.exp(nll / 80), rel=1e-3)
    assert full.score.examples == 2
    assert full.cost.steps == 2 * 39
    assert quest.score.value != pytest.approx(full.score.value, rel=1e-5)
    assert quest.cost.attended <= 80


def test_closeness_of_a_text_is_that_of_the_distributions_that_the_model_gives(folder, document):
    """KL by streaming, whose layers see sink and window alone: a mask for the model itself, in float64."""
    streaming = {"sink": 6, "window": 24}
    budgets = variants(["full", "streaming"], [], (30,), {"sink": "6", "positions": "original"})
    asked = plan(folder, [f"fidelity:{document}", f"ppl:{document}"], lengths=[150], limit=2, max_tokens=40)
    table = evaluate(replace(asked, variants=budgets), Observer())
    full, mine, *likely = table.results
    assert (full.metric, full.closeness.kl.value < 1e-9, full.score.value) == ("fidelity", True, 100)
    assert full.closeness.nll_gap.value == pytest.approx(0, abs=1e-6)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).double()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    kls, tops, gaps = [], [], []
    for begin in (0, 190):
        read = tokenizer(tokenizer.decode(ids[begin : begin + 150]))["input_ids"]
        whole = torch.tensor([read + ids[begin + 150 : begin + 190]])
        place = torch.arange(whole.shape[1])
        seen = place[:, None] >= place
        near = seen & ((place < streaming["sink"]) | (place > place[:, None] - streaming["window"]))
        near[: len(read)] = seen[: len(read)]  # a prompt is read exactly
        with torch.no_grad():
            true, found = (
                model(whole, attention_mask=torch.where(mask, 0.0, -torch.inf)[None, None].double())
                .logits[0, len(read) : -1]
                .log_softmax(-1)
                for mask in (seen, near)
            )
        kls.append(float((true.exp() * (true - found)).sum(-1).mean()))
        tops.append(float((true.argmax(-1) == found.argmax(-1)).double().mean()))
        gaps.append(float((true - found).gather(1, whole[0, len(read) + 1 :, None]).mean()))
    assert mine.closeness.kl.value == pytest.approx(sum(kls) / 2, rel=1e-4)
    assert mine.closeness.kl.stderr == pytest.approx(abs(kls[0] - kls[1]) / 2, rel=1e-3)
    assert mine.closeness.nll_gap.value == pytest.approx(sum(gaps) / 2, rel=1e-3)
    assert mine.score.value == pytest.approx(50 * sum(tops))
    assert (mine.cost.attended, mine.cost.step_ms, mine.cost.steps) == (30, None, 2 * 39)
    by_likelihood = math.log(likely[1].score.value / likely[0].score.value) * 40 / 39  # the first token is exact
    assert mine.closeness.nll_gap.value == pytest.approx(by_likelihood, rel=1e-2)


def test_a_text_that_the_model_rules_out_is_refused_and_leaves_no_line(folder, document, tmp_path, monkeypatch):
    """Infinity is no JSON: a file with it could not be read again."""

    class Certain(TeacherForcing):
        def __call__(self, logits):
            return super().__call__(logits.where(logits == logits.max(), -torch.inf))

    monkeypatch.setattr("kvcli.quality.eval.runner.TeacherForcing", Certain)
    lines = tmp_path / "p.jsonl"
    with pytest.raises(KvcliError, match="the perplexity is infinite"):
        evaluate(plan(folder, [f"ppl:{document}"], lengths=[150], limit=1, predictions=lines), Observer())
    assert len(lines.read_text().splitlines()) == 1  # the configuration


def test_prompts_that_fill_the_model_leave_room_for_the_answer_and_are_not_cut(folder, document, tmp_path):
    """To cut them would take out of the middle what stands there, the needle perhaps."""
    lines = tmp_path / "p.jsonl"
    tasks = ["needle_grid", "niah_single", "ppl", f"ppl:{document}"]
    most = 700
    evaluate(
        plan(folder, tasks, ["quest"], (80,), lengths=[most], max_length=most, depths=3, limit=1, predictions=lines),
        Observer(),
    )
    rows = [json.loads(line) for line in lines.read_text().splitlines()[1:]]
    assert len(rows) == 3 + 1 + 1 + 1
    for row in rows:
        assert row["cut_tokens"] == 0
        assert row["length"] == most
        assert most - 150 - 200 < row["prompt_tokens"] <= most - 70


def test_prompts_that_are_cut_are_told_and_counted(folder, tmp_path):
    rows = [{"context": TEXT[:length], "question": "Which?", "answer": "x"} for length in (300, 2500, 3000)]
    file = tmp_path / "long.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    told = []

    class Watching(Observer):
        def notice(self, message):
            told.append(message)

    table = evaluate(plan(folder, [str(file)], ["full", "quest"], max_length=300, max_tokens=3), Watching())
    assert [result.cut for result in table.results] == [2, 2]
    (notice,) = [each for each in told if "truncated" in each]
    assert notice.startswith("long: 2 prompts truncated in the middle, by up to ")
    assert notice.endswith("tokens, to fit into 300 tokens")
    ((title, _), *_) = tables(table)
    assert "documents a task: 3, 2 of them truncated in the middle" in title


def test_every_task_gives_a_figure_for_every_variant(folder, tmp_path):
    rows = [{"context": TEXT[:500], "question": f"Which {n}?", "answer": "x"} for n in range(3)]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tasks = ["niah_single", "needle_grid", "ppl", str(file)]
    asked = plan(folder, tasks, lengths=[900], limit=2, depths=2, max_tokens=3)
    table = evaluate(asked, Observer())
    figures = {(result.task, result.depth, result.variant): result for result in table.results}
    places = [("niah_single", None), ("needle_grid", 0.0), ("needle_grid", 1.0), ("ppl", None), ("mine", None)]
    assert set(figures) == {(*place, label) for place in places for label in ("full", "quest 80")}
    assert all(result.score.examples == 2 for result in table.results)
    assert figures["mine", None, "full"].length is None
    assert figures["mine", None, "full"].metric == "qa_f1"
    assert table.complete


def test_what_is_thought_is_no_answer(folder, tmp_path, monkeypatch):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"context": TEXT[:400], "question": "Who?", "answer": "fox", "metric": "contains"}))
    for told, wanted in (("The fox.", 100), ("The dog.", 0)):
        monkeypatch.setattr(StreamingDetokenizer, "thoughts", property(lambda _, told=told: ("The fox?", told)))
        table = evaluate(plan(folder, [str(file)], max_tokens=4), Observer())
        assert [each.score.value for each in table.results] == [wanted, wanted]


def test_variants_read_apart_answer_as_those_read_together(folder, monkeypatch):
    asked = plan(folder, ["niah_single"], methods=["full", "quest", "freekv"], lengths=[700], limit=1, max_tokens=6)
    together = evaluate(asked, Observer())
    monkeypatch.setattr("kvcli.quality.eval.runner._SHARE", 0.0)
    apart = evaluate(asked, Observer())
    for one, other in zip(together.results, apart.results, strict=True):
        assert (one.variant, one.score, one.cost.attended) == (other.variant, other.score, other.cost.attended)


def test_samples_differ_and_come_again_with_the_seed(folder, tmp_path):
    texts = []
    for name in ("a", "b"):
        file = tmp_path / name
        sampling = Sampling(temperature=1.0, num_samples=3, seed=5)
        options = {"lengths": [500], "limit": 1, "max_tokens": 8, "sampling": sampling, "predictions": file}
        table = evaluate(plan(folder, ["niah_single"], **options), Observer())
        texts.append([json.loads(line)["text"] for line in file.read_text().splitlines()[1:]])
        assert set(table.results[0].pass_at) == {1, 2, 3}
    assert texts[0] == texts[1]
    assert len(texts[0]) == 6
    assert len(set(texts[0][:3])) > 1


def test_ctrl_c_leaves_what_was_answered(folder, tmp_path, monkeypatch):
    ask, file = Evaluation._ask, tmp_path / "p.jsonl"

    def interrupted(self, questions, index):
        if index == 1:
            raise KeyboardInterrupt
        ask(self, questions, index)

    options = {"lengths": [500], "limit": 2, "max_tokens": 4, "predictions": file}
    with monkeypatch.context() as patched:
        patched.setattr(Evaluation, "_ask", interrupted)
        table = evaluate(plan(folder, ["niah_single"], **options), Observer())
    assert not table.complete
    assert [result.score.examples for result in table.results] == [1, 1]
    whole = evaluate(plan(folder, ["niah_single"], **options), Observer())
    assert whole.complete
    assert [result.score.examples for result in whole.results] == [2, 2]


AIME = {"problem": "The dog sleeps under the old tree. Find $m$.", "answer": 25}


def aime(tmp_path):
    file = tmp_path / "aime24.jsonl"
    file.write_text(json.dumps(AIME) + "\n")
    return file


def answered(file):
    rows = map(json.loads, file.read_text().splitlines()[1:])
    return {(row["variant"], row["sample"]): (row["text"], row["score"], row["attended"]) for row in rows}


def test_what_a_sample_said_is_kept_when_it_ends_and_the_others_are_asked_again(folder, tmp_path, monkeypatch):
    options = {"max_tokens": 12, "sampling": Sampling(temperature=1.0, num_samples=4)}
    asked = plan(folder, [str(aime(tmp_path))], budgets=(64,), predictions=tmp_path / "whole.jsonl", **options)
    whole = evaluate(asked, Observer())
    assert len(answered(asked.predictions)) == 8
    assert len({text for text, _, _ in answered(asked.predictions).values()}) > 4
    asked = replace(asked, predictions=tmp_path / "cut.jsonl")
    entry, made = Evaluation._entry, []

    def interrupted(self, *arguments):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(entry(self, *arguments))
        return made[-1]

    with monkeypatch.context() as patched:
        patched.setattr(Evaluation, "_entry", interrupted)
        assert evaluate(asked, Observer()).results == []  # no example has all of its samples
    assert len(answered(asked.predictions)) == 2
    with monkeypatch.context() as patched:
        patched.setattr(Evaluation, "_entry", lambda *arguments: made.append(entry(*arguments)) or made[-1])
        again = evaluate(asked, Observer())
    assert len(made) == 8
    assert answered(asked.predictions) == answered(tmp_path / "whole.jsonl")
    assert [(each.score, each.pass_at) for each in again.results] == [(e.score, e.pass_at) for e in whole.results]


def test_a_sample_alone_is_what_it_was_among_others(folder, tmp_path):
    options = {"max_tokens": 12, "sampling": Sampling(temperature=1.0, num_samples=3), "budgets": (64,)}
    asked = plan(folder, [str(aime(tmp_path))], predictions=tmp_path / "p.jsonl", **options)
    evaluate(asked, Observer())
    before, lines = answered(asked.predictions), asked.predictions.read_text().splitlines(keepends=True)
    asked.predictions.write_text("".join(line for line in lines if '"sample": 2' not in line))
    evaluate(asked, Observer())
    assert answered(asked.predictions) == before


def test_a_problem_is_never_cut_and_the_answer_gets_the_room_that_is_left(folder, tmp_path):
    example = read_examples(aime(tmp_path))["aime24"][0]
    tokenizer = open_checkpoint(ModelSpec(str(folder))).tokenizer
    read = encode_example(example, Template(), tokenizer, None, 200)
    assert (read.cut, len(read.ids) + read.max_tokens) == (0, 200)
    assert encode_example(example, Template(), tokenizer, None, None).max_tokens == 32768
    for asked, most in ((150, 200), (None, len(read.ids))):
        with pytest.raises(KvcliError, match=f"leaves no room for a prompt of {len(read.ids)} within {most}") as raised:
            encode_example(example, Template(), tokenizer, asked, most)
        assert raised.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("tasks", "options", "said"),
    [
        (["niah_sinlge"], {}, "niah_sinlge"),
        (["none.jsonl"], {}, "no such file"),
        (["ppl:none.txt"], {}, "no such file"),
        (["fidelity:none.txt"], {}, "no such file"),
        (["fidelity"], {}, "unknown task 'fidelity'"),
        ([f"fidelity:{__file__}"], {"lengths": [90], "max_tokens": 1}, "after a token that was fed"),
        (["vt", "vt"], {}, "'vt' is there twice"),
        (["vt"], {"lengths": [8192]}, "8,192 tokens is beyond the 4,096 positions"),
        (["vt"], {"lengths": [20]}, "20 tokens|too short"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(folder, tasks, options, said):
    with pytest.raises(KvcliError, match=said) as raised:
        evaluate(plan(folder, tasks, limit=1, **options), Observer())
    assert raised.value.exit_code == ExitCode.USAGE
    assert raised.value.hint


def test_a_text_too_short_for_one_stretch_is_refused(folder, document):
    with pytest.raises(KvcliError, match="fewer than 3,900 to read"):
        evaluate(plan(folder, [f"ppl:{document}"], lengths=[3900]), Observer())


def test_a_profile_calibrated_for_another_model_is_refused(folder, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('method = "quest"\n[provenance]\nmodel = "other"\nmodel_hash = "123456789abc"\n')
    asked = EvaluationPlan(ModelSpec(str(folder)), variants([], [str(file)], [], {}), ["vt"])
    with pytest.raises(KvcliError, match="calibrated for other") as raised:
        evaluate(asked, Observer())
    assert raised.value.exit_code == ExitCode.USAGE


def test_a_variant_that_memory_does_not_hold_is_refused_before_the_weights_are_read(folder, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda _: {"host": 1 << 20})
    monkeypatch.setattr(type(open_checkpoint(ModelSpec(str(folder)))), "load", lambda _: pytest.fail("loaded"))
    with pytest.raises(KvcliError, match="are free") as raised:
        evaluate(plan(folder, ["vt"], lengths=[3000]), Observer())
    assert raised.value.exit_code == ExitCode.WILL_NOT_FIT


def test_the_same_file_has_the_same_digest_and_another_one_has_not(tmp_path):
    for name, text in (("a.jsonl", "1"), ("b.jsonl", "1"), ("c.jsonl", "2")):
        (tmp_path / name).write_text(text)
    first, second, third = suite.digests([str(tmp_path / f"{name}.jsonl") for name in "abc"]).values()
    assert first == second != third
    assert suite.digests(["vt", "ppl", "needle_grid"]) == {}
    assert len({*suite.digests([f"{asked}:{__file__}" for asked in ("ppl", "fidelity", "requests")]).values()}) == 1


def test_the_last_of_several_turns_is_answered_as_a_prompt_that_holds_them_all(folder, tmp_path):
    """With full attention it makes no difference that the turns before were given token by token."""
    lines = tmp_path / "p.jsonl"
    evaluate(plan(folder, ["turns"], lengths=[400], limit=1, predictions=lines), Observer())
    got = [answer for answer in map(json.loads, lines.read_text().splitlines()) if answer.get("variant") == "full"]
    assert len(got) == 1
    checkpoint = open_checkpoint(ModelSpec(str(folder)))
    tokenizer, model = checkpoint.tokenizer, AutoModelForCausalLM.from_pretrained(folder)
    frame = len(tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True).input_ids)
    cells = suite.Suite(plan(folder, ["turns"], lengths=[400]), tokenizer, frame - suite.count_tokens(tokenizer, "x"))
    (cell,) = cells.cells()
    for index, answer in enumerate(got):
        read = encode_example(cell.make(index), Template(), tokenizer, None, None)
        ids = torch.tensor([read.ids + read.turns])
        assert len(read.turns) > 20
        whole = model.generate(ids, max_new_tokens=read.max_tokens, do_sample=False)[0, ids.shape[1] :]
        assert answer["text"] == tokenizer.decode(whole, skip_special_tokens=True)
        assert answer["prompt_tokens"] == len(read.ids)
        assert answer["output_tokens"] == len(whole)


def test_an_answer_has_the_room_that_the_right_one_takes(folder):
    checkpoint = open_checkpoint(ModelSpec(str(folder)))
    short, long = suite.Suite(
        plan(folder, ["niah_single", "records_json"], lengths=[900]), checkpoint.tokenizer
    ).cells()
    assert short.make(0).max_tokens == suite.MAX_TOKENS
    example = long.make(0)
    assert example.max_tokens > suite.count_tokens(checkpoint.tokenizer, ", ".join(example.references))
