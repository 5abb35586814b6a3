"""ShadowKV against a slow re-derivation from the paper, in float64 and plain loops, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, SOFTMAX, D, H, Stream, layers
from engine import new_method, run
from families import HEAD_DIM, HEADS, KV_HEADS, tiny_model
from rope_models import CONFIGS, model_of

from kvcli.capacity import memory
from kvcli.errors import KvcliError
from kvcli.inputs.profiles import resolve_profile
from kvcli.kernels import _numba
from kvcli.kv.paged import OffloadedPageCache
from kvcli.kv.pages import PageBudget
from kvcli.methods.shadowkv.cache import EMPTY, ShadowLayout
from kvcli.models.geometry import geometry_of
from kvcli.telemetry.counters import Count

C, SELECTED, OUTLIERS, LOCAL, RANK = 3, 4, 2, 2, 11  # chunks of 3 tokens; keys are HK * D = 32 wide
SETTINGS = {"budget": C * SELECTED + 1, "chunk": C, "outliers": OUTLIERS, "local": LOCAL, "rank": RANK}
TOTAL = SELECTED + OUTLIERS + LOCAL
G = H // HK
STEPS = 60
THETA = 1000.0


class Turn:
    """Rotary positions as in the original paper: channel c is paired with channel c + D/2."""

    attention_scaling = 1.0

    def rotate(self, x, positions):
        return self._turn(x.float(), positions, 1)

    def unrotate(self, x, positions):
        return self._turn(x.float(), positions, -1)

    def _turn(self, x, positions, sign):
        angles = sign * positions[:, None].double() * THETA ** (-2 * torch.arange(D // 2).double() / D)  # [n, D/2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def turn(key, position, sign):
    out = [0.0] * D
    for c in range(D // 2):
        angle = sign * position * THETA ** (-2 * c / D)
        a, b = key[c], key[c + D // 2]
        out[c] = a * math.cos(angle) - b * math.sin(angle)
        out[c + D // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def cosine(a, b):
    return dot(a, b) / math.sqrt(dot(a, a)) / math.sqrt(dot(b, b))


def mean(keys):
    return [sum(column) / len(keys) for column in zip(*keys, strict=True)]


def softmax(values):
    exps = [math.exp(value - max(values)) for value in values]
    return [value / sum(exps) for value in exps]


class Oracle:
    """One layer, step after step: what each KV head attends to, with which keys, and what that cost."""

    def __init__(self, stream, rotates, rank=RANK, plus=False, refresh=0):
        self.k, self.v = stream.k.double().tolist(), stream.v.double().tolist()
        self.q = [q.double().tolist() for q in stream.q]
        self.rotates, self.rank, self.plus, self.refresh = rotates, rank, plus, refresh
        self.prompt, self.chunks, self.divided_at = stream.prompt, 0, 0
        self.coordinates = {}  # token -> its r numbers
        self.held = [set() for _ in range(HK)]
        self.misses = self.requested = self.put_away = 0
        if self.prompt // C > TOTAL:
            self.divide(self.prompt)

    def plain(self, token):
        """The token's keys without rotation, heads side by side."""
        keys = (turn(self.k[h][token], token, -1) if self.rotates else self.k[h][token] for h in range(HK))
        return [x for key in keys for x in key]

    def factorise(self, tokens):
        matrix = torch.tensor([self.plain(token) for token in range(tokens)], dtype=torch.float64)
        self.factor = torch.linalg.svd(matrix, full_matrices=False)[2][: self.rank].tolist()  # [r][Hk * d]

    def divide(self, length):
        self.divided_at = length
        self.factorise(length)
        while length // C - self.chunks > LOCAL:
            self.leave()
        self.put_away = 0
        self.outliers = []
        for h in range(HK):
            fits = [
                min(cosine(self.landmark(h, j), self.k[h][t]) for t in range(j * C, j * C + C))
                for j in range(self.chunks)
            ]
            self.outliers.append(set(sorted(range(self.chunks), key=lambda j: (fits[j], j))[:OUTLIERS]))

    def leave(self):
        for token in range(self.chunks * C, self.chunks * C + C):
            self.coordinates[token] = [dot(row, self.plain(token)) for row in self.factor]
        self.chunks += 1
        self.put_away += 1

    def carry_over(self):
        old = self.factor
        self.factorise(max(self.divided_at, self.chunks * C))
        for token, numbers in self.coordinates.items():
            approximate = [dot(numbers, column) for column in zip(*old, strict=True)]
            self.coordinates[token] = [dot(row, approximate) for row in self.factor]

    def landmark(self, h, j):
        return mean(self.k[h][j * C : j * C + C])

    def rebuilt(self, h, token):
        key = [dot(self.coordinates[token], column) for column in zip(*self.factor, strict=True)][h * D : h * D + D]
        return turn(key, token, 1) if self.rotates else key

    def selection(self, h, q):
        candidates = [j for j in range(self.chunks) if j not in self.outliers[h]]
        best = [0.0] * len(candidates)
        for query in q[h * G : h * G + G]:
            weights = softmax([dot(query, self.landmark(h, j)) / math.sqrt(D) for j in candidates])
            best = [max(pair) for pair in zip(best, weights, strict=True)]
        order = sorted(range(len(candidates)), key=lambda i: (-best[i], i))
        return {candidates[i] for i in order[:SELECTED]}

    def step(self, step):
        length, q = self.prompt + step + 1, self.q[step]
        if self.plus:
            if not self.chunks and length // C > TOTAL:
                self.divide(length)
            elif self.chunks:
                if length // C - self.chunks > LOCAL:
                    self.leave()
                if self.refresh and (length - self.divided_at) % self.refresh == 0:
                    self.carry_over()
        out = []
        for h in range(HK):
            if not self.chunks:
                pairs = [(self.k[h][t], self.v[h][t]) for t in range(length)]
            else:
                wanted = self.selection(h, q)
                self.requested += SELECTED
                self.misses += len(wanted - self.held[h])
                self.held[h] = wanted
                exact = [t for j in self.outliers[h] for t in range(j * C, j * C + C)]
                exact += range(self.chunks * C, length)
                pairs = [(self.k[h][t], self.v[h][t]) for t in exact]
                pairs += [(self.rebuilt(h, t), self.v[h][t]) for j in wanted for t in range(j * C, j * C + C)]
            for query in q[h * G : h * G + G]:
                weights = softmax([dot(query, key) / math.sqrt(D) for key, _ in pairs])
                out.append([sum(w * v[c] for w, (_, v) in zip(weights, pairs, strict=True)) for c in range(D)])
        return out


