"""Runs that save a document's KV, and runs that go on from it: the same tokens, and nothing used that is not right."""

import json
import os
import shutil

import pytest
import torch
from families import tiny_checkpoint
from saving import QUESTIONS, TEXT, run, tokens
from transformers import AutoTokenizer

from kvcli.errors import ExitCode, KvcliError
from kvcli.generate import generate
from kvcli.inputs.options import KVOptions, Template
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.prompts import Prompt
from kvcli.methods import method_names
from kvcli.models.loading import ModelSpec
from kvcli.request import GenerationRequest
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.saved.manifest import read_manifest
from kvcli.telemetry.observer import Observer

WINDOWED = {"actqkv", "em_llm", "infllm", "lm_infinite", "q_llm"}
OBSERVING = {"expected_attention", "h2o"}  # want every query


class Notes(Observer):
    def __init__(self):
        self.notices = []

    def notice(self, message):
        self.notices.append(message)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint("llama", path)
    return str(path)


@pytest.fixture(scope="module")
def saved(path, tmp_path_factory):
    """The document, as full attention read it."""
    folder = tmp_path_factory.mktemp("kv") / "notes"
    report = run(path, ("",), "full", save=folder)
    (entry,) = report.saved
    assert (entry.path, entry.error) == (str(folder), None)
    assert entry.tokens == len(read_manifest(folder).tokens) == report.sequences[0].prompt_tokens // 32 * 32
    return folder


@pytest.mark.parametrize("name", sorted(set(method_names()) - WINDOWED))
@pytest.mark.usefixtures("short_probe")
def test_a_document_that_full_attention_read_is_opened_under_every_method(name, path, saved):
    notes = Notes()
    report = run(path, method=name, use=saved, observer=notes)
    assert tokens(report) == tokens(
        run(path, method=name)
    )  # which say what each says alone: tests/runtime/test_questions
    first, *others = (sequence.kv for sequence in report.sequences)
    skipped = 0 if name in OBSERVING else first.disk_tokens
    assert (skipped > 0) is (name not in OBSERVING)
    assert skipped % 32 == 0
    assert first.read_tokens + skipped == report.sequences[0].prompt_tokens
    assert (first.disk_bytes > 0) is (skipped > 0)
    assert all(other.shared_tokens > skipped and other.disk_tokens == 0 for other in others)
    assert any("needs every query" in note for note in notes.notices) is (name in OBSERVING)


@pytest.mark.parametrize("name", sorted(WINDOWED))
@pytest.mark.parametrize("what", ["use", "save", "cache"])
def test_methods_that_read_by_windows_have_kv_of_their_own(name, what, path, saved, tmp_path):
    with pytest.raises(KvcliError, match="in windows") as caught:
        run(path, method=name, **{what: saved if what == "use" else tmp_path / "new"})
    assert caught.value.exit_code == ExitCode.USAGE


def test_pages_of_the_host_pool_are_those_that_were_loaded(path, tmp_path):
    """With the same pages as on the disk nothing is copied: what is held is what was read, once."""
    folder, report = tmp_path / "kv", run(path, ("",), "full", save=tmp_path / "kv")
    profile = resolve_profile("freekv", overrides={"budget": 128, "sink": 32, "window": 32, "page_size": 32})
    prompts = tuple(Prompt("notes.txt", TEXT, question) for question in QUESTIONS)
    runs = []
    for kv in (KVOptions(use=folder), KVOptions()):
        request = GenerationRequest(profile, prompts, Sampling(max_tokens=40, ignore_eos=True), kv=kv)
        runs.append(generate(ModelSpec(path, device="cpu"), request, Observer()))
    loaded, read = runs
    assert tokens(loaded) == tokens(read)
    assert loaded.memory.host_kv_bytes == read.memory.host_kv_bytes > 0
    moved = [sequence.cache.prefill_bytes_to_host for sequence in loaded.sequences]
    assert moved[0] < read.sequences[0].cache.prefill_bytes_to_host
    assert report.sequences[0].prompt_tokens > 128


def test_a_prompt_that_shares_only_its_beginning_uses_as_much(path, saved):
    other = TEXT[:300] + "and now for something else " * 9
    report = run(path, QUESTIONS[:1], text=other, use=saved)
    assert tokens(report) == tokens(run(path, QUESTIONS[:1], text=other))
    assert 0 < report.sequences[0].kv.disk_tokens < 300
    with pytest.raises(KvcliError, match=r"does not begin like the saved notes\.txt") as caught:
        run(path, text="x" + TEXT, use=saved)
    assert caught.value.exit_code == ExitCode.USAGE
    with pytest.raises(KvcliError, match="does not begin like"):
        run(path, use=saved, template=Template(raw=True))


def spoilt(folder, to, harm):
    shutil.copytree(folder, to)
    layer = to / "layer-0003.safetensors"
    if harm == "flipped":
        data = bytearray(layer.read_bytes())
        data[-1] ^= 1
        layer.write_bytes(data)
    elif harm == "torn":
        os.truncate(layer, 5000)
    return to


@pytest.mark.parametrize("harm", ["flipped", "torn"])
def test_nothing_damaged_is_used(harm, path, saved, tmp_path):
    with pytest.raises(KvcliError, match=r"layer-0003.*nothing of it was used") as caught:
        run(path, use=spoilt(saved, tmp_path / "kv", harm))
    assert caught.value.exit_code == ExitCode.RUNTIME


