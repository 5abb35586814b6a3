import torch
from engine import run
from families import VOCAB, tiny_model

from kvcli.runtime.sampling import Sampling

SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8}


def prompt(seed, length=60):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_same_seed_same_tokens_whatever_the_company():
    model = tiny_model("llama")
    sampling = Sampling(max_tokens=30, temperature=0.8, top_p=0.95, seed=11)
    alone = run(model, "freekv", SMALL, [prompt(1)], 30, sampling)[0].token_ids
    company = run(model, "freekv", SMALL, [prompt(2, 33), prompt(1), prompt(3, 91)], 30, sampling)[1].token_ids
    assert alone == company
    other = run(model, "freekv", SMALL, [prompt(1)], 30, Sampling(max_tokens=30, temperature=0.8, seed=12))
    assert other[0].token_ids != alone


def test_a_sequence_that_ends_leaves_the_batch():
    model = tiny_model("llama")
    free = [run(model, "full", {}, [prompt(seed)], 12)[0].token_ids for seed in (1, 2)]
    stop = next(token for token in free[0][2:] if token not in free[1])
    at = free[0].index(stop) + 1
    sequences = run(model, "full", {}, [prompt(1), prompt(2)], 12, eos=(stop,))
    assert [sequence.finish_reason for sequence in sequences] == ["eos", "length"]
    assert sequences[0].token_ids == free[0][:at]
    assert sequences[1].token_ids == free[1]
    assert sequences[0].method.caches[0].length == 60 + at - 1
    assert len(sequences[0].decode_ms) == at - 1


def test_counters_have_one_row_a_step():
    (sequence,) = run(tiny_model("llama"), "freekv", SMALL, [prompt(4)], 20)
    report = sequence.report()
    assert len(report.steps) == report.output_tokens - 1 == 19
    assert (
        sum(step.misses for step in report.steps) == report.cache.misses == sum(x.misses for x in report.cache.layers)
    )
    assert report.correction.first_retrievals == 3 * 2  # the first layer is dense; two KV heads
    assert report.correction.heads_checked == 18 * 3 * 2
    assert report.cache.layers[0].pages_requested == 0