def steps(stream, settings=SETTINGS, rotates=True, dtype=torch.float32, known=True):
    """Feed a stream to one layer; yields (step, method, output [H, d])."""
    rotary = [Turn() if rotates else None] * 2
    prompt = stream.prompt
    capacity = prompt + stream.steps
    method = new_method(
        "shadowkv", settings, layers(), capacity, dtype, rotary, prompt_tokens=prompt if known else None
    )
    for cache in method.caches:  # nothing may be read that was not written
        for tensor in (cache.k, cache.v, cache.keys.a, cache.keys.b, cache.landmarks.means, *cache.values.pieces):
            tensor.fill_(float("nan"))
    k, v = stream.k.to(dtype), stream.v.to(dtype)
    method.prefill(1, k[:, :prompt].clone(), v[:, :prompt].clone(), k[:, :0], SOFTMAX)
    for step in range(stream.steps):
        method.context.counters.next_step()
        yield (
            step,
            method,
            method.attend(1, stream.q[step].to(dtype), k[:, prompt + step], v[:, prompt + step], SOFTMAX),
        )


PLUS = {"plus": True}
REFRESH = {"plus": True, "svd_refresh": 17}


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("prompt", [75, 29, 25])  # far above what is kept exact, just divided, growing out of it
@pytest.mark.parametrize("variant", [{}, PLUS, REFRESH], ids=["plain", "plus", "refresh"])
def test_every_step_matches_the_oracle(prompt, variant, rotates):
    stream = Stream(prompt, steps=STEPS, seed=prompt)
    oracle = Oracle(stream, rotates, plus="plus" in variant, refresh=variant.get("svd_refresh", 0))
    known = prompt != 29  # whether the prompt's length is known beforehand changes sizes, never results
    for step, method, out in steps(stream, {**SETTINGS, **variant}, rotates, known=known):
        expected = torch.tensor(oracle.step(step), dtype=torch.float64)
        assert torch.allclose(out.double(), expected, rtol=2e-4, atol=2e-5), f"output of step {step}"
        cache = method.retrieval[1]
        assert cache.num_chunks == oracle.chunks
        if oracle.chunks:
            assert [set(chunks) for chunks in cache.resident.tolist()] == oracle.held, f"chunks after step {step}"
    found = method.context.counters.cache()
    assert found.pages_requested == oracle.requested
    assert found.misses == oracle.misses
    assert (found.misses > 0) == bool(variant or prompt > 26)
    assert found.hits == oracle.requested - oracle.misses
    chunk_bytes = C * D * 4  # values only
    assert found.bytes_to_device == oracle.misses * chunk_bytes
    assert found.bytes_to_host == oracle.chunks * HK * chunk_bytes
    if prompt > 26:
        assert found.bytes_to_host - found.prefill_bytes_to_host == oracle.put_away * HK * chunk_bytes


