"""ActQKV and InfLLM against a slow re-derivation (block_oracle.py): made-up tensors, and what a model hands over."""

import json
from math import log
from types import SimpleNamespace

import pytest
import torch
from block_oracle import Layer, Shares, entropy
from driver import HK, SOFTMAX, D, H, by_token, close, layers
from engine import SPARE, in_memory, new_method, profile_of, run
from families import LAYERS, VOCAB, tiny_model

from kvcli.kernels import prefill_attention as far_near_attention
from kvcli.kv.blocks import BlockCache
from kvcli.methods.actqkv import ActQKVConfig, CutOff
from kvcli.methods.contract import Method
from kvcli.models.geometry import geometry_of
from kvcli.models.rope import Rotary, installed
from kvcli.runtime.engine import engine

P = 4
SETTINGS = {
    "budget": 36,  # 2 pages of sinks, 3 local, 4 selected
    "sink": 8,
    "window": 12,
    "page_size": P,
    "prefill_window": 10,
    "representatives": 2,
}
COUNT = 2  # layers
LEAST, MOST = 3, 8  # 0.7 and 2 times 4


def oracle(kind, settings, count, rope, scale):
    shares = Shares(count, 4, LEAST, MOST) if kind == "actqkv" else None
    return [Layer(index, kind, settings, rope, scale, shares) for index in range(count)]


@pytest.fixture(scope="module")
def rotary():
    with installed(tiny_model("llama", layers=COUNT), [400]) as rope:
        yield rope.rotary(400)


@pytest.mark.parametrize(
    ("kind", "prompt", "rope", "positions", "question"),
    [
        ("actqkv", 75, True, "capped", 0),
        ("actqkv", 75, True, "original", 5),
        ("actqkv", 33, False, "capped", 1),
        ("infllm", 75, True, "capped", 0),
        ("infllm", 33, True, "original", 0),
        ("lm_infinite", 75, True, "capped", 0),
    ],
)
def test_every_window_and_every_step_match_the_oracle(kind, prompt, rope, positions, question, rotary):
    """Layers with KV of their own; 33 tokens grow out of the budget while decoding."""
    steps, settings = 110, {**SETTINGS, "positions": positions}
    generator = torch.Generator().manual_seed(prompt + question)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    method = new_method(kind, settings, layers(COUNT), prompt + steps, rotary=rotary if rope else None)
    expected = oracle(kind, settings, COUNT, rope, D**-0.5)
    sources = [tuple(noise(heads, prompt + steps, D) + 0.3 for heads in (H, HK, HK)) for _ in range(COUNT)]  # q, k, v
    for layer in range(COUNT) if question else ():
        asked, *kv = (noise(heads, 1 + question, D) for heads in (H, HK, HK))  # behind the prompt's first token
        method.take_preview(layer, asked, *kv, SOFTMAX)
        expected[layer].ask(by_token(asked[:, 1:]))
    for start in range(0, prompt, 10):
        part = slice(start, min(start + 10, prompt))
        for layer, source in enumerate(sources):
            window = [x[:, part] for x in source]
            out = method.attend_window(layer, *window, SOFTMAX)
            wanted = expected[layer].window(*(by_token(x) for x in window))
            assert close(out.transpose(0, 1), wanted), f"window at {start}, layer {layer}"
    assert sum(layer.misses for layer in expected) == sum(
        layer["prefill"].get("blocks_missed", 0) for layer in method.statistics()["layers"]
    )
    prefilled = [(layer.requested, layer.misses) for layer in expected]
    method.context.counters.next_step()
    for at in range(prompt, prompt + steps):
        for layer, source in enumerate(sources):
            token = [x[:, at] for x in source]
            out = method.attend(layer, *token, SOFTMAX)
            wanted = expected[layer].step(*(x.double().tolist() for x in token))
            assert close(out, wanted), f"step {at - prompt}, layer {layer}"
            cache = method.retrieval[layer]
            assert sorted(cache.resident[cache.chosen].tolist()) == sorted(expected[layer].chosen)
    requested = sum(layer.requested - before[0] for layer, before in zip(expected, prefilled, strict=True))
    misses = sum(layer.misses - before[1] for layer, before in zip(expected, prefilled, strict=True))
    cache = method.context.counters.cache()
    assert cache.pages_requested == requested * HK
    assert cache.misses == misses * HK
    assert 0 < misses < requested
    assert cache.bytes_to_device == misses * HK * 2 * P * D * 4
    blocks = -(-(prompt + steps) // P) - 5  # neither sinks nor local
    assert cache.bytes_to_host == COUNT * blocks * HK * 2 * P * D * 4
    for layer, usage in zip(expected, method.statistics()["layers"], strict=True):
        decode = usage["decode"]
        if kind == "actqkv":
            assert decode["entropy_mean"] == pytest.approx(sum(layer.entropies) / len(layer.entropies), rel=1e-5)
            assert LEAST <= decode["blocks_min"] <= decode["blocks_max"] <= MOST
            assert abs(decode["score_mean"]) < 1
        else:
            assert decode["blocks_min"] == decode["blocks_max"] == decode["blocks_mean"] == 4
    statistics = method.statistics()
    assert statistics["decode"]["blocks_requested"] == requested
    assert statistics["decode"]["blocks_missed"] == misses
    assert statistics["blocks_per_layer"] == requested / statistics["decode"]["retrievals"]
    assert ("score_entropy" in statistics) == (kind == "actqkv")
    assert bool(statistics["prefill"]) == (prompt > 40)
    assert json.loads(json.dumps(statistics)) == statistics


def recorded(monkeypatch):
    """Everything that a model hands to method objects and what they answer, in order, as a list that grows."""
    calls = []

    def noting(name):
        function = getattr(Method, name)

        def noted(method, layer, q, k, v, softmax):
            out = function(method, layer, q, k, v, softmax)
            calls.append((name, id(method), layer, (q.clone(), k.clone(), v.clone()), out))
            return out

        monkeypatch.setattr(Method, name, noted)

    noting("attend_window")
    noting("attend")
    return calls


def test_a_batch_of_two_through_a_model_matches_the_oracle(monkeypatch):
    model, steps = tiny_model("llama", layers=COUNT), 102
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (71, 38)]
    settings = {**SETTINGS, "positions": "capped"}
    calls = recorded(monkeypatch)
    sequences = run(model, "actqkv", settings, prompts, steps)
    scale = model.config.head_dim**-0.5
    oracles = {id(sequence.method): oracle("actqkv", settings, COUNT, True, scale) for sequence in sequences}
    for name, method, layer, (q, k, v), out in calls:
        if name == "attend_window":
            wanted = oracles[method][layer].window(by_token(q), by_token(k), by_token(v))
            assert close(out.transpose(0, 1), wanted), f"layer {layer}"
        else:
            wanted = oracles[method][layer].step(*(x.double().tolist() for x in (q, k, v)))
            assert close(out, wanted), f"layer {layer}"
    names = [name for name, *_ in calls]
    assert names.count("attend_window") == (8 + 4) * COUNT
    assert names.count("attend") == 2 * (steps - 1) * COUNT


