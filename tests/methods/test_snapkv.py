"""SnapKV against a slow re-derivation from the paper, in float64 and plain loops, sharing no code with it."""

import pytest
import torch
from driver import HK, D, Stream, storage_bytes
from engine import run
from eviction_oracle import Oracle, voted
from families import VOCAB, tiny_model

from kvcli.errors import KvcliError
from kvcli.inputs.profiles import resolve_profile

STEPS = 60
SETTINGS = {"budget": 24, "window": 5, "kernel": 3}


@pytest.mark.parametrize(
    ("prompt", "variant"),
    [
        (75, {}),
        (75, {"kernel": 7, "window": 1}),
        (75, {"kernel": 1, "budget": 6}),
        (25, {}),
        (24, {}),
        (3, {}),
        (1, {}),
        (75, {"kernel": 31, "window": 17}),
    ],
    ids=str,
)
def test_every_step_matches_the_oracle(prompt, variant):
    stream, settings = Stream(prompt, STEPS, seed=prompt), {**SETTINGS, **variant}
    oracle = Oracle(stream)
    kept = [voted(oracle, head, **settings) for head in range(HK)]
    for step, method, out in stream.run("snapkv", settings):
        oracle.check(step, method, out, [[*mine, *range(prompt, prompt + step + 1)] for mine in kept])
    assert method.statistics() == {"kept_tokens": [min(prompt, settings["budget"])]}
    assert (kept[0] != kept[1]) == (prompt > settings["budget"]), "KV heads choose for themselves"
    rows = min(prompt, settings["budget"]) + STEPS
    cache = method.retrieval[1]
    assert cache.footprint().device == rows * HK * (2 * D * 4 + 4)  # KV and position
    assert storage_bytes([cache.kv, cache.positions]) == cache.footprint().device


def test_two_sequences_side_by_side():
    streams = [Stream(75, 40, seed=1), Stream(33, 40, seed=2)]
    oracles = [Oracle(stream) for stream in streams]
    kept = [[voted(oracle, head, **SETTINGS) for head in range(HK)] for oracle in oracles]
    for together in zip(*(stream.run("snapkv", SETTINGS) for stream in streams), strict=True):
        for oracle, stay, (step, method, out) in zip(oracles, kept, together, strict=True):
            prompt = oracle.stream.prompt
            oracle.check(step, method, out, [[*mine, *range(prompt, prompt + step + 1)] for mine in stay])


def test_a_chosen_token_keeps_its_surroundings():
    stream = Stream(75, 1, seed=3)
    direction = torch.nn.functional.normalize(torch.ones(D), dim=0)
    stream.k -= (stream.k @ direction)[..., None] * direction
    stream.k[:, 30] += 9 * direction
    stream.prompt_q[:, -5:] += 4 * direction
    ((_, method, _),) = stream.run("snapkv", {"budget": 5 + 7, "window": 5, "kernel": 7})
    assert method.attended(1).nonzero()[:, 1].view(HK, -1).tolist() == [[*range(27, 34), *range(70, 76)]] * HK


def test_a_sliding_layer_is_not_cut():
    ids = torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    (sequence,) = run(tiny_model("gemma3"), "snapkv", SETTINGS, [ids], 9)  # its last layer alone is not sliding
    assert sequence.report().method == {"kept_tokens": [24]}
    assert [cache.length for cache in sequence.method.caches] == [98] * 4


@pytest.mark.parametrize(
    "wrong", [{"budget": 32, "window": 32}, {"kernel": 4}, {"kernel": 0}, {"window": 0}, {"budget": 0}]
)
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(KvcliError):
        resolve_profile(method="snapkv", overrides=wrong)
