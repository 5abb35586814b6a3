"""`--audit`: what a generation reports about its closeness to full attention, and what that costs."""

import json

import pytest
import torch
from families import tiny_checkpoint

from kvcli.capacity import memory
from kvcli.errors import ExitCode, KvcliError
from kvcli.generate import generate
from kvcli.inputs.encoding import encode
from kvcli.inputs.options import Template
from kvcli.inputs.profiles import reference_profile, resolve_profile
from kvcli.inputs.prompts import Prompt
from kvcli.models.loading import ModelSpec, load_model, open_checkpoint
from kvcli.quality.fidelity import Passage, measure
from kvcli.request import GenerationRequest
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.observer import Observer
from kvcli.ui.summary import batch_tables, fidelity_rows

TEXT = "the quick brown fox jumps over the lazy dog and the number of the third key is 4711 " * 3
SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8}
PROMPTS = (Prompt("a", TEXT), Prompt("b", "a short one"))
FREEKV = resolve_profile(method="freekv", overrides=SMALL)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint("llama", path)
    return ModelSpec(str(path))


def run(checkpoint, audit, profile=FREEKV, prompts=PROMPTS, observer=None, **sampling):
    sampling = Sampling(**{"max_tokens": 12, "ignore_eos": True, **sampling})
    request = GenerationRequest(profile, prompts, sampling, audit=audit)
    return generate(checkpoint, request, observer or Observer())


def test_an_audit_changes_no_text_and_says_which_steps_it_looked_at(checkpoint):
    plain, audited = run(checkpoint, None), run(checkpoint, 3)
    assert [s.token_ids for s in audited.sequences] == [s.token_ids for s in plain.sequences]
    assert [s.correction for s in audited.sequences] == [s.correction for s in plain.sequences]
    assert [s.fidelity for s in plain.sequences] == [{}, {}]
    long, short = (s.fidelity for s in audited.sequences)
    assert long["every"] == 3
    assert [step["step"] for step in long["steps"]] == [0, 3, 6, 9]
    assert long["steps_audited"] == 4
    assert 0 < long["mass"] < 1
    assert short["mass"] == pytest.approx(1)  # it never outgrew the budget
    assert short["kl"] == pytest.approx(0, abs=1e-9)
    assert json.loads(audited.to_json())["sequences"][0]["fidelity"] == long
    rows = dict(fidelity_rows(long))
    assert rows["audit"] == "4 steps, one in 3, compared with full attention"
    assert f"{long['mass']:.2%}" in rows["attention"]
    assert "4 / 4" in dict(fidelity_rows(short))["next token"]
    table = batch_tables(audited, ["a", "b"])[-1]
    assert table.columns[0] == "audit"
    assert [row[:3] for row in table.rows] == [("a", "4", f"{long['mass']:.1%}"), ("b", "4", "100.0%")]
    assert batch_tables(plain, ["a", "b"])[-1].columns[0] != "audit"


@pytest.mark.parametrize("every", [1, 4])
def test_it_finds_what_measuring_the_same_tokens_finds(checkpoint, every):
    written = run(checkpoint, every).sequences[0]
    model = load_model(checkpoint)
    ids = encode(PROMPTS[0], Template(), model.tokenizer)
    text = Passage("a", ids, written.token_ids[:-1])
    with engine(model, [text.capacity]) as ready:
        ((measured,), _) = measure(ready, text, [FREEKV])
    expected = {step.step: step for step in measured.fidelity.steps}
    assert len(written.fidelity["steps"]) == -(-len(text.continuation) // every)
    for step in written.fidelity["steps"]:
        for name in ("mass", "recall", "error", "kl"):
            assert step[name] == pytest.approx(getattr(expected[step["step"]], name), rel=1e-3, abs=1e-6), name


def test_samples_are_held_against_references_of_their_own(checkpoint):
    one, other = run(checkpoint, 2, prompts=PROMPTS[:1], num_samples=2, temperature=2.0).sequences
    assert one.token_ids != other.token_ids
    full = run(checkpoint, 2, resolve_profile(method="full"), PROMPTS[:1], num_samples=2, temperature=2.0)
    for sequence in full.sequences:
        assert sequence.fidelity["kl"] == pytest.approx(0, abs=1e-9)
        assert sequence.fidelity["agreement"] == 1


def test_what_was_audited_before_ctrl_c_is_kept(checkpoint):
    class Stops(Observer):
        def step(self, done, total):
            if done == 6:
                raise KeyboardInterrupt

    sequence = run(checkpoint, 2, prompts=PROMPTS[:1], observer=Stops()).sequences[0]
    assert sequence.finish_reason == "interrupted"
    assert [step["step"] for step in sequence.fidelity["steps"]] == [0, 2]


def test_its_memory_is_planned(checkpoint, monkeypatch):
    opened = open_checkpoint(checkpoint)
    sampling = Sampling(max_tokens=16, num_samples=2)
    plain, audited = (
        memory.need(FREEKV, opened.geometry, opened.dtype, [100, 200], 16, 2, beside).kv
        for beside in (None, reference_profile())
    )
    kv_of_a_token = sum(2 * layer.num_kv_heads * layer.head_dim * 4 for layer in opened.geometry.layers)
    assert audited.device - plain.device == 2 * (116 + 216) * kv_of_a_token
    assert audited.host == plain.host
    enough = memory.need(FREEKV, opened.geometry, opened.dtype, [3000], 16, 2).on(torch.device("cpu"))
    monkeypatch.setattr(memory, "available", lambda _: enough)
    memory.check(FREEKV, opened, [3000], sampling)
    with pytest.raises(KvcliError) as refused:
        memory.check(FREEKV, opened, [3000], sampling, beside=reference_profile())
    assert refused.value.exit_code == ExitCode.WILL_NOT_FIT
    assert "--audit" in refused.value.hint


def test_reference_kv_bytes_are_those_of_full_attention(checkpoint):
    sequence = run(checkpoint, 5, prompts=PROMPTS[:1]).sequences[0]
    opened = open_checkpoint(checkpoint)
    full = memory.kv_footprint(
        resolve_profile(method="full"), opened.geometry, sequence.prompt_tokens + 12, opened.dtype
    )
    assert sequence.fidelity["reference_kv_bytes"] == full.device
