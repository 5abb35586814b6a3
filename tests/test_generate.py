import json
import time
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, tiny_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcli.capacity import memory, unnamed
from kvcli.errors import ExitCode, KvcliError
from kvcli.generate import generate
from kvcli.inputs.options import DiskOptions, Keep
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.prompts import Prompt
from kvcli.methods.actqkv import ActQKV
from kvcli.models.loading import ModelSpec
from kvcli.request import GenerationRequest
from kvcli.runtime import engine
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.saved.library import KVOptions
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.timeline import Timeline

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


def run(path, observer=None, prompts=PROMPTS, method="freekv", overrides=SMALL, audit=None, timeline=None, **sampling):
    profile = resolve_profile(method=method, overrides=overrides)
    sampling = Sampling(**{"max_tokens": 12, "ignore_eos": True, **sampling})
    request = GenerationRequest(profile, prompts, sampling, audit=audit)
    return generate(ModelSpec(path), request, observer or Watcher(), timeline)


def test_looking_for_retrieval_heads_does_not_count_as_reading(checkpoint, monkeypatch):
    """Their scores are found once for a model, before the first prompt is read."""
    look = engine.head_scores

    def slow(*given):
        time.sleep(2)
        return look(*given)

    monkeypatch.setattr(engine, "head_scores", slow)
    (sequence, *_) = run(
        checkpoint, prompts=PROMPTS[:1], method="duoattention", overrides={"sink": 4, "window": 8}
    ).sequences
    assert sequence.timing.prefill_ms < 2000 < sequence.timing.ttft_ms


def test_report_of_a_batch(checkpoint):
    watcher = Watcher()
    report = run(checkpoint, watcher)
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
    report = run(str(tmp_path), Watcher(), (PROMPTS[0],), overrides={}, max_tokens=16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": TEXT}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    expected = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    assert report.sequences[0].token_ids == expected.tolist()
    assert report.sequences[0].prompt_tokens == ids.shape[1]


@pytest.mark.parametrize("penalty", [0.8, 1.1, 1.5])
def test_a_repetition_penalty_is_that_of_transformers(checkpoint, penalty):
    """Also where drafts are checked, and of a prompt that runs with others."""
    asked = {"overrides": {}, "max_tokens": 24, "repetition_penalty": penalty}
    report = run(checkpoint, prompts=PROMPTS, method="full", **asked)
    model, tokenizer = (each.from_pretrained(checkpoint) for each in (AutoModelForCausalLM, AutoTokenizer))
    for prompt, sequence in zip(PROMPTS, report.sequences, strict=True):
        chat = [{"role": "user", "content": prompt.content}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids, how = encoded["input_ids"], {"do_sample": False, "eos_token_id": None, "repetition_penalty": penalty}
        expected = model.float().generate(ids, max_new_tokens=24, **how)[0, ids.shape[1] :]
        assert sequence.token_ids == expected.tolist()
    plain = run(checkpoint, prompts=PROMPTS, method="full", overrides={}, max_tokens=24)
    assert plain.sequences[0].token_ids != report.sequences[0].token_ids


def test_a_penalty_of_the_checkpoint_is_named(checkpoint, tmp_path):
    path = tiny_checkpoint("llama", tmp_path)
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(config | {"repetition_penalty": 1.05}))
    watcher, told = Watcher(), Watcher()
    assert run(str(path), watcher).sequences[0].text == run(checkpoint).sequences[0].text
    (notice,) = (each for each in watcher.notices if "repetition" in each)
    assert "--repetition-penalty 1.05" in notice
    run(str(path), told, repetition_penalty=1.2)
    assert not any("repetition" in each for each in told.notices)


def test_the_wait_from_the_start_is_reported_where_it_is_known(checkpoint):
    profile = resolve_profile("full")
    request = GenerationRequest(profile, PROMPTS[:2], Sampling(max_tokens=3, ignore_eos=True))
    known = generate(ModelSpec(checkpoint), request, Watcher(), started=time.perf_counter() - 100)
    for sequence in known.sequences:
        assert sequence.timing.ttft_ms < 100_000 < sequence.timing.ttft_from_start_ms
    assert run(checkpoint).sequences[0].timing.ttft_from_start_ms is None


def test_samples_share_a_prefill_and_differ(checkpoint):
    watcher = Watcher()
    report = run(checkpoint, watcher, PROMPTS[:2], num_samples=3, temperature=2.0, seed=5)
    assert [(s.source, s.sample) for s in report.sequences] == [(x, i) for x in "ab" for i in range(3)]
    assert watcher.stages == ["load", "prefill", "prefill"]
    assert len({tuple(s.token_ids) for s in report.sequences[:3]}) == 3
    alone = run(checkpoint, Watcher(), PROMPTS[1:2], num_samples=3, temperature=2.0, seed=5)
    assert [s.token_ids for s in alone.sequences] == [s.token_ids for s in report.sequences[3:]]


def test_interrupt_keeps_what_was_generated(checkpoint):
    watcher = Watcher(interrupt_at=5)
    report = run(checkpoint, watcher, PROMPTS[:2])
    assert [s.finish_reason for s in report.sequences] == ["interrupted"] * 2
    assert [s.output_tokens for s in report.sequences] == [5, 5]
    assert {i: s.text for i, s in enumerate(report.sequences) if s.text} == watcher.texts


def test_interrupt_while_the_second_prompt_is_read(checkpoint):
    class OneOnly(Watcher):
        def stage(self, name, total=None):
            super().stage(name, total)
            if self.stages.count("prefill") == 2:
                raise KeyboardInterrupt

    report = run(checkpoint, OneOnly(), PROMPTS[:2])
    assert [(s.finish_reason, s.output_tokens) for s in report.sequences] == [("interrupted", 1), ("interrupted", 0)]


def test_stop_string_and_eos(checkpoint):
    free = run(checkpoint, Watcher(), PROMPTS[:1], max_tokens=20).sequences[0]
    stop = free.text[4:7]
    cut = run(checkpoint, Watcher(), PROMPTS[:1], max_tokens=20, stop=(stop,)).sequences[0]
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(stop)]