@pytest.mark.parametrize("variant", [{}, REFRESH], ids=["plain", "refresh"])
def test_full_rank_is_exact_retrieval(variant):
    stream = Stream(75, steps=60, seed=5)
    exact = Oracle(stream, True, rank=HK * D, plus=bool(variant))
    exact.rebuilt = lambda h, token: exact.k[h][token]
    for step, method, out in steps(stream, {**SETTINGS, **variant, "rank": 1000}):
        expected = torch.tensor(exact.step(step), dtype=torch.float64)
        assert torch.allclose(out.double(), expected, rtol=2e-4, atol=2e-5), f"output of step {step}"
        assert method.statistics()["rank"] == HK * D
        assert method.statistics()["key_error"] < 1e-5


def test_sequences_served_in_turns_do_not_disturb_each_other():
    streams = [Stream(75, 40, seed=1), Stream(58, 40, seed=2)]
    oracles = [Oracle(stream, True) for stream in streams]
    for pair in zip(*(steps(stream) for stream in streams), strict=True):
        for oracle, (step, _, out) in zip(oracles, pair, strict=True):
            expected = torch.tensor(oracle.step(step), dtype=torch.float64)
            assert torch.allclose(out.double(), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("variant", [{}, PLUS], ids=["plain", "plus"])
def test_a_budget_above_the_context_attends_to_exactly_everything(variant):
    stream = Stream(75, steps=40, seed=6)
    exact = Oracle(stream, True)
    exact.chunks = 0  # never divided
    for step, method, out in steps(stream, {**SETTINGS, **variant, "budget": 4096, "rank": 1}):
        expected = torch.tensor(exact.step(step), dtype=torch.float64)
        assert torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-5)
        assert method.statistics() == {}
        assert method.footprint().host == 0


def test_half_the_bytes_of_recalling_keys_and_values_at_equal_selection():
    stream = Stream(75, steps=60, seed=7)
    both = OffloadedPageCache(HK, D, 140, PageBudget(size=C, sink=0, window=LOCAL, selected=SELECTED), method_tiers())
    both.load(stream.k[:, :75].clone(), stream.v[:, :75].clone())
    moved = misses = 0
    for _, method, _ in steps(stream):
        more, size = both.recall(method.retrieval[1].resident)
        moved, misses = moved + size, misses + sum(more)
    cache = method.context.counters.cache()
    assert cache.misses == misses > 0
    assert cache.bytes_to_device * 2 == moved


