import torch
from engine import run
from families import VOCAB, tiny_model

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
