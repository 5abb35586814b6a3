"""`--lossless`: the text is that of full attention, whatever the method drafts."""

import json

import pytest

import kvcli
from kvcli.conformance.models import FAMILIES, HYBRIDS, KINDS, WINDOW, tiny_model
from kvcli.conformance.runs import SPARE, in_memory, run
from kvcli.conformance.test_method import AMPLE, SMALL, prompt, settings
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.profiles import verifying_profile
from kvcli.methods import get_method, method_names
from kvcli.runtime import lossless as steps
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling
from kvcli.ui.summary import sequence_rows

STEPS = 16
DRAFTS = 3
LENGTHS = (75, 40)
FORGETFUL = ("llama_one_kv_head", "gemma2", "gpt_oss", "llama4", "deepseek_v3", "lfm2", "falcon_h1", "qwen3_next")
"""Families with one KV head, windows, sinks, chunks, latents, and states of all kinds."""


def method_of(ready, name, wanted, length):
    method = get_method(name)
    return method(method.Config(**wanted), ready.layers, ready.context(length, STEPS + SPARE))


def lossless(model, name, wanted, sampling=None, drafts=DRAFTS, verifier="full", lengths=LENGTHS):
    sampling = sampling or Sampling(max_tokens=STEPS, ignore_eos=True)
    sequences = []
    with engine(in_memory(model), [length + STEPS + SPARE for length in lengths]) as ready:
        for index, length in enumerate(lengths):
            methods = [method_of(ready, *each, length) for each in ((name, wanted), (verifier, {}))]
            logits = ready.prefill(prompt(index, length), methods, chunk=WINDOW + 6)
            ids = prompt(index, length)
            sequence = ready.sequence(methods[0], sampling, index=index, reference=methods[1], ids=ids)
            sequence.accept(logits[1])
            sequences.append(sequence)
        for _ in ready.decode(sequences, lossless=drafts):
            pass
    return sequences


def exact(model, sampling=None, lengths=LENGTHS):
    sampling = sampling or Sampling(max_tokens=STEPS, ignore_eos=True)
    prompts = [prompt(index, length) for index, length in enumerate(lengths)]
    return [each.token_ids for each in run(model, "full", {}, prompts, STEPS, sampling, chunk=WINDOW + 6)]


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def text(llama):
    """What full attention writes after the first prompt."""
    return exact(llama, lengths=LENGTHS[:1])[0]


@pytest.mark.parametrize("name", method_names())
def test_every_method_drafts_the_text_of_full_attention(llama, text, name):
    (found,) = lossless(llama, name, settings(name, SMALL), lengths=LENGTHS[:1])
    assert found.token_ids == text
    counts = found.drafts
    assert counts.accepted + counts.passes == STEPS - 1, "a pass gives what it accepts and one token more"
    assert counts.accepted <= counts.drafted <= DRAFTS * counts.passes
    assert len(found.decode_ms) == STEPS - 1


OTHERS = [kind for kind in (*FAMILIES, *HYBRIDS, *KINDS) if kind not in FORGETFUL]


@pytest.mark.parametrize(
    "kind", [*FORGETFUL, *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in dict.fromkeys(OTHERS))]
)
def test_every_kind_of_cache_goes_back_as_it_was(kind):
    """Drafts of a method that sees little are wrong often, so that windows, chunks and states are taken back."""
    model = tiny_model(kind)
    (found,) = lossless(model, "streaming", {"sink": 4, "budget": 8}, lengths=LENGTHS[:1])
    assert found.token_ids == exact(model, lengths=LENGTHS[:1])[0]
    assert found.drafts.accepted < found.drafts.drafted or kind not in FORGETFUL


def test_fewer_are_drafted_while_many_are_wrong():
    chance = steps._Chance(7)
    assert chance.drafts == 7
    for _ in range(20):
        chance.note(0, chance.drafts)
    assert chance.drafts == 1
    for _ in range(60):
        chance.note(chance.drafts, chance.drafts)
    assert chance.drafts == 7
    assert steps._Chance(5).drafts == 5


@pytest.mark.parametrize("verifier", ["full", "offload"])
def test_right_drafts_are_all_accepted(llama, verifier):
    for sequence in lossless(llama, "freekv", settings("freekv", AMPLE), drafts=4, verifier=verifier):
        assert (sequence.drafts.passes, sequence.drafts.drafted, sequence.drafts.accepted) == (3, 12, 12)