def method_tiers():
    return new_method("shadowkv", SETTINGS, layers(), 10).context.tiers


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 6e-3)])
@pytest.mark.parametrize("variant", [{}, REFRESH], ids=["plain", "refresh"])
def test_half_precision_is_close_to_the_oracle_of_the_same_selection(variant, dtype, tolerance):
    stream = Stream(75, steps=40, seed=8)
    stream.k, stream.v = stream.k.to(dtype).float(), stream.v.to(dtype).float()
    oracle = Oracle(stream, True, rank=HK * D, plus=bool(variant))
    chosen = []
    oracle.selection = lambda h, q: chosen[h]
    for step, method, out in steps(stream, {**SETTINGS, **variant, "rank": 1000}, dtype=dtype):
        assert out.dtype == dtype
        chosen = [set(row) for row in method.retrieval[1].resident.tolist()]
        expected = torch.tensor(oracle.step(step), dtype=torch.float64)
        error = (out.double() - expected).norm() / expected.norm()
        assert error < tolerance, f"output of step {step}"


ROPES = [
    "llama",
    "llama3",
    "yarn",
    "longrope",
    "dynamic",
    "gpt_oss_yarn",
    "phi",
    "stablelm",
    "glm",
    "cohere",
    "smollm3",
]


@pytest.mark.parametrize("name", ROPES)
def test_keys_of_every_kind_of_rotation_are_rebuilt(name, monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", 1)
    assert name in CONFIGS
    model = model_of(name)
    ids = torch.randint(3, 290, (77,), generator=torch.Generator().manual_seed(0)).tolist()
    (full,) = run(model, "full", {}, [ids], 2)
    (sequence,) = run(model, "shadowkv", {**SETTINGS, "rank": 1000}, [ids], 2)
    assert sequence.method.retrieval
    for layer, cache in sequence.method.retrieval.items():
        exact = full.method.caches[layer].k[:, : cache.num_chunks * C].unflatten(1, (-1, C))
        heads = torch.arange(exact.shape[0]).repeat_interleave(cache.num_chunks)
        rebuilt = cache.keys.rebuild(heads, torch.arange(cache.num_chunks).repeat(exact.shape[0]))
        assert torch.allclose(rebuilt.view_as(exact), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
        assert cache.keys.error < 1e-5
        held = cache.k[:, OUTLIERS * C : cache.layout.local_row].unflatten(1, (-1, C))
        chosen = exact[torch.arange(len(held))[:, None], cache.resident]
        assert torch.allclose(held, chosen, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


def test_error_is_that_of_the_best_approximation_and_is_reported():
    stream = Stream(90, steps=3, seed=9)
    oracle = Oracle(stream, True)
    *_, (_, method, _) = steps(stream, rotates=True)
    matrix = torch.tensor([oracle.plain(token) for token in range(90)], dtype=torch.float64)
    factor = torch.tensor(oracle.factor, dtype=torch.float64)
    stored = matrix[: oracle.chunks * C]
    error = float((stored - stored @ factor.T @ factor).norm() / stored.norm())
    statistics = method.statistics()
    assert statistics["key_error"] == pytest.approx(error, rel=1e-3)
    assert statistics["layers"] == [{"layer": 1, "key_error": pytest.approx(error, rel=1e-3)}]
    assert statistics["rank"] == RANK
    cache = method.context.counters.cache()
    assert statistics["hit_rate"] == cache.hits / cache.pages_requested
    width = HK * D
    kept = 90 * width // C + 2 * (SELECTED + OUTLIERS) * C * width + 90 * RANK + RANK * width
    assert statistics["bytes_saved"] == 4 * (2 * 90 * width - kept)
    assert statistics["memory_saving"] == pytest.approx(2 * 90 * width / kept)


def test_memory_saving_of_the_papers_example_with_the_factor_it_lacks():
    layout = ShadowLayout(size=8, outliers=48, selected=256, local=4, rank=160)
    tokens, width = 128 * 1024, 1024
    assert 2 * tokens * width / layout.elements(tokens, width, 160) == pytest.approx(6.26, abs=0.005)


@pytest.mark.parametrize("variant", [{}, PLUS, REFRESH], ids=["plain", "plus", "refresh"])
@pytest.mark.parametrize(("prompt", "new"), [(200, 30), (20, 9), (20, 150), (1, 1)])
def test_footprint_is_known_beforehand_and_small(prompt, new, variant):
    model = tiny_model("llama")
    settings = {**SETTINGS, **variant}
    profile = resolve_profile(method="shadowkv", overrides=settings)
    geometry = geometry_of(model.config, model.dtype)
    planned = memory.kv_footprint(profile, geometry, prompt + new, model.dtype, prompt)
    held = new_method("shadowkv", settings, geometry.layers, prompt + new, prompt_tokens=prompt).footprint()
    assert planned == held
    chunks, token = 0, KV_HEADS * HEAD_DIM * 4
    longest = prompt + new if variant else prompt
    if longest // C > TOTAL:
        chunks = longest // C - LOCAL
    assert held.host == len(geometry.layers) * chunks * C * token
    if prompt == 200:
        exact = (TOTAL + 1) * C + (0 if variant else new)  # tokens whose keys and values are on the device
        landmarks, factors = chunks * (token + KV_HEADS), 4 * RANK * (chunks * C + KV_HEADS * HEAD_DIM)
        gram = 4 * (KV_HEADS * HEAD_DIM) ** 2 if "svd_refresh" in variant else 0
        table = 8 * KV_HEADS * SELECTED
        layer = 2 * exact * token + landmarks + factors + gram + table + 8
        assert held.device == len(geometry.layers) * layer
    assert HEADS // KV_HEADS > 1


def test_forks_go_on_alike():
    stream = Stream(75, steps=30, seed=10)
    method = next(method for step, method, _ in steps(stream, {**SETTINGS, **REFRESH}) if step == 9)
    fork = method.fork(method.context.counters, "fork")
    for step in range(10, 30):  # over a refresh
        q, k, v = stream.q[step], stream.k[:, 75 + step], stream.v[:, 75 + step]
        assert torch.equal(method.attend(1, q, k, v, SOFTMAX), fork.attend(1, q, k, v, SOFTMAX))
    assert EMPTY not in method.retrieval[1].resident


def test_what_makes_no_sense_is_refused():
    for settings, word in (({"budget": 7}, "budget 7"), ({"svd_refresh": 9}, "plus"), ({"rank": 0}, "rank")):
        with pytest.raises(KvcliError, match=word):
            resolve_profile(method="shadowkv", overrides=settings)


def test_profiles_hold_the_papers_settings():
    for name, plus in (("shadowkv", False), ("shadowkv-plus", True)):
        profile = resolve_profile(profile=name)
        layout = profile.settings.layout
        assert (layout.size, layout.selected, layout.outliers, layout.local, layout.rank) == (8, 256, 48, 4, 160)
        assert (layout.rolling, layout.refresh, profile.settings.leading_dense_layers) == (plus, None, 0)


def test_counts_nothing_while_everything_is_exact():
    *_, (_, method, _) = steps(Stream(20, steps=30, seed=11))
    counts = method.context.counters
    assert sum(row[1][Count.PAGES_REQUESTED] for row in counts.counts) == 0
    assert counts.cache().bytes_to_host == 0


def test_fp8_rounds_keys_and_values_as_they_come():
    settings = {"budget": 16, "chunk": 4, "outliers": 1, "local": 1, "rank": 12}
    given, rounded = Stream(75, 20, seed=3), Stream(75, 20, seed=3)
    rounded.k, rounded.v = (x.to(torch.float8_e5m2).float() for x in (rounded.k, rounded.v))
    pairs = zip(given.run("shadowkv", {**settings, "fp8": True}), rounded.run("shadowkv", settings), strict=True)
    for (_, _, found), (_, _, expected) in pairs:
        assert torch.equal(found, expected)
