"""CAKE against one cut after all layers were read, in float64 and plain loops, sharing no code with it."""

import math
import statistics
from fractions import Fraction

import pytest
import torch
from driver import HK, SOFTMAX, D, H, Stream, layers, storage_bytes
from engine import new_method, run
from eviction_oracle import G, Oracle, best, window_rows
from families import LAYERS, VOCAB, tiny_model

from kvcli.capacity import memory
from kvcli.inputs.profiles import resolve_profile
from kvcli.kv.pruned import PrunedCache
from kvcli.methods.cake import capped_shares
from kvcli.models.geometry import geometry_of

STEPS = 60
SETTINGS = {"budget": 24, "window": 5, "kernel": 3, "gamma": 20.0, "tau1": 1.5, "tau2": 0.7}
TOKEN = HK * (2 * D * 4 + 4)  # bytes of a token of a layer: K, V, position


def preference(oracle):
    """H^(1/tau1) * V^(1/tau2) of the last five queries over the tokens before them, all heads together."""
    entropy = variance = 0.0
    for head in range(H):
        rows = window_rows(oracle, head, 5)
        entropy -= sum(weight * math.log(weight) for row in rows for weight in row)
        variance += sum(statistics.variance(column) for column in zip(*rows, strict=True))
    return entropy ** (1 / 1.5) * variance ** (1 / 0.7)


def chosen(oracle, head, share):
    """The tokens of the prompt that a KV head keeps: its last five, and the best by mean and variance, smoothed."""
    prompt = oracle.stream.prompt
    worth = [0.0] * (prompt - 5)
    for query_head in range(head * G, head * G + G):
        columns = list(zip(*window_rows(oracle, query_head, 5), strict=True))
        scores = [statistics.fmean(column) + 20 * statistics.variance(column) for column in columns]
        for token in range(len(scores)):
            worth[token] += sum(scores[max(0, token - 1) : token + 2]) / 3 / G
    return [*best(dict(enumerate(worth)), share), *range(prompt - 5, prompt)]


def shares(preferences, total, cap):
    """Cap what is above the cap and share the rest anew, until nothing is; rounded down."""
    exact, capped = [Fraction(p) for p in preferences], set()
    while True:
        others = [layer for layer in range(len(exact)) if layer not in capped]
        left, weight = total - cap * len(capped), sum(exact[layer] for layer in others)
        above = {layer for layer in others if left * exact[layer] > cap * weight}
        if not above:
            return [cap if layer in capped else int(left * exact[layer] / weight) for layer in range(len(exact))]
        capped |= above


@pytest.fixture(scope="module", params=[75, 34])
def read(request):
    """Four layers of one prompt, and the tokens that each is left with in the end."""
    prompt = request.param
    streams = [Stream(prompt, STEPS, seed=10 * prompt + layer) for layer in range(4)]
    for layer, stream in enumerate(streams):
        stream.prompt_q *= 0.3 + 0.6 * layer  # from spread to sharp
    oracles = [Oracle(stream) for stream in streams]
    mine = shares([preference(oracle) for oracle in oracles], 4 * 19, prompt - 5)
    return oracles, [
        [chosen(oracle, head, share) for head in range(HK)] for oracle, share in zip(oracles, mine, strict=True)
    ]


def take(method, layer, stream):
    k, v = (x[:, : stream.prompt].clone() for x in (stream.k, stream.v))
    method.prefill(layer, k, v, stream.prompt_q[:, -5:], SOFTMAX)


def test_the_cascade_ends_where_one_cut_would_and_never_holds_more(read, monkeypatch):
    oracles, kept = read
    prompt = oracles[0].stream.prompt
    method = new_method("cake", SETTINGS, layers(4), prompt + STEPS, prompt_tokens=prompt)
    plan, hold, held = method.footprint().device, PrunedCache._hold, []
    assert plan == 4 * (24 + STEPS) * TOKEN

    def watched(*arguments):
        moved = hold(*arguments)
        tensors = [x for cache in method.caches for x in (cache.kv, cache.positions) if not x.is_meta]
        held.append(storage_bytes(tensors))
        return moved

    monkeypatch.setattr(PrunedCache, "_hold", watched)
    for layer, oracle in enumerate(oracles):
        take(method, layer, oracle.stream)
        tokens = sum(cache.held for cache in method.retrieval.values())
        assert tokens <= 4 * 24
        assert tokens > min((layer + 1) * prompt, 4 * 19) - 4, "what there is is used"
    assert max(held) <= plan
    assert method.footprint().device == held[-1] <= plan
    counts = [len(layer[0]) for layer in kept]
    assert method.statistics() == {"kept_tokens": counts}
    assert 4 * 24 - 4 < sum(counts) <= 4 * 24
    assert len(set(counts)) > 1
    assert prompt == 75 or prompt in counts, "of the short prompt a layer keeps everything"
    assert not method.indicators, "what the cascade needed is gone"
    for step in range(STEPS):
        for layer, oracle in enumerate(oracles):
            stream, now = oracle.stream, prompt + step
            out = method.attend(layer, stream.q[step], stream.k[:, now], stream.v[:, now], SOFTMAX)
            if step in (0, 1, 57, STEPS - 1):
                oracle.check(step, method, out, [[*stay, *range(prompt, now + 1)] for stay in kept[layer]], layer)


@pytest.mark.parametrize("prompt", [24, 6, 5, 1])
def test_a_prompt_within_the_budget_is_kept(prompt):
    streams = [Stream(prompt, 3, seed=layer) for layer in range(3)]
    method = new_method("cake", SETTINGS, layers(3), prompt + 3, prompt_tokens=prompt)
    for layer, stream in enumerate(streams):
        take(method, layer, stream)
    assert method.statistics() == {"kept_tokens": [prompt] * 3}
    out = method.attend(1, streams[1].q[0], streams[1].k[:, prompt], streams[1].v[:, prompt], SOFTMAX)
    Oracle(streams[1]).check(0, method, out, [list(range(prompt + 1))] * HK)


def test_memory_of_dropped_tokens_is_given_back():
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    profile = resolve_profile(method="cake", overrides={"budget": 40, "window": 8})
    (sequence,) = run(model, "cake", profile.settings.model_dump(), [ids], 9)
    method = sequence.method
    geometry = geometry_of(model.config, model.dtype)
    planned = memory.kv_footprint(profile, geometry, method.context.capacity, model.dtype, len(ids)).device
    kept = sum(method.statistics()["kept_tokens"])
    assert 40 * LAYERS - LAYERS < kept <= 40 * LAYERS
    assert planned - method.footprint().device == (40 * LAYERS - kept) * 2 * (2 * 16 * 4 + 4)


@pytest.mark.parametrize("cap", [10, 40, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_shares_are_in_proportion_up_to_the_cap_and_only_shrink(cap, seed):
    preferences = torch.rand(9, generator=torch.Generator().manual_seed(seed)).pow(3).double().tolist()
    before = []
    for count in range(1, 10):
        found = capped_shares(preferences[:count], 200, cap)
        assert found == shares(preferences[:count], 200, cap)
        assert all(new <= old for new, old in zip(found, before, strict=False))
        before = found


def test_layers_that_want_nothing_share_alike():
    assert capped_shares([0.0, 0.0, 0.0], 60, 50) == [20, 20, 20]
    assert capped_shares([0.0, 1.0, 0.0], 60, 30) == [15, 30, 15]
