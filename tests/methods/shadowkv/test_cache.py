"""Low-rank keys, landmarks, values and the cache made of them, against the keys and values that went in."""

import pytest
import torch
from driver import storage_bytes

from kvcli.kernels.page_table import row_positions
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import Tiers
from kvcli.memory.host_pool import HostPagePool
from kvcli.memory.tiers import nbytes
from kvcli.methods.shadowkv import cache as shadow_cache
from kvcli.methods.shadowkv.cache import EMPTY, Landmarks, LowRankKeys, ShadowCache, ShadowLayout
from kvcli.models.geometry import LayerGeometry

HK, D, C = 2, 8, 3
WIDTH = HK * D
SOFTMAX = Softmax(D**-0.5)
CPU = Tiers.for_device(torch.device("cpu"), torch.float32)
META = Tiers.for_device(torch.device("meta"), torch.float32)
GEOMETRY = LayerGeometry(0, 2 * HK, HK, D, None, False)


def tokens(count, seed=0):
    return torch.randn(2, HK, count, D, generator=torch.Generator().manual_seed(seed)).unbind()


def side_by_side(k):
    return k.transpose(0, 1).flatten(1).double()  # [s, Hk * d]


def rebuilt(keys, count):
    """All tokens of the first chunks: [Hk, count * C, d]."""
    heads = torch.arange(HK).repeat_interleave(count)
    return keys.rebuild(heads, torch.arange(count).repeat(HK)).view(HK, count * C, D)


@pytest.mark.parametrize("piece", [1, 4, 512])
def test_stored_keys_are_the_projection_on_the_best_subspace(piece, monkeypatch):
    monkeypatch.setattr(shadow_cache, "PIECE", piece)
    k, _ = tokens(46)
    keys = LowRankKeys((HK, D), C, 20, 9, None, CPU)
    assert keys.error is None
    keys.fit(k, 12)
    factor = torch.linalg.svd(side_by_side(k), full_matrices=False)[2][:9]
    exact = side_by_side(k[:, : 12 * C])
    best = exact @ factor.T @ factor
    assert torch.allclose(side_by_side(rebuilt(keys, 12)), best, atol=1e-5)
    assert keys.error == pytest.approx(float((exact - best).norm() / exact.norm()), rel=1e-4)


def test_rank_is_never_more_than_the_keys_are_wide():
    k, _ = tokens(46)
    keys = LowRankKeys((HK, D), C, 20, 10**6, None, CPU)
    assert keys.rank == WIDTH
    keys.fit(k, 12)
    assert torch.allclose(rebuilt(keys, 12), k[:, : 12 * C], atol=1e-5)


def test_later_chunks_are_projected_by_the_same_factor_until_it_is_refreshed():
    k, _ = tokens(80)
    keys = LowRankKeys((HK, D), C, 26, 9, None, CPU, refreshable=True)
    keys.fit(k[:, :40], 11)  # 40 tokens in the factor, 33 of them stored
    for chunk in range(11, 26):
        keys.put(chunk, k[:, chunk * C : chunk * C + C])
    first = torch.linalg.svd(side_by_side(k[:, :40]), full_matrices=False)[2][:9]
    projected = side_by_side(k[:, : 26 * C]) @ first.T @ first
    assert torch.allclose(side_by_side(rebuilt(keys, 26)), projected, atol=1e-5)
    keys.refresh(26)
    second = torch.linalg.svd(side_by_side(k[:, : 26 * C]), full_matrices=False)[2][:9]
    assert torch.allclose(side_by_side(rebuilt(keys, 26)), projected @ second.T @ second, atol=1e-5)


@pytest.mark.parametrize("rank", range(1, 13))
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_a_refresh_carries_stored_keys_over_for_every_shape_of_the_factor(heads, rank):
    k = torch.randn(heads, 60, D, generator=torch.Generator().manual_seed(heads))
    keys = LowRankKeys((heads, D), C, 20, rank, None, CPU, refreshable=True)
    keys.fit(k[:, :30], 10)
    for chunk in range(10, 20):
        keys.put(chunk, k[:, chunk * C : chunk * C + C])
    exact = side_by_side(k)
    first = torch.linalg.svd(exact[:30], full_matrices=False)[2][:rank]
    second = torch.linalg.svd(exact, full_matrices=False)[2][:rank]
    keys.refresh(20)
    found = keys.rebuild(torch.arange(heads).repeat_interleave(20), torch.arange(20).repeat(heads)).view_as(k)
    assert torch.allclose(side_by_side(found), exact @ first.T @ first @ second.T @ second, atol=1e-4)


