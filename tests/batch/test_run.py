"""Batches on a tiny model: what a row gets, whatever else runs; what one row's failure does to others."""

import json
import threading
import time
from dataclasses import asdict
from functools import partial

import pytest
import torch
from families import MAX_POSITIONS, tiny_checkpoint

import kvcli
from kvcli.batch import inflight
from kvcli.batch.inflight import Room
from kvcli.batch.rows import digest_of
from kvcli.batch.run import BatchRequest, run
from kvcli.batch.stop import Stop
from kvcli.batch.tally import Tally
from kvcli.capacity.memory import RUNTIME_BYTES
from kvcli.errors import KvcliError
from kvcli.inputs.options import KVOptions, Sampling, Template
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.loading import ModelSpec, open_checkpoint
from kvcli.runtime.decode import BlockingStepper
from kvcli.runtime.detokenizer import StreamingDetokenizer
from kvcli.runtime.engine import Engine
from kvcli.telemetry.observer import Observer

LONG = 600  # tokens, more than other rows have
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "sleeps", "while"]
SETTINGS = {"budget": 96, "sink": 16, "window": 32, "page_size": 16}


class Notices(Observer):
    def __init__(self):
        self.found = []

    def notice(self, message):
        self.found.append(message)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_checkpoint("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def batch(model, tmp_path):
    """Runs rows; gives results by name, the counts, and what was told."""

    def run_rows(
        rows,
        method="freekv",
        stop=None,
        output=None,
        settings=SETTINGS,
        tally=None,
        model=model,
        weights_on="device",
        **options,
    ):
        source, output = tmp_path / "in.jsonl", output or tmp_path / "out.jsonl"
        source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        request = BatchRequest(
            str(source), output, resolve_profile(method, None, settings), Sampling(max_tokens=6), **options
        )
        tally, observer = tally or Tally(), Notices()
        run(ModelSpec(model, weights_on=weights_on), request, observer, tally, stop or Stop())
        lines = output.read_text().splitlines() if output.exists() else []
        results = {result["custom_id"]: result for result in map(json.loads, lines)}
        assert len(results) == len(lines)
        return results, tally, observer.found

    return run_rows


@pytest.fixture
def fresh(batch, tmp_path):
    """The same, each time into a new file."""
    numbers = iter(range(99))
    return lambda *args, **options: batch(*args, output=tmp_path / f"{next(numbers)}.jsonl", **options)


def text(number, words):
    return " ".join(WORDS[(number * 5 + place * (number + 2)) % len(WORDS)] for place in range(words))


def rows(count, **more):
    return [
        {"custom_id": f"r{n}", "prompt": text(n, 20 + 37 * n % 150), "max_tokens": 3 + 7 * n % 11, "seed": n, **more}
        for n in range(count)
    ]


def texts(results):
    return {
        name: [choice["message"]["content"] for choice in result["response"]["body"]["choices"]]
        for name, result in results.items()
    }


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_row_gets_what_it_gets_alone_whatever_else_runs(fresh, model, temperature):
    asked = rows(9, temperature=temperature)
    together, tally, _ = fresh(asked, max_inflight=4, prefill_share=0.3)
    assert tally.done == 9
    alone, *_ = fresh(asked, max_inflight=1)
    reverse, *_ = fresh(asked[::-1], max_inflight=9, prefill_share=1.0)
    assert texts(together) == texts(alone) == texts(reverse)
    lm = kvcli.load(model)
    for row in asked:
        options = {name: row[name] for name in ("max_tokens", "seed", "temperature")}
        answer = lm.generate(row["prompt"], method="freekv", **options, **SETTINGS)
        assert answer.text == texts(together)[row["custom_id"]][0]


def test_a_row_has_a_penalty_of_its_own(fresh, model):
    row = {"custom_id": "a", "prompt": text(1, 20), "max_tokens": 12, "ignore_eos": True}
    found, *_ = fresh([row, {**row, "custom_id": "b", "repetition_penalty": 1.5}])
    said, lm = texts(found), kvcli.load(model)
    options = {"max_tokens": 12, "ignore_eos": True, "repetition_penalty": 1.5}
    assert lm.generate(row["prompt"], method="freekv", **options, **SETTINGS).text == said["b"][0] != said["a"][0]
    keys = {name: result["kvcli"]["key"]["sampling"] for name, result in found.items()}
    sampling = {**asdict(Sampling(12, ignore_eos=True)), "template": asdict(Template()), "question": None}
    del sampling["repetition_penalty"]  # as in files of results that were written before there was one
    assert keys["a"] == digest_of(sampling) != keys["b"]


def test_rows_join_as_others_end(fresh):
    asked = [{"custom_id": f"r{n}", "prompt": text(n, 20), "max_tokens": 40 if n == 0 else 5} for n in range(9)]
    _, tally, _ = fresh([{**row, "ignore_eos": True} for row in asked], max_inflight=3)
    assert tally.steps == 39  # the long one and, beside it, two at a time of the others: 4 x 4 steps
    assert tally.output_tokens == 40 + 8 * 5


def test_running_rows_take_steps_while_a_prompt_is_read(fresh, monkeypatch):
    asked = [
        {"custom_id": "first", "prompt": text(1, 30), "max_tokens": 60, "ignore_eos": True},
        {"custom_id": "second", "prompt": text(2, 300), "max_tokens": 3, "ignore_eos": True},
    ]
    steps = []
    prefill = Engine.prefill_branches

    def watched(engine, *args, **options):
        before = tally.steps
        result = prefill(engine, *args, **options)
        steps.append(tally.steps - before)
        return result

    monkeypatch.setattr(Engine, "prefill_branches", watched)
    outcomes = []
    for share in (0.05, 1.0):
        tally = Tally()
        outcomes.append(texts(fresh(asked, prefill_share=share, tally=tally)[0]))
    assert steps[0] == steps[2] == steps[3] == 0
    assert steps[1] > 0
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("method", ["infllm", "infinigen", "full"])
def test_steps_between_chunks_change_nothing_for_methods_of_every_kind(fresh, method):
    asked, options = rows(5), {"method": method, "settings": {}}
    assert texts(fresh(asked, prefill_share=0.1, **options)[0]) == texts(fresh(asked, max_inflight=1, **options)[0])


def test_questions_on_one_document_are_read_once(fresh):
    document = text(3, 300)
    asked = [{"custom_id": f"q{n}", "document": document, "prompt": text(n, 5)} for n in range(6)]
    mixed = [row for pair in zip(asked, rows(6), strict=True) for row in pair]
    results, tally, _ = fresh(mixed, max_inflight=2)
    usage = [results[f"q{n}"]["response"]["body"]["usage"] for n in range(6)]
    assert sum(each["prompt_tokens_details"]["cached_tokens"] > 250 for each in usage) == 5
    assert tally.shared_tokens > 5 * 250
    assert texts(results)["q4"] == texts(fresh([asked[4]])[0])["q4"]


def test_rows_in_flight_share_a_pass_over_streamed_weights(fresh, model):
    """Eight rows are read in one pass, and each step is one more."""
    asked = [
        {"custom_id": f"r{n}", "prompt": text(n, 20 + 30 * n), "max_tokens": 6, "ignore_eos": True} for n in range(8)
    ]
    how = {"method": "full", "settings": {}, "max_inflight": 8}
    results, tally, _ = fresh(asked, weights_on="disk", **how)
    assert texts(results) == texts(fresh(asked, **how)[0])
    per_pass = open_checkpoint(ModelSpec(model, weights_on="disk")).geometry.streaming.per_pass
    assert tally.steps == 5
    assert 6 * per_pass <= tally.weight_bytes < 6.6 * per_pass  # the first layers of a pass that does not come
    assert tally.progress().weight_bytes == tally.weight_bytes


def test_streamed_weights_and_questions_on_one_document(fresh):
    document = text(3, 300)
    asked = [{"custom_id": f"q{n}", "document": document, "prompt": text(n, 5)} for n in range(3)] + rows(3)
    results, tally, _ = fresh(asked, weights_on="disk", max_inflight=4)
    assert texts(results) == texts(fresh(asked, max_inflight=4)[0])
    assert tally.shared_tokens > 2 * 250


def test_documents_are_kept_between_runs(fresh, tmp_path):
    document = text(3, 300)
    asked = [{"custom_id": f"q{n}", "document": document, "prompt": text(n, 5)} for n in range(2)]
    wanted = texts(fresh([asked[1]])[0])
    store = KVOptions(cache=tmp_path / "store")
    _, first, _ = fresh([asked[0]], kv=store)
    results, second, _ = fresh([asked[1]], kv=store)
    assert texts(results) == wanted
    assert second.prompt_tokens < 100 < 300 < first.prompt_tokens
    usage = results["q1"]["response"]["body"]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - second.prompt_tokens


def test_rows_that_only_seem_alike_are_read_apart(fresh, monkeypatch):
    """Rows that begin with the same half or less, and more of them than are made into tokens at once."""
    monkeypatch.setattr(inflight, "_TOKENS_TOGETHER", 500)
    start = text(1, 60)
    asked = [{"custom_id": f"r{n}", "prompt": f"{start} {text(n // 3, 100)} {text(n, 4)}"} for n in range(11)]
    results, tally, _ = fresh(asked, max_inflight=3)
    assert len(results) == tally.done == 11
    assert texts(results)["r5"] == texts(fresh([asked[5]])[0])["r5"]


def test_samples_of_a_row(fresh):
    results, *_ = fresh([{"custom_id": "a", "prompt": text(1, 30), "n": 3, "temperature": 2}])
    (found,) = texts(results).values()
    assert len(set(found)) == 3
    assert len(results["a"]["kvcli"]["statistics"]) == 3
    assert results["a"]["response"]["body"]["usage"]["completion_tokens"] == 18


def test_bad_rows_are_their_own_results(fresh):
    bad = [
        {"custom_id": "long", "prompt": text(1, MAX_POSITIONS + 1)},
        {"custom_id": "field", "prompt": "x", "tools": []},
        "{nope",
        {"custom_id": "memory", "prompt": "x", "max_tokens": 2**30},
    ]
    results, tally, told = fresh([*bad, *rows(3)])
    codes = {name: result["error"]["code"] for name, result in results.items() if result["error"]}
    assert codes == {
        "long": "context_length_exceeded",
        "field": "invalid_row",
        "line-3": "invalid_json",
        "memory": "context_length_exceeded",
    }
    assert (tally.done, tally.failed) == (3, 4)
    assert [each for each in told if "line 2: 'field': unknown field 'tools'" in each]


def test_a_share_that_is_too_small_for_a_row_is_the_rows_own(batch):
    short, long = text(1, 20), text(2, 300)
    given = [{"custom_id": name, "prompt": prompt} for name, prompt in {"short": short, "long": long}.items()]
    results, _, _ = batch(given, settings={**SETTINGS, "budget": "40%"})
    assert results["short"]["error"]["code"] == "invalid_row"
    assert "budget 40% of a prompt of 75 tokens" in results["short"]["error"]["message"]
    assert results["long"]["error"] is None


def test_only_checking_runs_and_writes_nothing(batch, tmp_path, monkeypatch):
    monkeypatch.setattr("kvcli.models.loading.Checkpoint.load", None)
    results, tally, told = batch([*rows(2), "{nope"], validate_only=True)
    assert (results, tally.failed, len(told)) == ({}, 1, 1)
    assert not (tmp_path / "out.jsonl").exists()


def test_questions_to_a_base_model_are_said_to_be_plain_text_once(batch, tmp_path):
    base, said = str(tiny_checkpoint("llama", tmp_path / "base", chat=False)), "a question (-p) is appended"
    asked = [{"custom_id": f"r{n}", "document": text(n, 20), "prompt": "Who?"} for n in range(3)]
    alone = [{"custom_id": row["custom_id"], "document": row["document"]} for row in asked]
    for given, times in ((asked, 1), (alone, 0)):
        _, _, told = batch(given, output=tmp_path / f"{times}.jsonl", model=base)
        assert sum(said in each for each in told) == times


def test_a_name_twice_is_refused_with_both_lines(batch):
    with pytest.raises(KvcliError, match=r"'r1' in lines 2 and 4; 'r0' in lines 1 and 5"):
        batch([*rows(3), rows(2)[1], rows(1)[0]])


def broken_for(name, error, monkeypatch, at):
    """Lets a row fail: when it is read, or at a step."""
    if at == "prefill":
        original = Engine.prefill_branches

        def prefill(engine, branches, methods, *args, **options):
            if len(branches.tokens) > LONG:
                raise error
            return original(engine, branches, methods, *args, **options)

        monkeypatch.setattr(Engine, "prefill_branches", prefill)
        return
    original_step = BlockingStepper.step

    def step(stepper, batch):
        if any(sequence.source == name and len(sequence.token_ids) > 2 for sequence in batch):
            raise error
        return original_step(stepper, batch)

    monkeypatch.setattr(BlockingStepper, "step", step)


@pytest.mark.parametrize("at", ["prefill", "step"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (ValueError("two\nlines"), "failed"),
    ],
)
def test_a_row_that_fails_leaves_the_others_alone(fresh, monkeypatch, at, error, code):
    asked = [*rows(5), {"custom_id": "hit", "prompt": text(9, LONG), "ignore_eos": True, "max_tokens": 5}]
    wanted = texts(fresh(rows(5))[0])
    broken_for("hit", error, monkeypatch, at)
    results, tally, _ = fresh(asked, max_inflight=4)
    assert results.pop("hit")["error"]["code"] == code
    assert texts(results) == wanted
    assert (tally.done, tally.failed, tally.in_flight) == (5, 1, 0)


def test_logits_that_are_no_numbers_are_the_rows_own(fresh, monkeypatch):
    original = BlockingStepper.step

    def step(stepper, batch):
        found = original(stepper, batch)
        return [
            (torch.full_like(logits, torch.nan) if sequence.source == "r1" else logits, token)
            for sequence, (logits, token) in zip(batch, found, strict=True)
        ]

    monkeypatch.setattr(BlockingStepper, "step", step)
    results, tally, _ = fresh(rows(3))
    assert results["r1"]["error"]["code"] == "not_finite"
    assert tally.done == 2


def test_memory_bounds_what_is_in_flight(fresh, monkeypatch):
    asked = [{**row, "ignore_eos": True, "max_tokens": 8} for row in rows(6)]
    wanted = texts(fresh(asked)[0])
    most, bound = [], None

    class Narrow(Room):
        def holds(self, kv, workspace):
            if bound is not None:
                self.free = {"host": RUNTIME_BYTES + workspace.on_device + bound}
            return super().holds(kv, workspace)

        def take(self, kv):
            super().take(kv)
            most.append(self.taken.device + self.taken.host)

    monkeypatch.setattr("kvcli.batch.run.Room", Narrow)
    _, tally, _ = fresh(asked)
    bound = max(most) // 2
    most.clear()
    results, narrow, _ = fresh(asked)
    assert bound / 2 < max(most) <= bound
    assert narrow.steps > tally.steps
    assert texts(results) == wanted


def test_ended_runs_go_on_and_lose_only_rows_in_flight(batch):
    asked = [{**row, "max_tokens": 30, "ignore_eos": True} for row in rows(8)]
    stop = Stop(grace=0.0)

    class After:
        def update(self, tally, last=False):
            if tally.done == 2:
                stop.ask()

    first, tally, _ = batch(asked, stop=stop, max_inflight=2, tally=Tally(watchers=[After()]))
    assert 2 <= len(first) < 8
    assert tally.dropped > 0
    second, tally, _ = batch(asked, max_inflight=2)
    assert (len(second), tally.earlier, tally.done) == (8, len(first), 8 - len(first))
    assert all(second[name] == result for name, result in first.items())
    third, tally, _ = batch(asked)
    assert (third, tally.earlier, tally.done) == (second, 8, 0)


def test_rows_in_flight_may_end_within_the_grace(batch):
    asked = [{**row, "max_tokens": 20, "ignore_eos": True} for row in rows(6)]
    stop = Stop(grace=60.0)

    class After:
        def update(self, tally, last=False):
            if tally.steps == 3:
                stop.ask()

    found, tally, _ = batch(asked, stop=stop, max_inflight=2, tally=Tally(watchers=[After()]))
    assert (len(found), tally.dropped) == (2, 0)


def test_asked_twice_there_is_no_grace():
    stop = Stop(grace=60.0, listening=True)
    stop.ask(15)
    stop.ask(15)  # as `timeout` does, to the process and its group
    assert not stop.over
    stop.ask(2)
    assert stop.over
    assert stop.signal == 15


def test_changed_rows_are_refused_or_done_again(batch):
    first, *_ = batch(rows(3))
    changed = [{**rows(3)[0], "seed": 99}, *rows(3)[1:]]
    with pytest.raises(KvcliError, match=r"1 rows whose row and sampling changed: 'r0'"):
        batch(changed)
    with pytest.raises(KvcliError, match=r"3 rows whose profile changed"):
        batch(rows(3), method="full", settings={})
    with pytest.raises(KvcliError, match=r"1 rows that are not in the batch: 'r2'"):
        batch(rows(2))
    second, tally, _ = batch(changed, overwrite=True)
    assert (tally.earlier, tally.done) == (2, 1)
    assert second["r1"] == first["r1"]
    assert second["r0"]["kvcli"]["key"] != first["r0"]["kvcli"]["key"]


def test_errors_are_kept_or_done_again(batch, monkeypatch):
    with monkeypatch.context() as patch:
        broken_for("r1", ValueError("once"), patch, "step")
        first, tally, _ = batch([{**row, "ignore_eos": True, "max_tokens": 5} for row in rows(3)])
    assert (tally.done, tally.failed) == (2, 1)
    again = partial(batch, [{**row, "ignore_eos": True, "max_tokens": 5} for row in rows(3)])
    same, tally, _ = again()
    assert (same, tally.earlier_failed) == (first, 1)
    mended, tally, _ = again(retry_errors=True)
    assert (tally.done, tally.failed, tally.earlier_failed) == (1, 0, 0)
    assert mended["r1"]["error"] is None


def test_a_row_that_changes_while_it_waits_is_its_own_error(batch, tmp_path):
    document = tmp_path / "a.txt"
    document.write_text(text(1, 30))
    asked = [
        {"custom_id": "first", "prompt": "x", "max_tokens": 9},
        {"custom_id": "file", "document_file": "a.txt", "max_tokens": 2},
    ]

    class Change:
        def update(self, tally, last=False):
            document.write_text("other")

    results, *_ = batch(asked, max_inflight=1, tally=Tally(watchers=[Change()]))
    assert results["file"]["error"]["code"] == "row_changed"


def test_a_disk_that_is_full_ends_the_run(batch, monkeypatch):
    def full(*_):
        raise KvcliError("out.jsonl: cannot be written: no space")

    monkeypatch.setattr("kvcli.batch.results.ResultFile.add", full)
    before = threading.active_count(), time.monotonic()
    with pytest.raises(KvcliError, match="no space"):
        batch(rows(4), prefill_share=0.1, max_inflight=2)
    assert threading.active_count() == before[0]


def test_thoughts_are_no_content_of_an_answer(fresh, monkeypatch):
    monkeypatch.setattr(StreamingDetokenizer, "thoughts", property(lambda _: ("hm", "yes")))
    results, *_ = fresh(rows(1))
    (choice,) = results["r0"]["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert not results["r0"]["kvcli"]["statistics"][0].keys() & {"thoughts", "answer", "text"}