def test_attended_pairs_grow_linearly_with_the_prompt(monkeypatch):
    model, count = tiny_model("llama", layers=2), [0]
    attention = far_near_attention.block_attention

    def counting(q, k, *rest):
        count[0] += q.shape[0] * q.shape[1] * k.shape[1]  # masked pairs included
        return attention(q, k, *rest)

    monkeypatch.setattr(far_near_attention, "block_attention", counting)
    pairs = {}
    for length in (200, 400, 800):
        count[0] = 0
        run(model, "actqkv", SETTINGS, [[3 + i % 200 for i in range(length)]], 1)
        pairs[length] = count[0]
    assert pairs[800] - pairs[400] == 2 * (pairs[400] - pairs[200])
    heads, most = 4, SETTINGS["budget"] + SETTINGS["prefill_window"]
    assert pairs[800] <= 2 * heads * 800 * most


def test_capped_positions_are_exact_while_nothing_left_the_local_window():
    model, ids = tiny_model("qwen3"), list(range(5, 95))
    wide = {**SETTINGS, "window": 128, "budget": 256, "positions": "capped"}
    assert [s.token_ids for s in run(model, "actqkv", wide, [ids], 38)] == [
        s.token_ids for s in run(model, "full", {}, [ids], 38)
    ]


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "gemma3", "glm4", "granite"])
def test_original_positions_are_exact_with_every_kind_of_softmax_and_window(family):
    """Sinks, softcaps, sliding layers, partial rotation and unusual scales, in windows of 10, far keys in use."""
    model, ids = tiny_model(family), list(range(5, 95))
    fits = {**SETTINGS, "budget": 160, "positions": "original"}
    assert [s.token_ids for s in run(model, "actqkv", fits, [ids], 60)] == [
        s.token_ids for s in run(model, "full", {}, [ids], 60)
    ]


def test_no_key_is_turned_further_from_its_query_than_the_windows_are_long(monkeypatch):
    """That is how it reads past the positions of the model: capped distances are ones it knows."""
    furthest = []
    attend = BlockCache.attend_newest

    def watched(cache, *given):
        furthest.append(cache.length - 1 - cache.first)
        return attend(cache, *given)

    def place(rotary, x, positions):
        furthest.append(int(positions.max()))
        return rotate(rotary, x, positions)

    rotate = Rotary.rotate
    monkeypatch.setattr(BlockCache, "attend_newest", watched)
    monkeypatch.setattr(Rotary, "rotate", place)
    generator = torch.Generator().manual_seed(2)
    run(tiny_model("llama"), "actqkv", SETTINGS, [torch.randint(3, VOCAB, (700,), generator=generator).tolist()], 20)
    assert len(furthest) > 600
    assert max(furthest) < SETTINGS["window"] + SETTINGS["prefill_window"]


