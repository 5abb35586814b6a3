import pytest
import torch
from engine import run
from families import VOCAB, tiny_model

from kvcli.runtime.gpu import stepper
from kvcli.runtime.gpu.recorder import SerialStreams
from kvcli.runtime.sampling import Sampling

SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8}


def prompt(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_sampled_texts_are_those_of_the_blocking_pipeline():
    steps = (tiny_model("llama"), "freekv", SMALL, [prompt(70), prompt(31, 1)], 20)
    sampling = Sampling(max_tokens=20, temperature=0.9, top_p=0.9, seed=5)
    overlapped, blocking = run(*steps, sampling, streams=SerialStreams()), run(*steps, sampling)
    assert [each.token_ids for each in overlapped] == [each.token_ids for each in blocking]
    assert overlapped[0].token_ids != run(*steps)[0].token_ids


def test_penalised_texts_are_those_of_the_blocking_pipeline():
    """The likeliest token is then not the one that the device would choose."""
    steps = (tiny_model("llama"), "freekv", SMALL, [prompt(70), prompt(31, 1)], 20)
    sampling = Sampling(max_tokens=20, repetition_penalty=1.5)
    overlapped, blocking = run(*steps, sampling, streams=SerialStreams()), run(*steps, sampling)
    assert [each.token_ids for each in overlapped] == [each.token_ids for each in blocking]
    assert overlapped[0].token_ids != run(*steps)[0].token_ids


@pytest.mark.parametrize("vocab", [1, 37, 96, 4096, 501 << 8])
def test_the_highest_logit_is_found_in_parts(vocab):
    """Of equal ones the first, as `max` does it; what is no number is found as well."""
    logits = torch.randint(0, 50, (5, vocab), generator=torch.Generator().manual_seed(0)).float()
    logits[1, vocab // 2], logits[2] = torch.inf, -torch.inf
    highest, tokens = stepper._highest(logits)
    expected = logits.max(-1, keepdim=True)
    assert torch.equal(highest, expected.values)
    assert torch.equal(tokens, logits.eq(expected.values).long().argmax(-1, keepdim=True))
    logits[3, -1] = torch.nan
    assert stepper._highest(logits)[0].isnan().flatten().tolist() == [False, False, False, True, False]