def test_a_prompt_that_cannot_be_encoded_fails_alone(checkpoint, monkeypatch):
    import kvcli.inputs.encoding as module

    real = module.encode

    def encode(prompt, template, tokenizer):
        if prompt.source == "b":
            raise KvcliError("b: the prompt has no tokens", "", ExitCode.USAGE)
        return real(prompt, template, tokenizer)

    monkeypatch.setattr(module, "encode", encode)
    report = run(checkpoint, Watcher())
    assert [s.finish_reason for s in report.sequences] == ["length", "error", "length"]
    assert report.sequences[1].error == "b: the prompt has no tokens"
    with pytest.raises(KvcliError):
        run(checkpoint, Watcher(), PROMPTS[1:2])


def test_context_past_the_models_positions_is_a_notice(tmp_path):
    tiny_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    watcher = Watcher()
    run(str(tmp_path), watcher, PROMPTS[:1])
    assert any("64 positions" in notice for notice in watcher.notices)


@pytest.mark.parametrize("refused", ["for its memory", "for its saved KV", "for its disk"])
def test_which_method_serves_is_said_before_the_run_is_refused(checkpoint, monkeypatch, tmp_path, refused):
    request = GenerationRequest(resolve_profile(), PROMPTS, Sampling(max_tokens=4))
    if refused == "for its memory":
        monkeypatch.setattr(memory, "available", lambda _: {"host": 1})
    elif refused == "for its saved KV":
        request = replace(request, kv=KVOptions(use=tmp_path / "none"))
    else:
        request = replace(request, disk=DiskOptions(folder=tmp_path), keep=Keep(directory=tmp_path / "kept"))
    watcher = Watcher()
    with pytest.raises(KvcliError):
        generate(ModelSpec(checkpoint), request, watcher)
    assert [notice[:12] for notice in watcher.notices] == ["no --method:"]


def test_drafts_that_gain_nothing_are_a_notice(checkpoint, monkeypatch):
    """Beyond four budgets they may gain something, if the KV is large beside the weights."""
    monkeypatch.setattr(unnamed, "SHARE", 0.0)
    profile = resolve_profile(method="freekv", overrides=SMALL)
    told = []
    for text in (PROMPTS[0], Prompt("long", 2 * TEXT)):
        request, watcher = GenerationRequest(profile, [text], Sampling(max_tokens=4), lossless=2), Watcher()
        generate(ModelSpec(checkpoint), request, watcher)
        told.append(any("--lossless saves no time" in notice for notice in watcher.notices))
    assert told == [True, False]


def test_trace_is_chrome_trace_json(checkpoint, tmp_path):
    timeline, trace = Timeline(enabled=True), tmp_path / "trace.json"
    run(checkpoint, prompts=PROMPTS[:1], timeline=timeline)
    timeline.save(trace)
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
    report = run(checkpoint, Watcher(), method="actqkv", overrides=small)
    assert previews[:2] == [[], []]
    assert report.sequences[2].output_tokens == 12
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(previews[2]) == PROMPTS[2].question
    statistics = json.loads(report.to_json())["sequences"][0]["method"]
    assert statistics["decode"]["blocks_requested"] > 0
    assert len(statistics["layers"]) == 4


@pytest.mark.parametrize("audit", [None, 2])
def test_an_interrupt_at_the_first_piece_of_text_keeps_it(checkpoint, audit):
    class AtOnce(Watcher):
        def text(self, sequence, piece):
            super().text(sequence, piece)
            raise KeyboardInterrupt

    watcher = AtOnce()
    report = run(checkpoint, watcher, PROMPTS[:1], audit=audit)
    assert [s.finish_reason for s in report.sequences] == ["interrupted"]
    assert report.sequences[0].text == watcher.texts[0] != ""


def broken(path, name, value):
    """A checkpoint in which one weight holds a value that is not finite."""
    tiny_checkpoint("llama", path)
    weights = load_file(path / "model.safetensors")
    weights[name].view(-1)[7] = value
    save_file(weights, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(tmp_path, value, temperature):
    name = "model.layers.2.mlp.up_proj.weight"
    broken(tmp_path, name, value)
    report = run(str(tmp_path), prompts=PROMPTS[:2], temperature=temperature)
    assert [s.finish_reason for s in report.sequences] == ["error"] * 2
    assert (
        report.sequences[0].error
        == f"NaN or infinity in the logits of token 1 of the output: the weights of {name} hold it"
    )


def test_a_layer_that_overflows_is_named(tmp_path):
    broken(tmp_path, "model.layers.1.mlp.down_proj.weight", 3e38)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1e30
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (sequence,) = run(str(tmp_path), prompts=PROMPTS[:1]).sequences
    assert "it first shows after layer 1;" in sequence.error
