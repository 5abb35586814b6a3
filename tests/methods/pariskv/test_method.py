"""ParisKV against a slow re-derivation in float64 and plain loops, sharing nothing with it but the magnitude levels."""

import math

import pytest
import torch
from driver import HK, D, Stream
from oracle import attention, best, dot, group, same

from kvcli.kernels.page_table import EMPTY
from kvcli.methods.pariskv.kernels import encode_keys, estimated_products, magnitude_levels, rotation

M, BLOCKS = 8, D // 8
SINK, WINDOW, BUDGET, STEPS = 3, 6, 30, 40
SETTINGS = {"budget": BUDGET, "sink": SINK, "window": WINDOW, "dense_layers": 1, "seed": 3}
PATTERNS = [[1 if pattern >> j & 1 else -1 for j in range(M)] for pattern in range(1 << M)]
MAGNITUDES, THRESHOLDS = (each.tolist() for each in magnitude_levels())


class Oracle:
    """One layer: what every KV head selects at a step, and what it holds."""

    def __init__(self, stream, reranked=0.5, colliding=0.5):
        self.stream, self.reranked, self.colliding = stream, reranked, colliding
        drawn = torch.randint(0, 2, (D, 1), generator=torch.Generator().manual_seed(SETTINGS["seed"]))
        self.signs = [2 * sign - 1 for sign in drawn[:, 0].tolist()]
        self.keys = [[self.encoded(key) for key in head] for head in stream.k.double().tolist()]
        first = range(SINK, BUDGET - WINDOW) if stream.prompt <= BUDGET else ()
        self.held = [set(first) for _ in range(HK)]
        self.misses = self.requested = 0

    def turned(self, x):
        """Blocks of the Hadamard transform of x with its channels' signs changed."""
        signed = [sign * value for sign, value in zip(self.signs, x, strict=True)]
        rows = [[(-1) ** (i & j).bit_count() for j in range(D)] for i in range(D)]
        turned = [dot(row, signed) / math.sqrt(D) for row in rows]
        return [turned[M * b : M * b + M] for b in range(BLOCKS)]

    def encoded(self, key):
        """For each block its centroid, and its part of the key as the four bits have it."""
        out = []
        for block in self.turned(key):
            radius = math.sqrt(dot(block, block))
            pattern = sum((value >= 0) << j for j, value in enumerate(block))
            near = [MAGNITUDES[sum(abs(value) / radius > t for t in THRESHOLDS)] for value in block]
            alpha = sum(a * abs(value) / radius for a, value in zip(near, block, strict=True))
            held = [radius / alpha * a * s for a, s in zip(near, PATTERNS[pattern], strict=True)]
            out.append((pattern, held))
        return out

    def selected(self, head, q, candidates, count):
        query = self.turned([sum(channel) / len(channel) for channel in zip(*group(q, head), strict=True)])
        votes = [0] * len(candidates)
        for b, block in enumerate(query):
            own = [self.keys[head][t][b][0] for t in candidates]
            passed = 0
            for pattern in best([dot(block, centroid) for centroid in PATTERNS], 1 << M):
                worth = sum(
                    passed < math.ceil(self.colliding * len(own) * reach) for reach in (0.05, 0.15, 0.3, 0.5, 0.75, 1)
                )
                votes = [vote + worth * (mine == pattern) for vote, mine in zip(votes, own, strict=True)]
                passed += own.count(pattern)
        found = sorted(best(votes, max(count, math.ceil(self.reranked * len(candidates)))))
        products = [sum(dot(query[b], self.keys[head][candidates[i]][b][1]) for b in range(BLOCKS)) for i in found]
        return {candidates[found[i]] for i in best(products, count)}

    def step(self, step):
        length, q = self.stream.prompt + step + 1, self.stream.q[step]
        if length <= BUDGET:
            return attention(self.stream, q, [range(length)] * HK)
        candidates, tokens = range(SINK, length - WINDOW), []
        for head in range(HK):
            chosen = self.selected(head, q, candidates, BUDGET - SINK - WINDOW)
            self.requested += len(chosen)
            self.misses += len(chosen - self.held[head])
            self.held[head] = chosen
            tokens.append([*range(SINK), *chosen, *range(length - WINDOW, length)])
        return attention(self.stream, q, tokens)


# Retrieving from the first step; growing out of the budget, with other parts than those of so short a context.
@pytest.mark.parametrize(("prompt", "parts"), [(75, {}), (21, {"reranked": 0.7, "colliding": 0.2})])
def test_every_step_matches_the_oracle(prompt, parts):
    stream = Stream(prompt, steps=STEPS, seed=prompt)
    oracle = Oracle(stream, **parts)
    for step, method, out in stream.run("pariskv", {**SETTINGS, **parts}):
        assert same(out, oracle.step(step)), f"output of step {step}"
        if prompt + step + 1 > BUDGET:
            held = [{*tokens} - {EMPTY} for tokens in method.retrieval[1].resident.tolist()]
            assert held == oracle.held, f"tokens held after step {step}"
    cache = method.context.counters.cache()
    assert cache.pages_requested == oracle.requested
    assert 0 < cache.misses == oracle.misses < oracle.requested
    assert cache.bytes_to_device == oracle.misses * 2 * D * 4
    assert cache.bytes_to_host == (prompt + STEPS) * HK * 2 * D * 4


def test_levels_are_the_middles_of_what_is_nearest_to_them():
    """Near those of the reference code, whose rounds end before they settle; and by what they mean, on draws."""
    found = [0.0420, 0.1266, 0.2130, 0.3025, 0.3973, 0.5001, 0.6169, 0.7633]
    assert pytest.approx(found, abs=5e-3) == MAGNITUDES
    x = torch.randn(200_000, M, generator=torch.Generator().manual_seed(0))
    x = (x / x.norm(dim=1, keepdim=True))[:, 0].abs()
    nearest = (x[:, None] - torch.tensor(MAGNITUDES)).abs().argmin(1)
    middles = [float(x[nearest == level].mean()) for level in range(8)]
    assert pytest.approx(middles, abs=3e-3) == MAGNITUDES


@pytest.mark.parametrize("d", [5, 16, 80])
def test_the_rotation_keeps_products_and_four_bits_come_near_them(d):
    q, k = torch.randn(2, 300, d, generator=torch.Generator().manual_seed(d))
    turn = rotation(d, 0, q.device)
    assert torch.allclose(turn @ turn.T, torch.eye(d), atol=1e-6)
    _, codes, weights = encode_keys(k[None], turn)
    tokens = torch.arange(300)[None]
    found = torch.cat([estimated_products((q[i : i + 1] @ turn), codes, weights, tokens) for i in range(20)])
    exact = q[:20] @ k.T
    assert (found - exact).std() < 0.12 * exact.std()
    assert abs(float((found * exact).sum() / (exact * exact).sum()) - 1) < 0.02
