"""A run that is cut off anywhere goes on as if it had not been."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from families import tiny_checkpoint
from safetensors.torch import load_file, save_file

from kvcli.errors import ExitCode, KvcliError
from kvcli.generate import generate
from kvcli.generate import resume as go_on
from kvcli.inputs.options import Keep
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.prompts import Prompt
from kvcli.models.loading import ModelSpec
from kvcli.request import GenerationRequest
from kvcli.runtime.checkpoint.journal import Journal
from kvcli.runtime.checkpoint.kept_run import KeptRun
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.saved.library import KVOptions
from kvcli.telemetry.observer import Observer

TEXT = "the quick brown fox jumps over the lazy dog and the number of the third key is 4711 " * 3
PROMPTS = (Prompt("a", TEXT, "what is the number?"), Prompt("b", "a short one"), Prompt("c", TEXT[40:]))
SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8}
TOKENS, EVERY = 20, 4


def resume(keep, *watcher, **options):
    return go_on(KeptRun.open(keep), *watcher, **options)


class CutOff(BaseException):
    """Stands for the end of the process: no code of the run expects it."""


class Watcher(Observer):
    def __init__(self, at_step=None, at_prefill=None):
        self.at_step, self.at_prefill, self.prefills = at_step, at_prefill, 0
        self.texts, self.notices, self.failures = {}, [], []

    def stage(self, name, total=None):
        self.prefills += name == "prefill"
        if self.prefills == self.at_prefill:
            raise CutOff

    def step(self, done, total):
        if done == self.at_step:
            raise CutOff

    def text(self, sequence, piece):
        self.texts[sequence] = self.texts.get(sequence, "") + piece

    def notice(self, message):
        self.notices.append(message)

    def failure(self, message):
        self.failures.append(message)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint("llama", path)
    return str(path)


QUESTIONS = tuple(Prompt("a", TEXT, question, f"q{at}") for at, question in enumerate(("what?", "which number?")))


def asked(keep=None, method="freekv", prompts=PROMPTS, overrides=SMALL, **sampling):
    sampling = Sampling(**{"max_tokens": TOKENS, "ignore_eos": True, **sampling})
    return GenerationRequest(resolve_profile(method, overrides=overrides), prompts, sampling, keep=keep)


def outcome(report):
    """All that does not depend on the clock."""
    steps = [[(step.misses, step.bytes_to_device) for step in each.steps] for each in report.sequences]
    return steps, [replace(each, timing=None, steps=[]) for each in report.sequences]


def cut_off(checkpoint, directory, watcher, **options):
    keep = Keep(directory, EVERY)
    with pytest.raises(CutOff):
        generate(ModelSpec(checkpoint), asked(keep, **options), watcher)
    return keep


WAYS = {"greedy": {}, "sampled": {"temperature": 0.9, "num_samples": 2, "seed": 3, "repetition_penalty": 1.3}}


@pytest.fixture(scope="module")
def whole(checkpoint):
    """The report of a run that is not cut off, and who watched it."""

    @cache
    def run(way):
        watcher = Watcher()
        return generate(ModelSpec(checkpoint), asked(**WAYS[way]), watcher), watcher

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("watcher", [{"at_prefill": 2}, {"at_step": 2}, {"at_step": 15}], ids=str)
def test_goes_on_as_if_it_had_not_been_cut_off(checkpoint, whole, tmp_path, watcher, way):
    """Several prompts and samples, at two places one after the other."""
    expected, watched = whole(way)
    keep = cut_off(checkpoint, tmp_path / "kept", Watcher(**watcher), **WAYS[way])
    with pytest.raises(CutOff):
        resume(keep, Watcher(at_step=TOKENS - 2))
    last = Watcher()
    assert outcome(resume(keep, last)) == outcome(expected)
    assert last.texts == watched.texts


def test_what_a_sparse_prefill_left_out_is_known_after_it(checkpoint, tmp_path):
    options = {"overrides": {**SMALL, "prefill": "a-shape:5,16"}}
    keep = cut_off(checkpoint, tmp_path / "run", Watcher(at_step=6), **options)
    ended, whole = resume(keep, Watcher()), generate(ModelSpec(checkpoint), asked(**options), Watcher())
    assert outcome(ended) == outcome(whole)
    assert 0 < ended.sequences[0].method["prefill_mass"] < 1


@pytest.mark.parametrize("method", ["freekv", "shadowkv", "infllm"])
def test_questions_on_one_document_share_its_pages_again(checkpoint, tmp_path, method):
    options = {"method": method, "prompts": QUESTIONS, "overrides": {"budget": 48} if method == "shadowkv" else SMALL}
    expected = generate(ModelSpec(checkpoint), asked(**options), Watcher())
    keep = cut_off(checkpoint, tmp_path, Watcher(at_step=10), **options)
    report = resume(keep, Watcher())
    assert outcome(report) == outcome(expected)
    assert [each.id for each in report.sequences] == ["q0", "q1"]
    assert (report.memory.host_kv_bytes, report.memory.device_kv_bytes) == (
        expected.memory.host_kv_bytes,
        expected.memory.device_kv_bytes,
    )


def test_pages_that_came_from_the_disk_are_kept_once(checkpoint, tmp_path):
    """Caches refer to what was loaded: the run that goes on has it from the directory of the run alone."""
    options = {"prompts": PROMPTS[:1], "overrides": {**SMALL, "page_size": 32, "budget": 192}}
    save = replace(asked(**options), kv=KVOptions(save=tmp_path / "kv"))
    expected = generate(ModelSpec(checkpoint), save, Watcher())
    loaded = generate(ModelSpec(checkpoint), replace(asked(**options), kv=KVOptions(use=tmp_path / "kv")), Watcher())
    use = replace(asked(Keep(tmp_path / "run", EVERY), **options), kv=KVOptions(use=tmp_path / "kv"))
    with pytest.raises(CutOff):
        generate(ModelSpec(checkpoint), use, Watcher(at_step=10))
    shutil.rmtree(tmp_path / "kv")
    *_, changing = (tmp_path / "run").glob("changing*")
    assert not [name for name in load_file(changing) if "pool" in name]
    again = resume(Keep(tmp_path / "run"), Watcher())
    assert [each.token_ids for each in again.sequences] == [each.token_ids for each in expected.sequences]
    assert again.sequences[0].kv.disk_tokens > 0
    assert again.memory.host_kv_bytes == loaded.memory.host_kv_bytes > 0


def test_loses_no_more_than_the_steps_since_the_last_writing(checkpoint, tmp_path):
    keep = cut_off(checkpoint, tmp_path, Watcher(at_step=15))
    tokens = [each for each in KeptRun.open(keep).journal.parts() if each.name == "0.token_ids"]
    assert [each.start for each in tokens] == [0, *range(1, 15 - EVERY, EVERY)]
    assert tokens[-1].start + len(tokens[-1].values) in range(15 - EVERY, 16)


def test_a_run_that_was_cut_off_at_once_begins_anew(checkpoint, whole, tmp_path):
    keep = cut_off(checkpoint, tmp_path, Watcher(at_prefill=1))
    assert outcome(resume(keep, Watcher())) == outcome(whole("greedy")[0])


def test_a_finished_run_shows_its_text_and_keeps_no_state(checkpoint, tmp_path):
    report = generate(ModelSpec(checkpoint), asked(Keep(tmp_path, EVERY)), Watcher())
    watcher = Watcher()
    again = resume(Keep(tmp_path), watcher)
    assert again.to_dict() == report.to_dict()
    assert watcher.texts == {index: each.text for index, each in enumerate(report.sequences)}
    assert "has finished" in watcher.notices[0]
    assert not list(tmp_path.glob("segment*")) + list(tmp_path.glob("changing*"))


def test_ctrl_c_keeps_what_can_be_gone_on_with(checkpoint, whole, tmp_path):
    class Interrupted(Watcher):
        def step(self, done, total):
            if done == 10:
                raise KeyboardInterrupt

    watcher = Interrupted()
    report = generate(ModelSpec(checkpoint), asked(Keep(tmp_path, EVERY)), watcher)
    assert report.sequences[0].finish_reason == "interrupted"
    assert f"--resume {tmp_path}" in watcher.notices[-1]
    assert outcome(resume(Keep(tmp_path), Watcher())) == outcome(whole("greedy")[0])


def test_another_model_or_tokenizer_is_refused(checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    keep = cut_off(str(copy), tmp_path / "kept", Watcher(at_step=10), prompts=PROMPTS[1:2])
    weights = copy / "model.safetensors"
    before = weights.read_bytes()
    tensors = load_file(weights)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, weights, {"format": "pt"})
    with pytest.raises(KvcliError, match=r"the model of .* is not the one") as raised:
        resume(keep, Watcher())
    assert raised.value.exit_code is ExitCode.USAGE
    weights.write_bytes(before)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second, *_ = (token for token in vocabulary if len(token) == 1)
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(KvcliError, match=r"the tokenizer of .* is not the one"):
        resume(keep, Watcher())


def test_a_model_that_was_moved_is_named(checkpoint, tmp_path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    keep = cut_off(str(copy), tmp_path / "kept", Watcher(at_step=10), prompts=PROMPTS[1:2])
    copy.rename(tmp_path / "moved")
    with pytest.raises(KvcliError, match="copy"):
        resume(keep, Watcher())
    assert len(resume(keep, Watcher(), model=str(tmp_path / "moved")).sequences[0].token_ids) == TOKENS


def test_settings_and_state_of_another_version_are_refused(checkpoint, tmp_path, monkeypatch):
    kept = KeptRun.open(cut_off(checkpoint, tmp_path, Watcher(at_step=10), prompts=PROMPTS[1:2]))
    profile = {**kept.asked.profile, "settings": {**kept.asked.profile["settings"], "unheard_of": 1}}
    kept.asked = kept.asked.model_copy(update={"profile": profile})
    with pytest.raises(KvcliError, match="other settings by now: unheard_of"):
        _ = kept.profile
    kept.close()
    tree = Journal.tree
    monkeypatch.setattr(
        Journal, "tree", lambda journal: json.loads(json.dumps(tree(journal)).replace('"length":', '"count":'))
    )
    with pytest.raises(KvcliError, match="not one of this version of freekv") as raised:
        resume(Keep(tmp_path), Watcher())
    assert raised.value.exit_code is ExitCode.RUNTIME


def test_a_full_disk_stops_no_text(checkpoint, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Journal, "write", full)
    watcher = Watcher()
    report = generate(ModelSpec(checkpoint), asked(Keep(tmp_path, EVERY)), watcher)
    assert len(report.sequences[0].token_ids) == TOKENS
    (said,) = watcher.failures  # once, however often it is tried
    assert "No space left on device" in said


def test_only_blocking_steps_can_be_kept(checkpoint, tmp_path):
    request = replace(asked(Keep(tmp_path)), pipeline="overlapped")
    with pytest.raises(KvcliError, match="--checkpoint needs blocking steps"):
        generate(ModelSpec(checkpoint), request, Watcher())
    request = replace(asked(Keep(tmp_path)), audit=2)
    with pytest.raises(KvcliError, match="--audit"):
        generate(ModelSpec(checkpoint), request, Watcher())
    assert not list(tmp_path.iterdir())
