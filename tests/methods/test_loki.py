"""Loki against a slow re-derivation in float64, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, D, Stream
from engine import run
from families import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, tiny_model
from oracle import G, attention, best, dot, group, same, softmax
from safetensors.torch import save_file

from kvcli.errors import KvcliError

BUDGET, RANK = 30, 5
SETTINGS = {"budget": BUDGET, "rank": RANK}
VARIANTS = [{}, {"sink": 3, "window": 6}, {"rank": 1}, {"rank": 64}, {"pooling": "mean_qk"}, {"pooling": "mean_q"}]


def axes_of(keys):
    """Right singular vectors of the centred keys [n, D], as rows; numpy's way to a PCA."""
    return torch.linalg.svd(keys.double() - keys.double().mean(0))[2]


class Oracle:
    """One layer: what every KV head attends to at a step, by the first axes given for its keys."""

    def __init__(self, stream, axes, settings):
        self.stream, self.settings = stream, settings
        self.sink, self.window = settings.get("sink", 0), max(1, settings.get("window", 0))
        self.axes = [rows[: min(settings["rank"], D)].tolist() for rows in axes]
        self.short_keys = [
            [[dot(key, axis) for axis in self.axes[head]] for key in stream.k[head].double().tolist()]
            for head in range(HK)
        ]

    def chosen(self, step, head):
        length, pooling = self.stream.prompt + step + 1, self.settings.get("pooling", "max_s")
        if length <= BUDGET:
            return range(length)
        queries = group(self.stream.q[step], head)
        if pooling == "mean_q":
            queries = [[sum(channel) / G for channel in zip(*queries, strict=True)]]
        candidates = range(self.sink, length - self.window)
        rows = []
        for query in queries:
            short = [dot(query, axis) for axis in self.axes[head]]
            scores = [dot(short, self.short_keys[head][token]) / math.sqrt(D) for token in candidates]
            rows.append(softmax(scores) if pooling == "max_s" else scores)
        pool = max if pooling == "max_s" else lambda values: sum(values) / len(values)
        pooled = [pool(values) for values in zip(*rows, strict=True)]
        selected = [candidates[i] for i in best(pooled, BUDGET - self.sink - self.window)]
        return [*range(self.sink), *selected, *range(length - self.window, length)]

    def step(self, step):
        tokens = [self.chosen(step, head) for head in range(HK)]
        return attention(self.stream, self.stream.q[step], tokens)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("prompt", [61, 22])  # retrieving from the first step; growing out of the budget
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_step_matches_the_oracle(prompt, variant, offload):
    settings = {**SETTINGS, **variant}
    stream = Stream(prompt, steps=60, seed=prompt)
    oracle = Oracle(stream, [axes_of(stream.k[head, :prompt]) for head in range(HK)], settings)
    always = oracle.sink + oracle.window
    first = set(range(oracle.sink, BUDGET - oracle.window)) if prompt <= BUDGET else set()
    held, misses = [first] * HK, 0
    for step, method, out in stream.run("loki", {**settings, "offload": offload}):
        assert same(out, oracle.step(step)), f"step {step}"
        length = prompt + step + 1
        if offload and length > BUDGET:
            recent = length - oracle.window
            chosen = [
                {*oracle.chosen(step, head)} - {*range(oracle.sink), *range(recent, length)} for head in range(HK)
            ]
            misses += sum(len(now - before) for now, before in zip(chosen, held, strict=True))
            held = chosen
            assert [{*tokens} for tokens in method.retrieval[1].resident.tolist()] == held, f"step {step}"
    cache = method.context.counters.cache()
    active = sum(prompt + step + 1 > BUDGET for step in range(stream.steps))
    assert cache.pages_requested == active * HK * (BUDGET - always)
    token_bytes = 2 * D * 4
    if offload:
        assert 0 < cache.misses == misses < cache.pages_requested
        assert cache.bytes_to_device == misses * token_bytes
        assert cache.prefill_bytes_to_host == prompt * HK * token_bytes
        assert cache.bytes_to_host == (prompt + stream.steps) * HK * token_bytes
    else:
        assert cache.hits == cache.pages_requested
        assert cache.misses == cache.bytes_to_device == cache.bytes_to_host == 0


@pytest.mark.parametrize("prompt", [40, 30, 31, 29])
def test_offload_is_the_same_from_prompts_of_any_length(prompt):
    stream = Stream(prompt, 60, seed=prompt)
    runs = [stream.run("loki", {**SETTINGS, "sink": 2, "offload": offload}) for offload in (False, True)]
    for (_, here, out), (step, there, same_out) in zip(*runs, strict=True):
        assert torch.equal(here.attended(1), there.attended(1)), f"tokens of step {step}"
        assert torch.allclose(out, same_out, atol=1e-5), f"step {step}"


@pytest.mark.parametrize("offload", [False, True])
def test_axes_come_from_a_calibration_file_where_there_is_one(offload, tmp_path):
    other = Stream(80, steps=1, seed=9)
    axes = torch.stack([axes_of(other.k[head]) for head in range(HK)])
    save_file({"layer.1": axes.transpose(1, 2).float().contiguous()}, tmp_path / "pca.safetensors")
    stream = Stream(50, steps=30, seed=2)
    oracle = Oracle(stream, axes, SETTINGS)
    for step, _, out in stream.run("loki", {**SETTINGS, "pca": str(tmp_path / "pca.safetensors"), "offload": offload}):
        assert same(out, oracle.step(step)), f"step {step}"


def test_a_calibration_of_another_model_is_refused(tmp_path):
    save_file({f"layer.{layer}": torch.eye(8).repeat(KV_HEADS, 1, 1) for layer in range(LAYERS)}, tmp_path / "pca")
    with pytest.raises(KvcliError, match=rf"pca file .*has shape \[2, 8, 8\], not \[2, {HEAD_DIM}, {HEAD_DIM}\]"):
        run(tiny_model("llama"), "loki", {**SETTINGS, "pca": str(tmp_path / "pca")}, [[5]], 1)


def test_two_sequences_side_by_side_keep_axes_of_their_own():
    model = tiny_model("qwen3")
    ids = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (71, 40)]
    together = run(model, "loki", SETTINGS, ids, 40)
    for sequence, prompt in zip(together, ids, strict=True):
        (alone,) = run(model, "loki", SETTINGS, [prompt], 40)
        assert sequence.token_ids == alone.token_ids
    first, second = (sequence.method.retrieval[2].axes for sequence in together)
    assert not torch.allclose(first, second)


def test_keys_of_low_rank_need_no_more_channels_than_they_have():
    """With keys in a space of three dimensions, three channels choose what all of them choose."""
    stream = Stream(60, steps=40, seed=5)
    stream.k = torch.randn(HK, 100, 3, generator=torch.Generator().manual_seed(1)) @ stream.k[:, :3]
    few, all_of_them = (
        [out for _, _, out in stream.run("loki", {**SETTINGS, "rank": rank, "pooling": "max_s"})] for rank in (4, D)
    )
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(few, all_of_them, strict=True))