def test_a_question_is_read_alone_and_changes_what_is_retrieved():
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (300,), generator=generator).tolist()

    def read(question, **more):
        with engine(in_memory(model), [len(ids) + SPARE]) as ready:
            profile, context = profile_of("actqkv", {**SETTINGS, **more}), ready.context(len(ids), SPARE, question)
            method = ready.method(profile, context)
            done = []
            (logits,) = ready.prefill(ids, [method], done.append)
            assert sum(done) == len(ids) * LAYERS
        return logits, method

    asked, method = read(ids[-6:])
    assert set(method.question) == set(range(LAYERS))
    plain, without = read([])
    assert not without.question
    assert not torch.allclose(asked, plain)
    assert torch.equal(read(ids[-6:], question_weight=0.0)[0], plain)
    long, _ = read([9, *ids[-10:]])  # a question longer than a window counts by its end
    assert torch.equal(long, read(ids[-10:])[0])


def test_cut_off_matches_a_loop():
    generator = torch.Generator().manual_seed(1)
    layers_, blocks, least, most = [1, 2, 4, 7, 8], 46, 32, 92
    cut, shares = CutOff(layers_, blocks, least, most), Shares(5, blocks, least, most)
    totals = []
    for step in range(250):  # more than the 100 that count
        given = []
        for place, layer in enumerate(layers_):
            theta = 0.5 + (1 + place) * float(torch.rand((), generator=generator)) + step / 50
            candidates = 47 + step // 3
            given.append(cut.allot(layer, theta, candidates))
            assert given[-1] == shares.take(place, theta, candidates)
            assert min(candidates, least) <= given[-1] <= min(candidates, most)
        totals.append(sum(given))
        if step == 0:
            assert given == [blocks] * 5
    assert sum(totals) / len(totals) == pytest.approx(5 * blocks, rel=0.1)


def test_equal_entropies_divide_equally():
    cut = CutOff(range(3), 46, 32, 92)
    assert [[cut.allot(layer, log(500), 500) for layer in range(3)] for _ in range(3)] == [[46] * 3] * 3
    assert entropy([0.3] * 8) == pytest.approx(log(8))


def test_bounds_of_the_paper_follow_from_its_budget():
    config = ActQKVConfig()
    assert (config.pages.selected, config.least, config.slots) == (46, 32, 92)


@pytest.mark.parametrize("settings", [{"representatives": 33}, {"budget": 600}, {"positions": "none"}])
def test_senseless_settings_are_refused(settings):
    with pytest.raises(ValueError, match=r"representatives 33|budget 600|positions"):
        ActQKVConfig(**settings)


def test_half_precision_and_exact_footprint():
    model = tiny_model("llama").to(torch.bfloat16)
    (sequence,) = run(model, "actqkv", SETTINGS, [list(range(4, 204))], 30)
    geometry = geometry_of(model.config, torch.bfloat16).layers
    planned = [new_method("actqkv", SETTINGS, geometry, n + 30 + SPARE, torch.bfloat16).footprint() for n in (200, 600)]
    assert sequence.method.footprint() == planned[0]
    more = 400 // P  # blocks: on the device a longer prompt takes one key of each
    assert planned[1].device - planned[0].device == LAYERS * more * 2 * 16 * 2
    assert planned[1].host - planned[0].host == LAYERS * more * 2 * 2 * P * 16 * 2


@pytest.mark.parametrize("how", ["density", "even", "reverse"])
def test_layers_share_the_budget_by_density_evenly_or_in_reverse(how):
    method = new_method("actqkv", {"cutoff": how, "budget": 2048, "window": 512}, layers(2), 4096)
    flat, peaked = torch.zeros(200), torch.cat((torch.tensor([9.0]), torch.zeros(199)))
    for _ in range(3):
        given = [method.allot(0, flat), method.allot(1, peaked)]
    even = method.config.pages.selected
    if how == "even":
        assert given == [even, even]
    else:
        assert (given[0] > given[1]) == (how == "density")


@pytest.mark.parametrize("changed", [{"probe": "mean"}, {"probe": "reverse"}, {"similarity": "dot"}], ids=str)
def test_windows_are_scored_as_the_ablation_says(changed):
    method = new_method("actqkv", changed, layers(2), 512)
    queries = torch.randn(H, 9, D, generator=torch.Generator().manual_seed(2))
    block_keys = torch.randn(6, HK, D, generator=torch.Generator().manual_seed(4))
    cache, keys = SimpleNamespace(block_keys=block_keys), block_keys.repeat_interleave(H // HK, 1).flatten(1)
    flat = queries.double().transpose(0, 1).flatten(1)  # [n, H * D]
    bias = ((flat - flat.mean(0)) ** 2 / (flat.var(0) + 1e-6)).sum(1)
    weights = {"mean": torch.ones_like(bias), "reverse": 1 / (bias + 1e-6)}.get(changed.get("probe"), bias)
    probe = (weights / weights.sum()) @ flat
    expected = keys.double() @ probe
    if "similarity" not in changed:
        expected = expected / (keys.double().norm(dim=1) * probe.norm())
    found = method.window_scores(1, cache, queries)
    assert torch.allclose(found.double(), expected, rtol=1e-3, atol=1e-5)
