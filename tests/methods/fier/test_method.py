"""FIER against a slow re-derivation from the paper, in float64 and plain loops, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, SOFTMAX, D, H, Stream, layers
from engine import new_method
from pydantic import ValidationError

from kvcli.kernels.page_table import EMPTY
from kvcli.methods.fier.method import FIERConfig

BUDGET, GROUP = 37, 8
SETTINGS = {"budget": BUDGET, "group": GROUP, "dense_layers": 1}
VARIANTS = [{}, {"sink": 3, "window": 5}, {"window": 13, "group": 4}, {"group": 1}, {"pooling": "mean_qk"}]
G = H // HK
STEPS = 60


def softmax(values):
    exps = [math.exp(value - max(values)) for value in values]
    return [value / sum(exps) for value in exps]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


class Oracle:
    """One layer, step after step: what each KV head attends to, and what a recall of it costs."""

    def __init__(self, stream, settings):
        self.k, self.v, self.q = stream.k.double().tolist(), stream.v.double().tolist(), stream.q
        self.prompt = stream.prompt
        self.sink, self.window = settings.get("sink", 0), max(1, settings.get("window", 0))
        self.group, self.pooling = settings["group"], settings.get("pooling", "max_s")
        self.page = settings.get("page", 1)
        self.misses = self.requested = 0
        first = set(range(self.sink, BUDGET - self.window)) if self.prompt <= BUDGET else set()
        self.held = [first for _ in range(HK)]
        self.quantised = [{} for _ in range(HK)]

    def key(self, head, token):
        """The key of a token as its group's code * s + z."""
        if token not in self.quantised[head]:
            first = token - token % self.group
            keys = self.k[head][first : first + self.group]
            middle = [(max(channel) + min(channel)) / 2 for channel in zip(*keys, strict=True)]
            half = [(max(channel) - min(channel)) / 2 for channel in zip(*keys, strict=True)]
            self.quantised[head][token] = [
                z + s if x >= z else z - s for x, z, s in zip(self.k[head][token], middle, half, strict=True)
            ]
        return self.quantised[head][token]

    def attended(self, step):
        """Tokens of every KV head at a step, counting what has to be fetched for them."""
        length = self.prompt + step + 1
        if length <= BUDGET:
            return [list(range(length))] * HK
        always = {*range(self.sink), *range(length - self.window, length), *range(length - length % self.group, length)}
        candidates = [token for token in range(length) if token not in always]
        out = []
        for head in range(HK):
            if self.pooling == "none":
                out.append(self.alone(step, head, candidates, always))
                continue
            rows = []
            for query in self.q[step][head * G : head * G + G].double().tolist():
                scores = [dot(query, self.key(head, token)) / math.sqrt(D) for token in candidates]
                rows.append(softmax(scores) if self.pooling == "max_s" else scores)
            pool = max if self.pooling == "max_s" else lambda values: sum(values) / G
            pooled = [pool([row[i] for row in rows]) for i in range(len(candidates))]
            if self.page > 1:  # whole pages by their mean
                size = self.page
                rest = len(candidates) % size  # the last page, which the current token completes
                means = [sum(pooled[i : i + size]) / size for i in range(0, len(candidates) - rest, size)]
                best = sorted(range(len(means)), key=lambda j: (-means[j], j))[: (BUDGET - len(always) - rest) // size]
                chosen = {candidates[size * j + row] for j in best for row in range(size)}
                chosen |= set(candidates[len(candidates) - rest :])
                self.requested += len(chosen)
                out.append(sorted(always | chosen))
                continue
            order = sorted(range(len(candidates)), key=lambda i: (-pooled[i], i))
            chosen = {candidates[i] for i in order[: BUDGET - len(always)]}
            self.requested += len(chosen)
            self.misses += len(chosen - self.held[head])
            self.held[head] = chosen
            out.append(sorted(always | chosen))
        return out

    def alone(self, step, head, candidates, always):
        """Tokens of every query head of a KV head, each by its own scores; the KV head is asked for their union."""
        found = []
        for query in self.q[step][head * G : head * G + G].double().tolist():
            scores = [dot(query, self.key(head, token)) for token in candidates]
            order = sorted(range(len(candidates)), key=lambda i: (-scores[i], i))
            found.append(always | {candidates[i] for i in order[: BUDGET - len(always)]})
        self.requested += len(set.union(*found) - always)
        return [sorted(each) for each in found]

    def step(self, step):
        out = []
        for head, tokens in enumerate(self.attended(step)):
            own = tokens if isinstance(tokens[0], list) else [tokens] * G
            least = min(BUDGET, self.prompt + step + 1)
            assert all(least - self.page < len(each) <= least for each in own)
            for query, mine in zip(self.q[step][head * G : head * G + G].double().tolist(), own, strict=True):
                weights = softmax([dot(query, self.k[head][token]) / math.sqrt(D) for token in mine])
                values = zip(*(self.v[head][token] for token in mine), strict=True)
                out.append([dot(weights, channel) for channel in values])
        return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("prompt", [75, 21])  # retrieving from the first step; growing out of the budget
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_step_matches_the_oracle(prompt, variant, offload):
    settings = {**SETTINGS, **variant}
    stream = Stream(prompt, steps=STEPS, seed=prompt)
    oracle = Oracle(stream, settings)
    for step, method, out in stream.run("fier", {**settings, "offload": offload}):
        assert torch.allclose(out.double(), oracle.step(step), rtol=1e-4, atol=1e-5), f"output of step {step}"
        if offload and prompt + step + 1 > BUDGET:
            resident = [{*tokens} - {EMPTY} for tokens in method.retrieval[1].resident.tolist()]
            assert resident == oracle.held, f"tokens held after step {step}"
    cache = method.context.counters.cache()
    assert cache.pages_requested == oracle.requested
    group_bytes = HK * 2 * settings["group"] * D * 4
    if offload:
        assert 0 < cache.misses == oracle.misses < oracle.requested
        assert cache.bytes_to_device == oracle.misses * 2 * D * 4
        assert cache.prefill_bytes_to_host == prompt // settings["group"] * group_bytes
        assert cache.bytes_to_host == (prompt + STEPS) // settings["group"] * group_bytes
    else:
        assert cache.misses == cache.bytes_to_device == cache.bytes_to_host == 0


@pytest.mark.parametrize("variant", [{}, {"sink": 3, "window": 5}], ids=str)
@pytest.mark.parametrize("prompt", [75, 21])
def test_each_query_head_may_choose_for_itself(prompt, variant):
    settings = {**SETTINGS, **variant, "pooling": "none"}
    stream = Stream(prompt, steps=60, seed=prompt)
    oracle = Oracle(stream, settings)
    for step, method, out in stream.run("fier", settings):  # noqa: B007 - read afterwards
        assert torch.allclose(out.double(), oracle.step(step), rtol=1e-4, atol=1e-5), f"output of step {step}"
    cache = method.context.counters.cache()
    assert cache.pages_requested == oracle.requested
    assert cache.bytes_to_device == 0
    with pytest.raises(ValidationError, match="offload has room for one selection"):
        FIERConfig(pooling="none", offload=True)


@pytest.mark.parametrize("page", [2, 8])
def test_pages_may_be_chosen_by_quantised_scores(page):
    settings = {**SETTINGS, "page": page}
    stream = Stream(75, steps=40, seed=page)
    oracle = Oracle(stream, settings)
    for step, method, out in stream.run("fier", settings):  # noqa: B007 - read afterwards
        assert torch.allclose(out.double(), oracle.step(step), rtol=1e-4, atol=1e-5), f"output of step {step}"
    assert method.context.counters.cache().pages_requested == oracle.requested
    with pytest.raises(ValidationError, match="multiples of page 16"):
        FIERConfig(page=16, group=8)


def test_two_sequences_side_by_side():
    streams = [Stream(75, 40, seed=1), Stream(22, 40, seed=2)]
    oracles = [Oracle(stream, SETTINGS) for stream in streams]
    runs = [stream.run("fier", {**SETTINGS, "offload": True}) for stream in streams]
    for together in zip(*runs, strict=True):
        for oracle, (step, _, out) in zip(oracles, together, strict=True):
            assert torch.allclose(out.double(), oracle.step(step), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompt", [1, 5, 8, 37, 38, 40])
def test_offload_is_the_same_from_prompts_of_any_length(prompt):
    stream = Stream(prompt, STEPS, seed=prompt)
    settings = {**SETTINGS, "sink": 2}
    for here, there in zip(
        stream.run("fier", settings), stream.run("fier", {**settings, "offload": True}), strict=True
    ):
        assert torch.allclose(here[2], there[2], atol=1e-6)


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.bfloat16, 0.125), (torch.float32, 0.09375)])
@pytest.mark.parametrize("offload", [False, True])
def test_statistics_tell_what_part_of_the_keys_is_read(dtype, ratio, offload):
    method = new_method("fier", {"dense_layers": 1, "offload": offload}, layers(), 200, dtype)
    assert method.statistics() == {"key_load_ratio": ratio}
    cache = method.retrieval[1]
    tokens = cache.index.codes.shape[1] * 32
    assert (cache.index.codes.nbytes + cache.index.ranges.nbytes) / (HK * tokens * D * dtype.itemsize) == ratio


def test_sixteen_bit_keys_and_growth_from_one_token():
    k, v, q = (torch.randn(90, heads, D, dtype=torch.bfloat16) for heads in (HK, HK, H))
    here, there = (new_method("fier", {**SETTINGS, "offload": o}, layers(), 90, torch.bfloat16) for o in (False, True))
    for method in (here, there):
        method.prefill(1, k[:1].transpose(0, 1), v[:1].transpose(0, 1), q[:0].transpose(0, 1), SOFTMAX)
    for step in range(1, 90):
        outs = [method.attend(1, q[step], k[step], v[step], SOFTMAX) for method in (here, there)]
        assert torch.allclose(outs[0].float(), outs[1].float(), atol=2e-2)


def test_a_budget_that_leaves_no_token_is_refused_with_the_least():
    FIERConfig(budget=32)
    with pytest.raises(ValidationError, match="must be at least 32"):
        FIERConfig(budget=31)
    with pytest.raises(ValidationError, match="must be at least 105"):
        FIERConfig(budget=50, sink=4, window=100)
