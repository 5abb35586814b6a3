"""ReFreeKV against a slow re-derivation from the paper, in float64 and plain loops, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, SOFTMAX, D, H, Stream, layers, storage_bytes
from engine import new_method, run
from families import LAYERS, VOCAB, tiny_model

from kvcli.capacity import memory
from kvcli.errors import KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.memory.tiers import Footprint
from kvcli.methods.refreekv import norm_cut
from kvcli.models.geometry import geometry_of

G = H // HK
STEPS = 40
SETTINGS = {"dense_layers": 1, "threshold": 0.1}  # random attention is flat: 0.01 would drop a token or two
TOKEN, POSITION = 2 * HK * D * 4, HK * 4  # bytes of a token of a layer, and of where it stands


def softmax(values):
    exps = [math.exp(value - max(values)) for value in values]
    return [value / sum(exps) for value in exps]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def attention(q, keys):
    return softmax([dot(q, key) / math.sqrt(D) for key in keys])


def kept(stream, threshold=0.1, sink=4, rows=1, ranking="position"):
    """Positions of the prompt that stay, one position after another as the paper ranks them."""
    length = stream.prompt
    k, q = stream.k.double().tolist(), stream.prompt_q.double().tolist()
    mean = []
    for head in range(H):
        sums, counts = [0.0] * length, [0] * length
        for row in range(max(0, length - rows), length):
            for token, weight in enumerate(attention(q[head][row], k[head // G][: row + 1])):
                sums[token] += weight
                counts[token] += 1
        mean.append([total / count for total, count in zip(sums, counts, strict=True)])

    def norm(positions):
        return sum(math.sqrt(sum(row[t] ** 2 for t in positions)) for row in mean) / H

    sinks = list(range(min(sink, length)))
    ranked = list(range(length - 1, len(sinks) - 1, -1))
    if ranking == "attention":
        ranked.sort(key=lambda t: -sum(row[t] for row in mean))
    for count in range(1, len(ranked) + 1):
        if 1 - norm(ranked[:count]) / norm(ranked) < threshold:
            return sinks + sorted(ranked[:count])
    return sinks + sorted(ranked)


def expected(stream, step, positions):
    tokens = [*positions, *range(stream.prompt, stream.prompt + step + 1)]
    out = []
    for head in range(H):
        keys, values = ([x[head // G, t].double().tolist() for t in tokens] for x in (stream.k, stream.v))
        weights = attention(stream.q[step][head].double().tolist(), keys)
        out.append([dot(weights, channel) for channel in zip(*values, strict=True)])
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("variant", [{}, {"rows": 7}, {"sink": 0}, {"threshold": 0.5, "sink": 9}], ids=str)
@pytest.mark.parametrize("prompt", [75, 6])
def test_every_step_matches_the_oracle(prompt, variant, offload):
    stream = Stream(prompt, STEPS, seed=prompt)
    settings = {**SETTINGS, **variant}
    positions = kept(stream, **{key: value for key, value in settings.items() if key != "dense_layers"})
    assert prompt == 6 or settings.get("sink", 4) < len(positions) < prompt
    for step, method, out in stream.run("refreekv", {**settings, "offload": offload}):
        assert torch.allclose(out.double(), expected(stream, step, positions), rtol=1e-4, atol=1e-5), f"step {step}"
        cache = method.retrieval[1]
        assert (cache.length, cache.held) == (prompt + step + 1, len(positions) + step + 1)
    assert method.statistics() == {"realised_budget": len(positions) / prompt, "kept_tokens": [len(positions)]}
    rows = len(positions) + STEPS
    held, places = rows * TOKEN, rows * POSITION
    assert cache.footprint() == (Footprint(places, held) if offload else Footprint(places + held))
    counters = method.context.counters.cache()
    assert counters.pages_requested == counters.misses == 0
    if offload:
        assert counters.prefill_bytes_to_host == len(positions) * TOKEN
        assert counters.bytes_to_host == held
        assert counters.bytes_to_device == sum(len(positions) + step + 1 for step in range(STEPS)) * TOKEN
    else:
        assert counters.bytes_to_host == counters.bytes_to_device == 0


def test_two_sequences_side_by_side():
    streams = [Stream(75, 40, seed=1), Stream(33, 40, seed=2)]
    positions = [kept(stream) for stream in streams]
    runs = [stream.run("refreekv", SETTINGS) for stream in streams]
    for together in zip(*runs, strict=True):
        for stream, stay, (step, _, out) in zip(streams, positions, together, strict=True):
            assert torch.allclose(out.double(), expected(stream, step, stay), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompt", [1, 3, 4, 5])
def test_prompts_of_few_tokens_are_kept(prompt):
    stream = Stream(prompt, 3)
    for step, method, out in stream.run("refreekv", {**SETTINGS, "threshold": 0.01}):
        assert torch.allclose(out.double(), expected(stream, step, range(prompt)), rtol=1e-4, atol=1e-5)
        assert method.retrieval[1].held == prompt + step + 1
    assert method.statistics()["kept_tokens"] == [prompt]


def heavy(prompt, token):
    """A stream whose last query looks at `token` above all."""
    stream = Stream(prompt, 2, seed=5)
    direction = torch.nn.functional.normalize(torch.ones(D), dim=0)
    stream.k -= (stream.k @ direction)[..., None] * direction
    stream.k[:, token] += 20 * direction
    stream.prompt_q[:, -1] = 8 * direction
    return stream


def test_a_heavy_sink_does_not_stand_for_the_rest():
    stream = heavy(60, 0)
    *_, (_, method, _) = stream.run("refreekv", {**SETTINGS, "threshold": 0.01})
    assert method.statistics()["kept_tokens"] == [len(kept(stream, 0.01))]
    assert method.statistics()["kept_tokens"][0] > 30


@pytest.mark.parametrize("token", [7, 40, 59])
def test_everything_newer_than_a_heavy_token_stays(token):
    *_, (_, method, _) = heavy(60, token).run("refreekv", {**SETTINGS, "threshold": 0.01})
    assert method.statistics() == {"realised_budget": (64 - token) / 60, "kept_tokens": [64 - token]}


def test_leading_layers_are_kept_whole_and_count():
    stream = Stream(75, 1)
    method = new_method("refreekv", {**SETTINGS, "dense_layers": 2}, layers(3), 76)
    for layer in range(3):
        k, v = (x[:, :75].clone() for x in (stream.k, stream.v))
        method.prefill(layer, k, v, stream.prompt_q[:, -1:], SOFTMAX)
    count = len(kept(stream))
    statistics = method.statistics()
    assert statistics["kept_tokens"] == [75, 75, count]
    assert statistics["realised_budget"] == pytest.approx((2 + count / 75) / 3)
    assert method.footprint().device == (2 * 76 + count + 1) * (TOKEN + POSITION)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_model_does_not_notice_where_the_kv_lies(family):
    model = tiny_model(family)
    ids = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (83, 1)]
    settings = {"dense_layers": 1, "threshold": 0.3}
    here, there = (run(model, "refreekv", {**settings, "offload": offload}, ids, 16) for offload in (False, True))
    assert [sequence.token_ids for sequence in here] == [sequence.token_ids for sequence in there]
    assert here[0].report().method["realised_budget"] < 1


def test_memory_of_dropped_tokens_is_given_back():
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    profile = resolve_profile(method="refreekv", overrides={"threshold": 0.3})
    (sequence,) = run(model, "refreekv", profile.settings.model_dump(), [ids], 9)
    method = sequence.method
    geometry = geometry_of(model.config, model.dtype)
    planned = memory.kv_footprint(profile, geometry, method.context.capacity, model.dtype)
    kept_tokens = method.statistics()["kept_tokens"]
    assert kept_tokens[:2] == [90, 90]
    dropped = 90 * LAYERS - sum(kept_tokens)
    assert dropped > 0
    assert planned.device - method.footprint().device == dropped * 2 * (
        2 * 16 * 4 + 4
    )  # 2 KV heads: K, V of d 16, where
    storage = storage_bytes([x for cache in method.caches for x in (cache.kv, cache.positions)])
    assert storage == method.footprint().device


@pytest.mark.parametrize("threshold", [0.0, 0.001, 0.01, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("length", [1, 2, 50])
def test_cut_is_the_least_prefix_that_holds_the_norm(length, threshold):
    weights = torch.randn(6, length, generator=torch.Generator().manual_seed(length)).mul(2).softmax(-1)
    rows = weights.double().tolist()

    def norm(count):
        return sum(math.sqrt(sum(x * x for x in row[length - count :])) for row in rows) / len(rows)

    enough = [count for count in range(1, length + 1) if 1 - norm(count) / norm(length) < threshold]
    assert norm_cut(weights, threshold) == (min(enough) if enough else length)


def test_zero_keeps_everything_even_what_weighs_nothing():
    assert norm_cut(torch.zeros(3, 7), 0.0) == 7
    assert norm_cut(torch.tensor([[0.0, 0.0, 1.0]]), 0.0) == 3
    assert norm_cut(torch.tensor([[0.0, 0.0, 1.0]]), 0.01) == 1


def test_long_rows_end_at_the_whole_norm():
    assert norm_cut(torch.full((2, 200_001), 1 / 200_001), 1e-9) == 200_001


@pytest.mark.parametrize("rows", [1, 9, 130])
def test_tokens_may_be_ranked_by_attention(rows):
    stream = Stream(150, 1, seed=rows)
    settings = {**SETTINGS, "threshold": 0.05, "rows": rows, "ranking": "attention"}
    ((_, method, _),) = stream.run("refreekv", settings)
    positions = kept(stream, 0.05, rows=rows, ranking="attention")
    assert method.attended(1)[0].nonzero()[:, 0].tolist() == [*positions, 150]
    assert positions != kept(stream, 0.05, rows=rows)


def test_rows_may_be_a_share_of_the_prompt():
    profile = resolve_profile("refreekv", overrides={"rows": "10%"})
    assert profile.for_prompt(150).settings.rows == 15
    with pytest.raises(KvcliError, match="refreekv: rows 10% of a prompt of 5 tokens: rows = 0"):
        profile.for_prompt(5)
