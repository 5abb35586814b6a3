"""Hash codes and what they sample, against counts over many draws and plain loops."""

import math

import pytest
import torch
import torch.nn.functional as F

from kvcli.kernels import _numba
from kvcli.kernels.decode_attention import TokenSet, attend_sets, counted_attention
from kvcli.kernels.page_table import EMPTY
from kvcli.kernels.softmax import Softmax
from kvcli.methods.magicpig.kernels import (
    BLOCK,
    TABLES,
    colliding,
    directions,
    key_codes,
    lay,
    log_counts,
    query_codes,
    sampling_chance,
)

CPU = torch.device("cpu")


def blocks_of(keys, drawn):
    """Codes of keys [Hk, n, d] in blocks; where no key is, anything may stand."""
    codes = key_codes(keys, drawn)
    blocks = torch.randint(0, 256, (len(keys), -(-keys.shape[1] // BLOCK), *codes.shape[2:], BLOCK)).to(torch.uint8)
    lay(codes, blocks, 0)
    return blocks


def hashes(x, drawn, tables):
    """The hash in each table, one sign after the other: [.., L]."""
    by_table = drawn.mT.flatten(1, 2)[:, :tables]  # [d, L, K]
    signs = (torch.einsum("hnd,dtb->hntb", x.double(), by_table.double()) > 0).tolist()
    return [[[tuple(table) for table in vector] for vector in head] for head in signs]


@pytest.mark.parametrize(("bits", "tables"), [(3, 6), (5, 30)])
def test_the_chance_is_how_often_two_tables_agree(bits, tables):
    draws, d = 3000, 4
    q, k = torch.randn(2, 1, 5, d, generator=torch.Generator().manual_seed(0))
    often = torch.zeros(5, dtype=torch.float64)
    for seed in range(draws):
        drawn = directions(d, tables, bits, seed, CPU)
        tokens, own = colliding(query_codes(q, drawn, tables), blocks_of(k, drawn), 5)
        for j, by_query in zip(tokens[0].tolist(), own[0].T, strict=True):
            often[j] += by_query[j]
    chance = sampling_chance(torch.cosine_similarity(q[0], k[0], dim=-1), bits, tables)
    assert torch.allclose(often / draws, chance, atol=5 * 0.5 / math.sqrt(draws))
    assert chance.min() < 0.2 < 0.8 < chance.max()


def test_the_chance_is_exact_where_it_is_small_and_where_it_is_sure():
    chance = sampling_chance(torch.tensor([-0.99, 0.0, 1.0]), 10, 150)
    p = 1 - math.acos(torch.tensor(-0.99).item()) / math.pi
    small = sum(math.comb(150, j) * p ** (10 * j) * (1 - p**10) ** (150 - j) for j in range(2, 5))
    assert chance[0] == pytest.approx(small, rel=1e-6)
    assert chance[1] == pytest.approx(1 - (1 - 2**-10) ** 150 - 150 * 2**-10 * (1 - 2**-10) ** 149)
    assert chance[2] == 1


@pytest.mark.parametrize("least", [1, 1 << 40])  # by the loop, and by torch
@pytest.mark.parametrize(
    ("bits", "tables", "n", "group"),
    [(2, 7, 37, 3), (3, 8, 64, 1), (4, 20, 65, 2), (1, 2, 1, 1), (9, 150, 260, 2), (15, 33, 130, 8)],
)
def test_keys_collide_that_share_two_codes(bits, tables, n, group, least, monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", least)
    monkeypatch.setattr("kvcli.methods.magicpig.kernels.AT_ONCE", 100)
    generator = torch.Generator().manual_seed(n)
    q, k = (torch.randn(2, m, 5, generator=generator) for m in (group, n))
    k[:, ::3] += 2 * q[:, :1]  # some that are near a query
    drawn = directions(5, tables, bits, 0, CPU)
    blocks = torch.cat([blocks_of(each, drawn) for each in (torch.randn(2, BLOCK, 5), k)], 1)
    tokens, own = colliding(query_codes(q, drawn, tables), blocks[:, 1:], n, 10)
    of_queries, of_keys = hashes(q, drawn, tables), hashes(k, drawn, tables)
    for h in range(2):
        marks = [[sum(map(tuple.__eq__, x, y)) >= 2 for x in of_queries[h]] for y in of_keys[h]]  # [n, G]
        wanted = [j for j in range(n) if any(marks[j])]
        assert tokens[h].tolist() == [10 + j for j in wanted] + [EMPTY] * (tokens.shape[1] - len(wanted))
        assert own[h, :, : len(wanted)].T.tolist() == [marks[j] for j in wanted]
        assert not own[h, :, len(wanted) :].any()
    assert n == 1 or 0 < (tokens != EMPTY).sum() < 2 * n
    assert n == 1 or (tokens[0] == EMPTY).sum() != (tokens[1] == EMPTY).sum()


def test_tables_count_alike_wherever_their_bits_lie():
    """Tables 1 and 9 have the same bit of two bytes, tables 1 and 2 bits of one; a table alone is no two."""
    drawn = F.pad(torch.eye(10), (0, 6)).view(10, 2, 1, 8)  # a table for each channel, of one bit
    key = blocks_of(torch.ones(1, 1, 10), drawn)
    for shared, found in (((1, 9), True), ((1, 2), True), ((9,), False), ((), False), ((0, 9), True)):
        query = -torch.ones(1, 1, 10)
        query[..., list(shared)] = 1
        tokens, own = colliding(query_codes(query, drawn, 10), key, 1)
        assert own.any() == found == (tokens.numel() > 0)


@pytest.mark.parametrize("first", [0, 1, 63, 64, 100])
def test_codes_lie_in_their_places(first):
    """Poisoned where nothing was put."""
    codes = torch.arange(2 * 70 * 6, dtype=torch.int32).view(2, 70, 2, 3).to(torch.uint8)
    blocks = torch.full((2, 4, 2, 3, BLOCK), 99, dtype=torch.uint8)
    lay(codes, blocks, first)
    in_a_row = blocks.movedim(-1, 2).flatten(1, 2)  # [Hk, n, W, K]
    assert torch.equal(in_a_row[:, first : first + 70], codes)
    assert (in_a_row[:, :first] == 99).all()
    assert (in_a_row[:, first + 70 :] == 99).all()


@pytest.mark.parametrize("least", [1, 1 << 40])  # by the loop, and by torch
@pytest.mark.parametrize("tables", [10, 16])
def test_a_byte_has_a_bit_of_eight_tables(tables, least, monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", least)
    x, drawn = torch.randn(2, 3, 4), directions(4, tables, 3, 0, CPU)
    ours, theirs = key_codes(x, drawn), query_codes(x, drawn, tables)
    assert ours.shape == (2, 3, 2, 3)
    for h, head in enumerate(hashes(x, drawn, tables)):
        for j, vector in enumerate(head):
            for table, signs in enumerate(vector):
                for codes in (ours, theirs):
                    assert [c >> table % TABLES & 1 for c in codes[h, j, table // TABLES].tolist()] == list(signs)
    if tables == 10:  # what fills up the last byte differs in all bits
        assert not (ours[..., 1, :] >> 2).any()
        assert (theirs[..., 1, :] >> 2 == 63).all()


def test_directions_are_drawn_once_for_all():
    """Of whatever form: table after table, bit after bit."""
    drawn = directions(4, 10, 3, 7, CPU)
    plain = torch.randn(4, 30, generator=torch.Generator().manual_seed(7)).view(4, 10, 3)
    assert torch.equal(drawn.mT.flatten(1, 2)[:, :10], plain)
    assert not drawn.mT.flatten(1, 2)[:, 10:].any()
    assert directions(4, 10, 3, 7, CPU) is drawn


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
    drawn, x = directions(4, 7, 3, 0, CPU), torch.randn(2, 1, 4)
    q, k = x.expand(-1, 3, -1), -x.expand(-1, 50, -1)
    tokens, own = colliding(query_codes(q, drawn, 7), blocks_of(k, drawn), 50)
    assert (tokens.shape, own.shape) == ((2, 0), (2, 3, 0))


@pytest.mark.parametrize("least", [1, 1 << 40])
def test_a_key_that_counts_three_times_is_three_keys(least, monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", least)
    q, k, v = (torch.randn(2, n, 16) for n in (2, 5, 5))
    counts = torch.tensor([3, 1, 0, 2, 1]).expand(2, 2, -1)
    softmax = Softmax(0.1, softcap=2.0)
    out, lse = counted_attention(TokenSet(q, k, v, log_counts=counts.log()), softmax)
    rows = [0, 0, 0, 1, 3, 3, 4]
    scores = softmax.scores(q @ k[:, rows].mT)
    assert torch.allclose(out, scores.softmax(-1) @ v[:, rows], atol=1e-6)
    assert torch.allclose(lse, scores.logsumexp(-1))
    nothing = TokenSet(q, k, v, log_counts=torch.full((2, 2, 5), -torch.inf))
    assert not counted_attention(nothing, softmax)[0].any()
    alone = attend_sets(q.flatten(0, 1), [TokenSet(q, k, v), nothing], softmax)
    assert torch.allclose(alone.view(2, 2, -1), softmax.scores(q @ k.mT).softmax(-1) @ v, atol=1e-6)