@pytest.mark.parametrize("piece", [1, 5, 512])
def test_landmarks_are_filled_in_pieces_and_outliers_are_left_out(piece, monkeypatch):
    monkeypatch.setattr(shadow_cache, "PIECE", piece)
    k, _ = tokens(12 * C, seed=1)
    chunks = k.unflatten(1, (-1, C))
    landmarks = Landmarks(HK, D, 12, CPU)
    fit = landmarks.fill(0, chunks[:, :11])
    assert torch.allclose(landmarks.means[:, :11], chunks[:, :11].mean(2), atol=1e-6)
    excluded = landmarks.exclude_worst(fit, 3)
    landmarks.fill(11, chunks[:, 11:])
    scores = landmarks.scores(torch.randn(2 * HK, D), 12, 1.0)
    for head in range(HK):
        left_out = {j for j in range(12) if scores[head, j] == -1}
        assert left_out == set(excluded[head].tolist()) == set(fit[head].topk(3, largest=False).indices.tolist())


def test_value_pool_returns_the_chunks_asked_for():
    _, v = tokens(7 * C)
    pool = HostPagePool(HK, D, C, 9, CPU, tensors=1)
    assert pool.write(1, v.unflatten(1, (-1, C))) == nbytes(v)
    pairs = [(1, 0), (7, 1), (4, 1), (4, 0)]
    chunks, heads = (torch.tensor(column) for column in zip(*pairs, strict=True))
    for found, (chunk, head) in zip(pool.fetch(chunks, heads), pairs, strict=True):
        assert torch.equal(found[0], v[head, (chunk - 1) * C : chunk * C])


def layout(**changes):
    return ShadowLayout(**{"size": C, "outliers": 2, "selected": 3, "local": 2, "rank": WIDTH, **changes})


def dense(q, k, v, held):
    """Attend to tokens `held` [Hk][..] of each head."""
    out = []
    for head in range(HK):
        keys, values = k[head, held[head]], v[head, held[head]]
        weights = (q.view(HK, -1, D)[head] @ keys.T * SOFTMAX.scale).softmax(-1)
        out.append(weights @ values)
    return torch.cat(out)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("rolling", [True, False])
