"""Hash codes and what they sample, against counts over many draws and plain loops."""

import math

import pytest
import torch

from kvcli.kernels import _numba
from kvcli.kernels.attention_rows import TokenSet
from kvcli.kernels.counted_attention import attend_sets, counted_attention
from kvcli.kernels.lsh import colliding, directions, hash_codes, log_counts, sampling_chance
from kvcli.kernels.slot_layout import EMPTY
from kvcli.kernels.softmax import Softmax

CPU = torch.device("cpu")


@pytest.mark.parametrize(("bits", "tables"), [(3, 6), (5, 30)])
def test_the_chance_is_how_often_two_tables_agree(bits, tables):
    draws, d = 3000, 4
    x = torch.randn(2, 5, d, generator=torch.Generator().manual_seed(0))
    codes = hash_codes(x, directions(d, draws * tables * bits, 1, CPU), bits).unflatten(-1, (draws, tables))
    often = ((codes[0] == codes[1]).sum(-1) >= 2).double().mean(-1)
    chance = sampling_chance(torch.cosine_similarity(x[0], x[1], dim=-1), bits, tables)
    assert torch.allclose(often, chance, atol=5 * 0.5 / math.sqrt(draws))
    assert chance.min() < 0.2 < 0.8 < chance.max()


def test_the_chance_is_exact_where_it_is_small_and_where_it_is_sure():
    chance = sampling_chance(torch.tensor([-0.99, 0.0, 1.0]), 10, 150)
    p = 1 - math.acos(torch.tensor(-0.99).item()) / math.pi
    small = sum(math.comb(150, j) * p ** (10 * j) * (1 - p**10) ** (150 - j) for j in range(2, 5))
    assert chance[0] == pytest.approx(small, rel=1e-6)
    assert chance[1] == pytest.approx(1 - (1 - 2**-10) ** 150 - 150 * 2**-10 * (1 - 2**-10) ** 149)
    assert chance[2] == 1


@pytest.mark.parametrize("least", [1, 1 << 40])  # by the loop, and by torch
def test_keys_collide_that_share_two_codes(least, monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", least)
    monkeypatch.setattr("kvcli.kernels.lsh.AT_ONCE", 100)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(0, 4, (2, n, 7), dtype=torch.int16, generator=generator) for n in (3, 50))
    tokens, own = colliding(q, k[:, 3:40])
    expected = [[[int((a == b).sum()) >= 2 for b in k[h, 3:40]] for a in q[h]] for h in range(2)]
    for h, of_head in enumerate(expected):
        by_key = list(zip(*of_head, strict=True))
        wanted = [j for j, marks in enumerate(by_key) if any(marks)]
        assert tokens[h].tolist() == wanted + [EMPTY] * (tokens.shape[1] - len(wanted))
        assert own[h, :, : len(wanted)].T.tolist() == [list(by_key[j]) for j in wanted]
        assert not own[h, :, len(wanted) :].any()
    assert (tokens[0] == EMPTY).sum() != (tokens[1] == EMPTY).sum()


@pytest.mark.parametrize("least", [1, 1 << 40])  # by the loop, and by torch
@pytest.mark.parametrize(("heads", "group", "m", "d"), [(1, 1, 1, 1), (2, 3, 131, 7), (3, 2, 64, 64)])
def test_counts_by_angle_in_fp64(heads, group, m, d, least, monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", least)
    generator = torch.Generator().manual_seed(m)
    q, k, centre = (torch.randn(heads, *shape, generator=generator) for shape in ((group, d), (m, d), (d,)))
    k[0, 0] = centre[0] + 2 * q[0, 0]  # surely sampled
    own = torch.rand(heads, group, m, generator=generator) < 0.6
    own[0, 0, 0] = True
    found = log_counts(q, k, centre, own, 4, 9, 1e-2)
    cosine = torch.cosine_similarity(q.double()[:, :, None], (k.double() - centre[:, None].double())[:, None], dim=-1)
    expected = -sampling_chance(cosine, 4, 9).clamp_min(1e-2).log()
    torch.testing.assert_close(found[own].double(), expected[own], rtol=1e-4, atol=1e-4)
    assert (found[~own] == -math.inf).all()
    order = torch.stack([torch.randperm(3 * m, generator=generator)[:m] for _ in range(heads)])
    held = torch.full((3 * m, heads, 2, d), math.nan).movedim(0, 1)[:, :, 0]  # [Hk, 3 m, d], other numbers between
    held.scatter_(1, order[..., None].expand(-1, -1, d), k)
    assert torch.equal(log_counts(q, held, centre, own, 4, 9, 1e-2, order), found)
    assert math.isnan(log_counts(q * math.nan, k, centre, own, 4, 9, 1e-2)[0, 0, 0])
    k[0, 0, 0] = math.inf  # whose cosine is no number, although its product may be one
    assert math.isnan(log_counts(q, k, centre, own, 4, 9, 1e-2)[0, 0, 0])


@pytest.mark.parametrize("least", [1, 1 << 40])
def test_nothing_collides(least, monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", least)
    tokens, own = colliding(torch.zeros(2, 3, 7, dtype=torch.int16), torch.ones(2, 50, 7, dtype=torch.int16))
    assert (tokens.shape, own.shape) == ((2, 0), (2, 3, 0))


@pytest.mark.parametrize("least", [1, 1 << 40])
def test_a_key_that_counts_three_times_is_three_keys(least, monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", least)
    q, k, v = (torch.randn(2, n, 8) for n in (3, 5, 5))
    counts = torch.tensor([3, 1, 0, 2, 1]).expand(2, 3, -1)
    softmax = Softmax(0.5, softcap=2.0)
    out, lse = counted_attention(TokenSet(q, k, v, log_counts=counts.log()), softmax)
    rows = [0, 0, 0, 1, 3, 3, 4]
    scores = softmax.scores(q @ k[:, rows].mT)
    assert torch.allclose(out, scores.softmax(-1) @ v[:, rows], atol=1e-6)
    assert torch.allclose(lse, scores.logsumexp(-1))
    nothing = TokenSet(q, k, v, log_counts=torch.full((2, 3, 5), -torch.inf))
    assert not counted_attention(nothing, softmax)[0].any()
    alone = attend_sets(q.flatten(0, 1), [TokenSet(q, k, v), nothing], softmax)
    assert torch.allclose(alone.view(2, 3, -1), softmax.scores(q @ k.mT).softmax(-1) @ v, atol=1e-6)