def test_host_memory_verifies_as_well(llama):
    found = lossless(llama, "quest", settings("quest", SMALL), verifier="offload")
    assert [each.token_ids for each in found] == exact(llama)
    assert verifying_profile("cuda").method == "offload"
    assert verifying_profile("cpu").method == "full"


def test_a_seed_gives_its_own_text(llama):
    """Drafts are drawn from the sequence's own random numbers, so that they are right where the logits are."""
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True, temperature=1.0, seed=7)
    ample = lossless(llama, "freekv", settings("freekv", AMPLE), sampling)
    small = lossless(llama, "freekv", settings("freekv", SMALL), sampling)
    assert [each.token_ids for each in ample] == [each.token_ids for each in small] == exact(llama, sampling)
    assert all(each.drafts.accepted == each.drafts.drafted for each in ample)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_is_that_of_the_accepted_tokens(llama, temperature):
    """Drafts are penalised as the text will be, and those that are rejected leave no trace."""
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True, temperature=temperature, repetition_penalty=1.4)
    ample = lossless(llama, "freekv", settings("freekv", AMPLE), sampling)
    small = lossless(llama, "streaming", {"sink": 4, "budget": 8}, sampling)
    assert [each.token_ids for each in ample] == [each.token_ids for each in small] == exact(llama, sampling)
    assert all(each.drafts.accepted == each.drafts.drafted for each in ample)
    assert exact(llama, sampling) != exact(llama)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_an_end_within_the_drafts_ends_the_text(kind, monkeypatch):
    """Nothing is read for it any more, though windows hold drafts that follow the end."""
    model, reads = tiny_model(kind), []
    extend = steps.extend
    monkeypatch.setattr(steps, "extend", lambda *args, **options: reads.append(options) or extend(*args, **options))
    texts = exact(model)
    end = texts[0][5]
    with engine(in_memory(model), [LENGTHS[0] + STEPS + SPARE]) as ready:
        drafting = "freekv", settings("freekv", AMPLE)
        methods = [method_of(ready, *each, LENGTHS[0]) for each in (drafting, ("full", {}))]
        logits = ready.prefill(prompt(0, LENGTHS[0]), methods)
        sequences = [ready.sequence(methods[0], Sampling(max_tokens=STEPS), reference=methods[1])]
        sequences[0].eos = [end]
        sequences[0].accept(logits[1])
        for _ in ready.decode(sequences, lossless=5):
            pass
    assert sequences[0].token_ids == texts[0][: texts[0].index(end) + 1]
    assert sequences[0].finish_reason == "eos"
    assert sequences[0].drafts.accepted < sequences[0].drafts.drafted
    assert len(reads) == sequences[0].drafts.passes


def test_from_python_with_what_it_held():
    """Host memory counts what the first copy of the method held, and full attention beside it."""
    model, text = kvcli.load(), "Emma is 4711. " * 40
    options = {"method": "freekv", "budget": 96, "sink": 16, "window": 16, "page_size": 16, "max_tokens": 6}
    plain, checked = model.generate(text, **options), model.generate(text, lossless=3, **options)
    full = model.generate(text, method="full", max_tokens=6)
    assert checked.text == full.text
    assert plain.to_dict()["sequences"][0]["drafts"] is None
    drafts = json.loads(json.dumps(checked.to_dict()))["sequences"][0]["drafts"]
    assert drafts.keys() == {"passes", "drafted", "accepted"}
    rows = dict(sequence_rows(checked.report, checked.report.sequences[0]))
    assert "a pass, with its drafts" in rows["decode"]
    assert "step" not in f"{rows['decode']} {rows['to host']}"
    held = [answer.to_dict()["memory"] for answer in (plain, full, checked)]
    assert held[2]["host_kv_bytes"] == held[0]["host_kv_bytes"]
    assert held[2]["device_kv_bytes"] == held[0]["device_kv_bytes"] + held[1]["device_kv_bytes"]


@pytest.mark.parametrize("options", [{"audit": 2}, {"checkpoint": "somewhere"}])
def test_what_it_does_not_go_with(options, tmp_path):
    if "checkpoint" in options:
        options = {"checkpoint": tmp_path / "run"}
    with pytest.raises(KvcliError) as refused:
        kvcli.load().generate("a text", lossless=2, **options)
    assert refused.value.exit_code == ExitCode.USAGE
    assert "--lossless" in refused.value.what