@pytest.mark.parametrize("prompt", [1, 2, 3, 20, 23, 24, 26, 61])
def test_attends_to_what_it_should_hold(prompt, rolling, known):
    new = 40
    k, v = tokens(prompt + new, seed=prompt)
    sizes = layout(rolling=rolling, refresh=11 if rolling else None)
    cache = ShadowCache(GEOMETRY, prompt + new, prompt if known else None, sizes, None, CPU)
    for tensor in (cache.k, cache.v, cache.keys.a, cache.keys.b, cache.landmarks.means, *cache.values.pieces):
        tensor.fill_(float("nan"))  # nothing may be read that was not written
    written = cache.load(k[:, :prompt].clone(), v[:, :prompt].clone())
    for at in range(prompt, prompt + new):
        written += cache.append(k[:, at], v[:, at])
        held = [list(range(at + 1)) for _ in range(HK)]
        assert cache.active == ((at + 1 if rolling else prompt) // C > sizes.total)
        if cache.active:
            local = cache.num_chunks * C
            assert at + 1 - local >= 2 * C
            assert not rolling or at + 1 - local < 3 * C
            scores = cache.landmarks.scores(torch.randn(2 * HK, D), cache.num_chunks, 1.0)
            selected = scores.topk(3).indices
            cache.recall(selected)
            assert cache.recall(selected) == ([0, 0], 0)
            outliers = (scores == -1).nonzero()[:, 1].view(HK, 2)
            chunks = torch.cat((selected, outliers), 1)
            assert all(len(set(row)) == 5 for row in chunks.tolist())
            held = [[*(j * C + i for j in row for i in range(C)), *range(local, at + 1)] for row in chunks.tolist()]
        q = torch.randn(2 * HK, D, generator=torch.Generator().manual_seed(at))
        assert torch.allclose(cache.attend(q, SOFTMAX), dense(q, k, v, held), atol=1e-4)
    assert written == cache.num_chunks * HK * C * D * 4


@pytest.mark.parametrize("length", range(24, 37))
def test_over_slots_a_rolling_window_is_a_ring(length):
    """And what leaves it with the next token is there already, if the sequence can get that far."""
    k, v = tokens(length)
    caches = [ShadowCache(GEOMETRY, room, length, layout(rolling=True), None, CPU) for room in (length, length + 9)]
    for cache, leaves in zip(caches, (False, (length + 1) % C == 0), strict=True):
        cache.load(k.clone(), v.clone())
        away = cache.num_chunks
        slots = cache.as_slots()
        assert int(slots.tensors["chunks"]) == away + leaves
        assert int(slots.tensors["room"]) == len(cache.keys.a)
        ((positions,),) = row_positions(torch.tensor([length], dtype=torch.int32), slots.layout).tolist()
        local = {position: row for row, position in enumerate(positions) if row >= cache.layout.local_row}
        assert sorted({*local} - {-1}) == list(range(away * C, length))
        for position in range(away * C, length):
            assert torch.equal(slots.kv[0, :, local[position]], k[:, position])
            assert torch.equal(slots.kv[1, :, local[position]], v[:, position])
        if leaves:
            oldest = slice(away * C, away * C + C)
            assert torch.allclose(cache.landmarks.means[:, away], k[:, oldest].mean(1), atol=1e-6)
            assert torch.equal(torch.cat(list(cache.values.pieces))[away, :, 0], v[:, oldest])


@pytest.mark.parametrize(
    ("prompt", "capacity", "keeps"), [(5, 23, True), (5, 24, False), (23, 24, False), (24, 40, True)]
)
def test_only_a_context_that_is_divided_on_the_way_changes_its_form(prompt, capacity, keeps):
    k, v = tokens(prompt)
    for known in (prompt, None):
        cache = ShadowCache(GEOMETRY, capacity, known, layout(rolling=True), None, CPU)
        cache.load(k, v)
        assert cache.keeps_form == keeps
    assert ShadowCache(GEOMETRY, capacity, prompt, layout(rolling=True), None, META).keeps_form == keeps
    assert ShadowCache(GEOMETRY, capacity, prompt, layout(), None, META).keeps_form


def test_recall_counts_what_is_missing_and_moves_values_only():
    k, v = tokens(61)
    cache = ShadowCache(GEOMETRY, 70, 61, layout(outliers=0), None, CPU)
    cache.load(k, v)
    assert cache.resident.tolist() == [[EMPTY] * 3] * HK
    chunk = C * D * 4
    assert cache.recall(torch.tensor([[0, 4, 9], [1, 2, 3]])) == ([3, 3], 6 * chunk)
    assert cache.recall(torch.tensor([[9, 4, 0], [3, 7, 2]])) == ([0, 1], chunk)
    assert [sorted(row) for row in cache.resident.tolist()] == [[0, 4, 9], [2, 3, 7]]


@pytest.mark.parametrize("prompt", [None, 1, 20, 24, 90])
@pytest.mark.parametrize("rolling", [True, False])
def test_footprint_counts_what_is_allocated_even_on_meta(prompt, rolling):
    sizes = layout(rolling=rolling, refresh=5 if rolling else None)
    cache = ShadowCache(GEOMETRY, 100, prompt, sizes, None, CPU)
    found = cache.footprint()
    assert found == ShadowCache(GEOMETRY, 100, prompt, sizes, None, META).footprint()
    parts = (cache, cache.keys, cache.landmarks)
    tensors = (tensor for part in parts for tensor in vars(part).values() if isinstance(tensor, torch.Tensor))
    assert found.device == storage_bytes(tensors)
    assert found.host == nbytes(*cache.values.pieces)