def test_another_model_another_tokenizer_another_dtype(path, saved, tmp_path):
    tiny_checkpoint("qwen3", tmp_path / "other")
    with pytest.raises(KvcliError, match=r"saved with .* not with") as caught:
        run(str(tmp_path / "other"), use=saved)
    assert caught.value.exit_code == ExitCode.USAGE
    changed = tmp_path / "changed"
    shutil.copytree(path, changed)
    rules = json.loads((changed / "tokenizer_config.json").read_text())
    (changed / "chat_template.jinja").unlink(missing_ok=True)
    rules["chat_template"] = "{% for m in messages %}{{ m['content'] }}{% endfor %} "
    (changed / "tokenizer_config.json").write_text(json.dumps(rules))
    with pytest.raises(KvcliError, match=r"tokenizer .* has changed"):
        run(str(changed), use=saved)
    request = GenerationRequest(
        resolve_profile("full"), (Prompt("notes.txt", TEXT),), Sampling(max_tokens=2), kv=KVOptions(use=saved)
    )
    with pytest.raises(KvcliError, match="saved in float32, not in bfloat16"):
        generate(ModelSpec(path, device="cpu", dtype="bfloat16"), request, Observer())


def test_what_was_read_sparsely_goes_with_no_other_reading(path, saved, tmp_path):
    reading, sparse, cache = "a-shape:8,32", tmp_path / "sparse", tmp_path / "cache"
    run(path, ("",), "full", prefill=reading, save=sparse)
    assert (read_manifest(saved).reading, read_manifest(sparse).reading) == ("exact", reading)
    for wrong, folder in (("exact", sparse), ("a-shape:8,64", sparse), (reading, saved)):
        with pytest.raises(KvcliError, match=f"saved with prefill .*, not {wrong}") as caught:
            run(path, prefill=wrong, use=folder)
        assert caught.value.exit_code == ExitCode.USAGE
    (first, *_) = run(path, method="quest", prefill=reading, use=sparse).sequences
    assert first.kv.disk_tokens > 200
    for prefill, known in (("exact", 0), (reading, 0), ("exact", 256)):
        (first,) = run(path, QUESTIONS[:1], prefill=prefill, cache=cache).sequences
        assert first.kv.disk_tokens == known


def test_a_cache_saves_finds_and_continues(path, tmp_path):
    cache, alone = tmp_path / "cache", [tokens(run(path, (question,)))[0] for question in QUESTIONS]
    first = run(path, QUESTIONS[:1], cache=cache)
    assert first.sequences[0].kv.disk_tokens == 0
    again = run(path, QUESTIONS[:1], cache=cache)
    assert again.saved == []
    assert again.sequences[0].kv.disk_tokens == 256
    third = run(path, QUESTIONS[2:], "quest", cache=cache)
    assert third.sequences[0].kv.disk_tokens > 200
    assert sum(entry.tokens for entry in third.saved) < 100
    assert [tokens(first)[0], tokens(again)[0]] == [alone[0]] * 2
    assert tokens(run(path, cache=cache)) == alone


def test_what_is_damaged_in_a_cache_is_removed_and_read_again(path, tmp_path):
    cache, notes = tmp_path / "cache", Notes()
    run(path, QUESTIONS[:1], cache=cache)
    (entry,) = cache.iterdir()
    layer = entry / "layer-0001.safetensors"
    data = bytearray(layer.read_bytes())
    data[7000] ^= 1
    layer.write_bytes(data)
    report = run(path, QUESTIONS[:1], cache=cache, observer=notes)
    assert tokens(report) == tokens(run(path, QUESTIONS[:1]))
    assert report.sequences[0].kv.disk_tokens == 0
    assert any("is damaged" in note and "removing it" in note for note in notes.notices)
    assert run(path, QUESTIONS[:1], cache=cache).sequences[0].kv.disk_tokens > 0


def test_a_disk_that_is_full_costs_no_text(path, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvcli.runtime.saved.writer.write_layer", full)
    notes = Notes()
    report = run(path, QUESTIONS[:1], save=tmp_path / "kv", observer=notes)
    assert tokens(report) == tokens(run(path, QUESTIONS[:1]))
    (entry,) = report.saved
    assert entry.error is not None
    assert "No space left" in entry.error
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_keeps_what_was_read_and_nothing_half_made(path, tmp_path):
    class Impatient(Observer):
        def __init__(self, at):
            self.at = at

        def advance(self, amount=1):
            if self.at == "prefill":
                raise KeyboardInterrupt

        def step(self, done, total):
            raise KeyboardInterrupt

    for at, kept in (("prefill", False), ("decode", True)):
        report = run(path, QUESTIONS[:1], save=tmp_path / at, observer=Impatient(at))
        assert report.sequences[0].finish_reason == "interrupted"
        assert [entry.name for entry in tmp_path.iterdir()] == [at] * kept
    assert torch.is_inference_mode_enabled() is False


@pytest.mark.parametrize("head", [40, 4], ids=["a page before the date", "none"])
def test_a_date_before_the_document_is_why_little_is_used(tmp_path, head):
    path = tiny_checkpoint("llama", tmp_path / "dated")
    tokenizer = AutoTokenizer.from_pretrained(path)
    said = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.chat_template = "#!" * head + "{{ strftime_now('%f') * 9 }} " + said  # microseconds: no two runs agree
    tokenizer.save_pretrained(path)
    run(str(path), ("",), "full", save=tmp_path / "kv")
    notes = Notes()
    if head == 4:
        with pytest.raises(KvcliError, match="does not begin like") as raised:
            run(str(path), method="full", use=tmp_path / "kv")
        assert "today's date" in raised.value.hint
        return
    report = run(str(path), method="full", use=tmp_path / "kv", observer=notes)
    (notice,) = (each for each in notes.notices if "today's date" in each)
    assert f"only {report.sequences[0].kv.disk_tokens} of" in notice
