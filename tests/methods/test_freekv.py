"""FreeKV against a slow re-derivation from the paper, in float64 and plain loops, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, D, H, Stream

from kvcli.errors import KvcliError
from kvcli.kernels import _numba, speculation
from kvcli.kernels.speculation import speculate
from kvcli.kv.paged import EMPTY

P, SINK, WINDOW, SELECTED = 4, 2, 2, 3  # in pages of 4 tokens
SETTINGS = {"budget": P * (SINK + WINDOW + SELECTED), "sink": P * SINK, "window": P * WINDOW, "page_size": P}
G = H // HK


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def softmax(values):
    top = max(values)
    exps = [math.exp(value - top) for value in values]
    return [value / sum(exps) for value in exps]


class Oracle:
    """One layer, step after step: what each KV head attends to, and what that cost."""

    def __init__(self, stream, tau):
        self.k, self.v = stream.k.double().tolist(), stream.v.double().tolist()
        self.q = [q.double().tolist() for q in stream.q]
        self.tau, self.prompt = tau, stream.prompt
        self.held = [set() for _ in range(HK)]
        self.retrieved = False
        self.checked = self.layer_steps = self.requested = self.first = self.exposed = 0
        self.corrected, self.misses = [0] * HK, [0] * HK

    def pages(self, length):
        return -(-length // P)

    def selection(self, head, q, length):
        """The best pages by mean softmax over the group of the bound sum_c max(q_c min_c, q_c max_c) / sqrt(d)."""
        candidates = range(SINK, self.pages(length) - WINDOW)
        scores = [0.0] * len(candidates)
        for query in q[head * G : head * G + G]:
            bounds = []
            for page in candidates:
                keys = self.k[head][page * P : page * P + P]
                bound = sum(
                    max(query[c] * min(k[c] for k in keys), query[c] * max(k[c] for k in keys)) for c in range(D)
                )
                bounds.append(bound / math.sqrt(D))
            scores = [a + b / G for a, b in zip(scores, softmax(bounds), strict=True)]
        order = sorted(range(len(candidates)), key=lambda i: (-scores[i], i))
        return {candidates[i] for i in order[:SELECTED]}

    def step(self, step):
        length = self.prompt + step + 1
        q = self.q[step]
        if self.pages(length) <= SINK + WINDOW + SELECTED:
            return [self.attention(head, q, range(length)) for head in range(HK)]
        if not self.retrieved and length - self.prompt > 1 and self.pages(length - 1) <= SINK + WINDOW + SELECTED:
            self.held = [set(range(SINK, SINK + SELECTED)) for _ in range(HK)]  # grew out of the budget while decoding
        wanted = [self.selection(head, q, length) for head in range(HK)]
        turned = []
        for head in range(HK):
            if self.retrieved:
                pairs = zip(q[head * G : head * G + G], self.q[step - 1][head * G : head * G + G], strict=True)
                turned.append(sum(cosine(a, b) for a, b in pairs) / G < self.tau if 0 < self.tau < 1 else self.tau == 1)
        self.requested += SELECTED * HK
        counted = self.retrieved
        if self.retrieved:
            self.checked += HK
            self.layer_steps += any(turned)
        else:
            self.first += HK
            turned = [True] * HK
        out = []
        for head in range(HK):
            self.misses[head] += len(wanted[head] - self.held[head])
            self.corrected[head] += counted and turned[head]
            if turned[head]:
                self.exposed += len(wanted[head] - self.held[head])
                self.held[head] = wanted[head]
            first_recent = (self.pages(length) - WINDOW) * P
            tokens = [*range(SINK * P), *(t for page in self.held[head] for t in range(page * P, page * P + P))]
            out.append(self.attention(head, q, [*tokens, *range(first_recent, length)]))
        self.held, self.retrieved = wanted, True
        return out

    def attention(self, head, q, tokens):
        out = []
        for query in q[head * G : head * G + G]:
            weights = softmax(
                [sum(a * b for a, b in zip(query, self.k[head][t], strict=True)) / math.sqrt(D) for t in tokens]
            )
            out.append([sum(w * self.v[head][t][c] for w, t in zip(weights, tokens, strict=True)) for c in range(D)])
        return out


@pytest.fixture(params=[False, True], ids=["phase after phase", "in one loop"])
def in_one_loop(request, monkeypatch):
    """Whether correction, choice and page table are one loop, as for larger caches on a CPU."""
    if request.param:
        if _numba.numba is None:
            pytest.skip("numba is not there")
        monkeypatch.setattr(_numba, "LEAST", 1)
    taken = []
    monkeypatch.setattr(speculation, "speculate", lambda *given: taken.append(given) or speculate(*given))
    yield
    assert bool(taken) == request.param


@pytest.mark.parametrize("prompt", [75, 27])  # retrieving from the first step; growing out of the budget
@pytest.mark.parametrize("tau", [0.0, 0.8, 1.0])
@pytest.mark.usefixtures("in_one_loop")
def test_every_step_matches_the_oracle(prompt, tau):
    stream = Stream(prompt, steps=60, seed=prompt)
    oracle = Oracle(stream, tau)
    for step, method, out in stream.run("freekv", {**SETTINGS, "tau": tau}):
        expected = torch.tensor(oracle.step(step), dtype=torch.float64).reshape(H, D)
        assert torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-5), f"output of step {step}"
        if oracle.retrieved:
            resident = [set(pages) for pages in method.retrieval[1].resident.tolist()]
            assert resident == oracle.held, f"pages held after step {step}"
    counters = method.context.counters
    correction, cache = counters.correction(), counters.cache()
    assert correction.heads_checked == oracle.checked
    assert correction.heads_corrected == sum(oracle.corrected)
    assert correction.layer_steps_corrected == oracle.layer_steps
    assert correction.first_retrievals == oracle.first == HK
    assert cache.pages_requested == oracle.requested
    misses = sum(oracle.misses)
    assert cache.misses == misses
    assert cache.hits == oracle.requested - misses
    assert cache.bytes_to_device == misses * 2 * P * D * 4
    assert cache.bytes_exposed == oracle.exposed * 2 * P * D * 4
    of_heads = cache.layers[1].by_head
    assert (of_heads.misses, of_heads.heads_corrected) == (oracle.misses, oracle.corrected)
    assert of_heads.heads_checked == [oracle.checked // HK] * HK
    assert of_heads.pages_requested == [oracle.requested // HK] * HK
    assert cache.layers[0].by_head is None
    page_bytes = HK * 2 * P * D * 4
    assert cache.prefill_bytes_to_host == prompt // P * page_bytes
    assert cache.bytes_to_host == (prompt + stream.steps) // P * page_bytes
    if tau == 0.8:
        assert 0 < correction.heads_corrected < correction.heads_checked
    else:
        assert correction.heads_corrected == tau * correction.heads_checked


def test_tau_by_layer_is_that_of_each_layer():
    corrected = []
    for tau in (0.8, (0.0, 0.8), [0.3, 0.8, 0.5], (0.8, 1.0), (0.8, 0.0)):  # the first layer is dense
        method = [method for _, method, _ in Stream(75, steps=40).run("freekv", {**SETTINGS, "tau": tau})][-1]
        correction = method.context.counters.correction()
        corrected.append(correction.heads_corrected / correction.heads_checked)
    one, same, longer, always, never = corrected
    assert (always, never) == (1, 0)
    assert 0 < one < 1
    assert one == same == longer


def test_too_few_taus_are_refused():
    with pytest.raises(KvcliError, match="tau has 1 numbers for 2 layers"):
        next(iter(Stream(75, steps=1).run("freekv", {**SETTINGS, "tau": [0.8]})))


def test_no_speculation_selects_what_exact_retrieval_selects_at_every_step():
    stream = Stream(75, steps=60, seed=3)
    exact = Oracle(stream, 1.0)
    for step, method, _ in stream.run("freekv", {**SETTINGS, "tau": 1.0}):
        length = stream.prompt + step + 1
        for head, pages in enumerate(method.retrieval[1].resident.tolist()):
            assert set(pages) == exact.selection(head, exact.q[step], length)


def test_pages_are_distinct_and_neither_sink_nor_window():
    for _, method, _ in Stream(75, steps=60).run("freekv", SETTINGS):
        cache = method.retrieval[1]
        for pages in cache.resident.tolist():
            assert EMPTY not in pages
            assert len(set(pages)) == SELECTED
            assert all(page >= SINK for page in pages)


def test_unscaled_scores_and_poolings_are_accepted():
    for pooling in ("mean_s", "max_s", "mean_qk", "max_qk", "mean_q", "max_q"):
        settings = {**SETTINGS, "pooling": pooling, "score_scale": False, "correction_pooling": "max"}
        for _, _, out in Stream(75, steps=5).run("freekv", settings):
            assert out.isfinite().all()
