"""A budget that is a share of the prompt: each prompt of a batch has its own number of tokens."""

import json

import pytest
import torch
from engine import in_memory, profile_of, run
from families import VOCAB, tiny_model

import kvcli
from kvcli.errors import KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.variants import variants
from kvcli.methods import get_method, method_names
from kvcli.runtime.engine import engine
from kvcli.runtime.gpu.piecewise import PiecewiseStepper
from kvcli.runtime.sampling import Sampling

SMALL = {
    "sink": 4,
    "window": 8,
    "page_size": 4,
    "prefill_window": 16,
    "chunk": 4,
    "outliers": 1,
    "local": 1,
    "rank": 12,
}
LENGTHS = (90, 61)
STEPS = 5
WITH_BUDGET = [name for name in method_names() if "budget" in get_method(name).Config.model_fields]


def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def settings(name, budget):
    fields = get_method(name).Config.model_fields
    group = {"group": 8} if name == "fier" else {}
    return {key: value for key, value in {**SMALL, **group}.items() if key in fields} | {"budget": budget}


def shared(model, name, pipeline="blocking"):
    sampling = Sampling(max_tokens=STEPS)
    with engine(in_memory(model), [length + STEPS for length in LENGTHS]) as ready:
        sequences = []
        for ids in prompts():
            method = ready.method(profile_of(name, settings(name, "40%")), ready.context(len(ids), STEPS))
            (logits,) = ready.prefill(ids, [method])
            sequences.append(ready.sequence(method, sampling))
            sequences[-1].eos = ()
            sequences[-1].accept(logits)
        for _ in ready.decode(sequences, pipeline=pipeline):
            pass
    return [sequence.report() for sequence in sequences]


@pytest.mark.parametrize("name", WITH_BUDGET)
def test_every_method_takes_the_tokens_that_a_share_comes_to(name):
    model = tiny_model("llama", layers=3)
    found = shared(model, name)
    assert [each.budget for each in found] == [36, 24]
    for ids, each in zip(prompts(), found, strict=True):
        (alone,) = run(model, name, settings(name, each.budget), [ids], STEPS)
        assert each.token_ids == alone.token_ids
        assert each.cache == alone.report().cache


def test_budgets_that_differ_are_no_step_of_one_graph(monkeypatch):
    served = []
    monkeypatch.setattr("kvcli.runtime.pipeline.PiecewiseStepper", lambda *given: served.append(given) or Stop())

    class Stop(PiecewiseStepper):
        def __init__(self):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        shared(tiny_model("llama"), "quest", "overlapped")


def test_a_share_that_is_too_small_is_refused_with_the_prompt():
    profile = resolve_profile("freekv", overrides={"budget": "20%", "sink": 512, "window": 512})
    with pytest.raises(KvcliError, match=r"freekv: budget 20% of a prompt of 1,000 tokens: budget 200 leaves no page"):
        profile.for_prompt(1000)
    assert profile.for_prompt(10000).settings.budget == 2000
    assert profile.hash != resolve_profile("freekv", overrides={"budget": "30%", "sink": 512, "window": 512}).hash


def test_it_stays_a_share_in_labels_json_and_profiles(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('method = "snapkv"\n[settings]\nbudget = "20%"\n')
    (named, other) = variants(["snapkv"], [str(file)], [], {"window": "4"})
    assert other.label == "mine 20%"
    written = json.loads(json.dumps(other.as_dict()))
    assert written["budget"] == written["settings"]["budget"] == "20%"
    config = get_method("snapkv").Config.model_validate_json(json.dumps(written["settings"]))
    assert config == other.profile.settings != named.profile.settings


def test_from_python_questions_of_other_lengths_share_what_is_read():
    answers = kvcli.load().generate(
        "The hidden number of the harbour is 4217. " * 40, method="infllm", budget="50%", sink=32, window=32,
        prefill_window=64, prompt=["Which number?", "What is the hidden number of the harbour, and where is it?"],
        max_tokens=3,
    )  # fmt: skip
    sequences = [answer.report.sequences[0] for answer in answers]
    assert [each.budget for each in sequences] == [each.prompt_tokens // 2 for each in sequences]
    assert sequences[0].budget != sequences[1].budget
