import json

import pytest
import torch
from families import FAMILIES, tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcli.errors import ExitCode, KvcliError
from kvcli.generate import GenerationRequest, generate
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.prompts import Prompt, Template
from kvcli.methods.actqkv import ActQKV
from kvcli.models.loading import ModelSpec
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.observer import Observer

TEXT = "the quick brown fox jumps over the lazy dog and the number of the third key is 4711 " * 3
SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8}
PROMPTS = (Prompt("a", TEXT), Prompt("b", "a short one"), Prompt("c", TEXT[40:], "what is the number?"))


class Watcher(Observer):
    def __init__(self, interrupt_at=None):
        self.texts, self.ended, self.notices, self.stages = {}, [], [], []
        self.interrupt_at = interrupt_at

    def stage(self, name, total=None):
        self.stages.append(name)

    def text(self, sequence, piece):
        self.texts[sequence] = self.texts.get(sequence, "") + piece

    def finished(self, sequence):
        self.ended.append(sequence)

    def notice(self, message):
        self.notices.append(message)

    def step(self, done, total):
        assert done <= total
        if done == self.interrupt_at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint("llama", path)
    return str(path)


def request(path, prompts=PROMPTS, method="freekv", overrides=SMALL, **sampling):
    sampling = {"max_tokens": 12, "ignore_eos": True, **sampling}
    return GenerationRequest(
        ModelSpec(path), resolve_profile(method=method, overrides=overrides), prompts, Sampling(**sampling)
    )


def test_report_of_a_batch(checkpoint):
    watcher = Watcher()
    report = generate(request(checkpoint), watcher)
    assert [sequence.source for sequence in report.sequences] == ["a", "b", "c"]
    assert {sequence.finish_reason for sequence in report.sequences} == {"length"}
    assert sorted(watcher.ended) == [0, 1, 2]
    for index, sequence in enumerate(report.sequences):
        assert watcher.texts.get(index, "") == sequence.text
        assert sequence.output_tokens == len(sequence.token_ids) == 12
        assert len(sequence.timing.decode_ms) == len(sequence.steps) == 11
        assert 0 < sequence.timing.prefill_ms <= sequence.timing.ttft_ms
    assert report.sequences[1].cache.pages_requested == 0  # it never outgrew the budget
    assert report.sequences[0].cache.pages_requested > 0
    assert report.memory.host_kv_bytes > 0
    body = json.loads(report.to_json())
    assert body["profile"]["settings"]["budget"] == 48
    assert body["model"]["type"] == "llama"


@pytest.mark.parametrize("family", FAMILIES)
def test_from_files_to_tokens_as_transformers_has_it(family, tmp_path):
    tiny_checkpoint(family, tmp_path)
    report = generate(request(str(tmp_path), (PROMPTS[0],), overrides={}, max_tokens=16), Watcher())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": TEXT}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    expected = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    assert report.sequences[0].token_ids == expected.tolist()
    assert report.sequences[0].prompt_tokens == ids.shape[1]


def test_samples_share_a_prefill_and_differ(checkpoint):
    watcher = Watcher()
    report = generate(request(checkpoint, PROMPTS[:2], num_samples=3, temperature=2.0, seed=5), watcher)
    assert [(s.source, s.sample) for s in report.sequences] == [(x, i) for x in "ab" for i in range(3)]
    assert watcher.stages == ["load", "prefill", "prefill"]
    assert len({tuple(s.token_ids) for s in report.sequences[:3]}) == 3
    alone = generate(request(checkpoint, PROMPTS[1:2], num_samples=3, temperature=2.0, seed=5), Watcher())
    assert [s.token_ids for s in alone.sequences] == [s.token_ids for s in report.sequences[3:]]


def test_interrupt_keeps_what_was_generated(checkpoint):
    watcher = Watcher(interrupt_at=5)
    report = generate(request(checkpoint, PROMPTS[:2]), watcher)
    assert [s.finish_reason for s in report.sequences] == ["interrupted"] * 2
    assert [s.output_tokens for s in report.sequences] == [5, 5]
    assert {i: s.text for i, s in enumerate(report.sequences) if s.text} == watcher.texts


def test_interrupt_while_the_second_prompt_is_read(checkpoint):
    class OneOnly(Watcher):
        def stage(self, name, total=None):
            super().stage(name, total)
            if self.stages.count("prefill") == 2:
                raise KeyboardInterrupt

    report = generate(request(checkpoint, PROMPTS[:2]), OneOnly())
    assert [(s.finish_reason, s.output_tokens) for s in report.sequences] == [("interrupted", 1), ("interrupted", 0)]


def test_stop_string_and_eos(checkpoint):
    free = generate(request(checkpoint, PROMPTS[:1], max_tokens=20), Watcher()).sequences[0]
    stop = free.text[4:7]
    cut = generate(request(checkpoint, PROMPTS[:1], max_tokens=20, stop=(stop,)), Watcher()).sequences[0]
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(stop)]


def test_a_prompt_that_cannot_be_encoded_fails_alone(checkpoint, monkeypatch):
    import kvcli.runtime.prefill_runner as module

    real = module.encode

    def encode(prompt, template, tokenizer):
        if prompt.source == "b":
            raise KvcliError("b: the prompt has no tokens", "", ExitCode.USAGE)
        return real(prompt, template, tokenizer)

    monkeypatch.setattr(module, "encode", encode)
    report = generate(request(checkpoint), Watcher())
    assert [s.finish_reason for s in report.sequences] == ["length", "error", "length"]
    assert report.sequences[1].error == "b: the prompt has no tokens"
    with pytest.raises(KvcliError):
        generate(request(checkpoint, PROMPTS[1:2]), Watcher())


def test_context_past_the_models_positions_is_a_notice(tmp_path):
    tiny_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    watcher = Watcher()
    generate(request(str(tmp_path), PROMPTS[:1]), watcher)
    assert any("64 positions" in notice for notice in watcher.notices)


def test_trace_is_chrome_trace_json(checkpoint, tmp_path):
    wanted = request(checkpoint, PROMPTS[:1])
    trace = tmp_path / "trace.json"
    generate(
        GenerationRequest(wanted.model, wanted.profile, wanted.prompts, wanted.sampling, Template(), trace), Watcher()
    )
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["name"] for event in spans}
    assert {"load", "prefill", "step", "select", "recall", "attention"} <= names
    assert all(event["dur"] >= 0 for event in spans)
    steps = [event for event in spans if event["name"] == "step"]
    assert len(steps) == 11
    for span in spans:
        if span["name"] == "select":
            assert any(s["ts"] <= span["ts"] and span["ts"] + span["dur"] <= s["ts"] + s["dur"] + 1 for s in steps)
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"run", "sequence 0"}


def test_the_question_alone_reaches_a_method_that_reads_by_windows(checkpoint, monkeypatch):
    small, previews = {**SMALL, "prefill_window": 16}, []

    def preview(method):
        previews.append(list(method.context.question))
        return ()

    monkeypatch.setattr(ActQKV, "preview", property(preview))
    report = generate(request(checkpoint, method="actqkv", overrides=small), Watcher())
    assert previews[:2] == [[], []]
    assert report.sequences[2].output_tokens == 12
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(previews[2]) == PROMPTS[2].question
    statistics = json.loads(report.to_json())["sequences"][0]["method"]
    assert statistics["decode"]["blocks_requested"] > 0
    assert len(statistics["layers"]) == 4
