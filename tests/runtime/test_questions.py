"""Questions on one document in one run: what each would say alone, with the document read and held once."""

from dataclasses import replace

import pytest
import torch
from families import FAMILIES, VOCAB, tiny_model

from kvcli.conformance.runs import WordlessTokenizer, in_memory
from kvcli.inputs.encoding import EncodedPrompt, in_common
from kvcli.inputs.profiles import Profile
from kvcli.methods import get_method, method_names
from kvcli.runtime.engine import engine
from kvcli.runtime.prefill import Branches
from kvcli.runtime.prefill_runner import PrefillRunner
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.timeline import Timeline

SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8}
STEPS = 6


def tokens(length, seed):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


DOCUMENT = tokens(102, 1)
QUESTIONS = [DOCUMENT + tokens(length, seed) for seed, length in enumerate((9, 1, 30), 2)]


def profile_of(name, **chosen):
    config = get_method(name).Config
    chosen = {**SMALL, "prefill_window": 16, "refresh": 8, **chosen}
    return Profile(name, name, "", "", config(**{k: v for k, v in chosen.items() if k in config.model_fields}))


class Words(WordlessTokenizer):
    all_special_ids = ()

    def __len__(self):
        return VOCAB

    bos_token_id = 1


def ask(model, profile, prompts, pipeline="blocking", **sampling):
    """Ask prompts on one document together; returns the finished sequences."""
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True, **sampling)
    loaded = replace(in_memory(model), tokenizer=Words())
    with engine(loaded, [len(ids) + STEPS for ids in prompts]) as ready:
        runner = PrefillRunner(ready, profile, sampling, Observer(), Timeline())
        encoded = [EncodedPrompt("document", ids) for ids in prompts]
        sequences = [sequence for sequence, _ in runner.prefill(0, encoded)]
        for _ in ready.decode(sequences, pipeline=pipeline):
            pass
    return sequences


@pytest.mark.parametrize("name", method_names())
@pytest.mark.usefixtures("short_probe")
def test_questions_together_say_what_each_says_alone(name):
    model, profile = tiny_model("llama", layers=3), profile_of(name)
    together = ask(model, profile, QUESTIONS)
    alone = [ask(model, profile, [ids])[0] for ids in QUESTIONS]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    for first, (each, single) in enumerate(zip(together, alone, strict=True)):
        shared = each.kv.shared_tokens
        assert shared == (0 if first == 0 else 96 if each.method.prefill_window else 102)
        assert each.kv.read_tokens + shared == len(QUESTIONS[first])
        held, before = each.method.footprint(), single.method.footprint()
        assert (each.kv.shared_bytes == held.shared > 0) is (first > 0 and before.host > 0 and name != "offload")
        assert each.counters.cache().pages_requested == single.counters.cache().pages_requested


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_branches_as_it_reads_prompts(family):
    model = tiny_model(family)
    together = ask(model, profile_of("freekv"), QUESTIONS)
    assert [each.token_ids for each in together] == [
        ask(model, profile_of("freekv"), [ids])[0].token_ids for ids in QUESTIONS
    ]


def test_samples_of_several_questions():
    model = tiny_model("llama")
    drawn = {"num_samples": 2, "temperature": 2.0, "seed": 3}
    together = ask(model, profile_of("freekv"), QUESTIONS, **drawn)
    alone = [each for ids in QUESTIONS for each in ask(model, profile_of("freekv"), [ids], **drawn)]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert [(each.index, each.sample) for each in together] == [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0), (5, 1)]


def test_over_slots_as_on_a_gpu():
    model, profile = tiny_model("llama"), profile_of("freekv")
    assert [each.token_ids for each in ask(model, profile, QUESTIONS, pipeline="overlapped")] == [
        each.token_ids for each in ask(model, profile, QUESTIONS)
    ]


def test_a_question_that_is_the_beginning_of_another_keeps_a_token_of_its_own():
    prompts = [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3]]
    branches = Branches.of(prompts, in_common([EncodedPrompt("", ids) for ids in prompts]))
    assert branches == Branches([1, 2], [[3], [3, 4], [3]])
    assert branches.tokens == [1, 2, 3, 3, 4, 3]
    assert branches.positions == [0, 1, 2, 2, 3, 2]
    assert branches.ends() == [2, 3, 5, 6]
    assert Branches([], [[1], [2, 3]]).ends() == [1, 3]
