import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from kvcli.errors import ExitCode, KvcliError
from kvcli.runtime.sampling import Prompted, Sampler, Sampling

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.0, 3.0, 2.0, -1.0, 2.5])


def draws(count=2000, **settings):
    sampler = Sampler(Sampling(**settings), 0, CPU)
    return torch.bincount(torch.tensor([sampler(LOGITS) for _ in range(count)]), minlength=5)


def test_greedy_takes_the_first_of_the_best():
    sampler = Sampler(Sampling(), 0, CPU)
    assert sampler(LOGITS) == 1
    assert sampler(torch.tensor([1.0, 4.0, 4.0])) == 1


def test_temperature_draws_from_the_softmax():
    expected = (LOGITS / 0.7).softmax(0)
    assert torch.allclose(draws(4000, temperature=0.7) / 4000, expected, atol=0.03)


@pytest.mark.parametrize(
    ("settings", "possible"),
    [({"top_k": 2}, {1, 4}), ({"top_p": 0.6}, {1, 4}), ({"min_p": 0.5}, {1, 4}), ({"top_k": 1}, {1})],
)
def test_warpers_cut_the_tail(settings, possible):
    assert set(draws(500, temperature=1.0, **settings).nonzero()[:, 0].tolist()) == possible


def test_samples_of_one_seed_differ_and_repeat():
    def some(seed, sample):
        sampler = Sampler(Sampling(temperature=1.5, seed=seed), sample, CPU)
        return [sampler(LOGITS) for _ in range(40)]

    assert some(1, 0) == some(1, 0)
    assert len({tuple(some(seed, sample)) for seed in (1, 2) for sample in (0, 1)}) == 4


@pytest.mark.parametrize("penalty", [0.5, 1.3, 3.0])
def test_a_penalty_is_for_the_prompt_and_the_output(penalty):
    """As transformers has it, whatever of them is there more than once; tokens that are given count as well."""
    prompt, rows = [1, 1, 3], 3 * torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    sampler, first = Sampler(Sampling(repetition_penalty=penalty), 0, CPU, prompt), [4, 2]
    prompted, history = Prompted(first, sampler), list(prompt)
    for step, row in enumerate(rows):
        ahead = sampler.ahead()
        scores = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), row[None])
        expected = first[step] if step < 2 else int(scores.argmax())
        assert step < 2 or ahead(row) == expected
        assert prompted(row) == expected
        history.append(expected)
    assert sorted(sampler.seen.tolist()) == sorted(set(history))
    assert Sampler(Sampling(), 0, CPU, prompt).likeliest
    assert not sampler.likeliest


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("seed", -1),
        ("num_samples", 0),
        ("stop", ("",)),
    ],
)
def test_out_of_range_is_a_usage_error_with_the_value(setting, value):
    with pytest.raises(KvcliError) as caught:
        Sampling(**{setting: value})
    assert caught.value.exit_code is ExitCode.USAGE
    assert repr(value[0] if setting == "stop" else value) in caught.value.what
    assert setting.replace("_", "-") in caught.value.what
