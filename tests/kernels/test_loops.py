"""The loops for a CPU against float64 and against what they stand beside: odd shapes, gaps, poison around the input."""

import math
import os
from functools import partial

import numpy
import pytest
import torch

from kvcli.kernels import _llvm as _permutes
from kvcli.kernels import _numba, gemv, norm_rope, page_table, quant
from kvcli.kernels import decode_attention as attention
from kvcli.kernels import near_best as near_best_module
from kvcli.kernels import topk as select_best
from kvcli.kernels._llvm import exp, highest
from kvcli.kernels.block_attention import block_attention_ref
from kvcli.kernels.chain import Chain, Gate, Products
from kvcli.kernels.decode_attention import TokenSet, counted_attention, decode_attention, decode_attention_ref
from kvcli.kernels.near_best import near_best
from kvcli.kernels.norm_rope import Rotation, rms_norm_ref, rotate_ref, rotated
from kvcli.kernels.page_table import EMPTY, Misses, place_pages, resolve_pages
from kvcli.kernels.quant import BlockFormat
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores
from kvcli.kernels.topk import LONG, topk_pages, topk_pages_ref
from kvcli.memory import host_pool
from kvcli.methods.fier import kernels as fier_kernels
from kvcli.methods.fier.kernels import one_bit_scores, one_bit_scores_ref, quantise_keys
from kvcli.methods.pariskv import kernels as pariskv_kernels
from kvcli.methods.pariskv.kernels import (
    collisions,
    encode_keys,
    estimated_products,
    most_votes,
    rotation,
    turned_query,
)
from kvcli.methods.retroinfer import kernels as retroinfer_kernels
from kvcli.methods.shadowkv import kernels as shadowkv_kernels
from kvcli.methods.twilight import kernels as twilight_kernels
from kvcli.methods.twilight.kernels import FEW, four_bit_scores, quantise_four_bit

pytestmark = pytest.mark.skipif(_numba.numba is None, reason="numba is not there")
seldom = partial(pytest.param, marks=pytest.mark.exhaustive)
QUANTISED = ["int8", "k8v4", "int4"]


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", 1)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def row_products(x, weights):
    return Chain(["x"], [Products("x", "out", list(map(gemv.matrix_of, weights)))], ["out"])(x)[0]


def gated_products(x, gate, up):
    return Chain(["x"], [Gate("x", "out", gemv.matrix_of(gate), gemv.matrix_of(up))], ["out"])(x)[0]


def among_poison(x):
    """The same numbers in a larger tensor of NaN, so that reading beside them is seen; the last dimension is whole."""
    around = torch.full([size + 4 for size in x.shape], math.nan)
    return around[tuple(slice(2, 2 + size) for size in x.shape)].copy_(x)


# Hk, G, d, n. Loops are compiled for G and d, which takes seconds: few pairs have their turn in every run, one of them
# that of the tests of methods.
SHAPES = [(2, 3, 16, 1), (2, 3, 16, 7), (3, 8, 33, 1025), (1, 3, 16, 2051)]
SHAPES += [seldom(1, 1, 1, 1), seldom(2, 2, 13, 90), seldom(2, 1, 80, 4), seldom(1, 2, 64, 2051)]
SHAPES += [seldom(2, 3, 5, 1), seldom(2, 3, 5, 7)]


@pytest.mark.parametrize(("heads", "group", "d", "n"), [*SHAPES[:-2], (2, 3, 5, 1), (2, 3, 5, 7)])
def test_products_are_those_of_float64(heads, group, d, n):
    q, k = noise(heads, group, d), among_poison(noise(heads, n, d, seed=1))
    exact = q.double() @ k.double().transpose(1, 2)
    torch.testing.assert_close(gemv.products(q, k).double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("heads", "group", "d", "n"), SHAPES)
def test_attention_with_few_rows(heads, group, d, n):
    q, k, v = noise(heads, group, d), among_poison(noise(heads, n, d, seed=1)), among_poison(noise(heads, n, d, seed=2))
    mask = noise(heads, n, seed=3) > 0
    mask[:, n // 2] = True
    for softmax in (Softmax(0.3), Softmax(0.3, softcap=2.0)):
        for seen in (None, mask):
            found = attention.attend([TokenSet(q, k, v, valid=seen)], softmax)
            every = None if seen is None else seen[:, None].expand(-1, group, -1)
            exact = block_attention_ref(q.double(), k.double(), v.double(), softmax, every)
            for one, other in zip(found[:2], exact, strict=True):
                torch.testing.assert_close(one.double(), other.double(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("n", [7, 1024, 1040, 2051])
def test_rows_of_scores_lie_in_different_sets_of_a_cache(n, monkeypatch):
    q, k, v = noise(1, 3, 16), noise(1, n, 16, seed=1), noise(1, n, 16, seed=2)
    found = []
    for room in (attention.rows_apart, lambda like, shape: like.new_empty(shape)):
        monkeypatch.setattr(attention, "rows_apart", room)
        found.append(attention.attend([TokenSet(q, k, v)], Softmax(0.3)))
    assert found[0].weights.stride(1) * 4 / 64 % 2 == 1, "an odd number of cache lines"
    assert torch.equal(found[0].weights[..., :n], found[1].weights)
    for of in (lambda x: x.out, lambda x: x.lse, lambda x: attention.mass(x, x.lse)):
        assert torch.equal(*map(of, found))


@pytest.mark.parametrize("side_by_side", [False, True])
def test_reading_ahead_changes_no_number(side_by_side, monkeypatch):
    q = noise(3, 8, 33)
    k, v = (among_poison(noise(2051, 3, 33, seed=seed)).transpose(0, 1) for seed in (1, 2))
    if not side_by_side:
        k, v = k.contiguous(), v.contiguous()
    assert gemv.heads_side_by_side(k) == side_by_side
    found = []
    for least in (k.numel(), 1 + k.numel()):  # read ahead, and not
        for module in (gemv, attention):
            monkeypatch.setattr(module, "FAR", least)
        out, lse, *_ = attention.attend([TokenSet(q, k, v)], Softmax(0.3))
        found.append((gemv.products(q, k), out, lse))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("heads", "group", "d", "n"), SHAPES)
def test_keys_and_values_whose_heads_lie_side_by_side(heads, group, d, n):
    q = noise(heads, group, d)
    k, v = (among_poison(noise(n, heads, d, seed=seed)).transpose(0, 1) for seed in (1, 2))
    exact = q.double() @ k.double().transpose(1, 2)
    torch.testing.assert_close(gemv.products(q, k).double(), exact, atol=1e-4, rtol=1e-5)
    out, lse, *_ = attention.attend([TokenSet(q, k, v)], Softmax(0.3))
    for one, other in zip(
        (out, lse), block_attention_ref(q.double(), k.double(), v.double(), Softmax(0.3)), strict=True
    ):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_sets_of_tokens_are_attended_to_as_if_they_were_one(threads, monkeypatch):
    """Rows anywhere, heads side by side, keys narrower values, queries of their own, scores that are known."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    heads, group, d, wide = 2, 3, 8, 16
    q, other_q, softmax = noise(heads, group, d), noise(heads, group, d, seed=9), Softmax(0.3)
    near_k, near_v = among_poison(noise(heads, 1500, d, seed=1)), among_poison(noise(heads, 1500, wide, seed=2))
    far_k, far_v = (noise(3000, heads, size, seed=3).transpose(0, 1) for size in (d, wide))
    rows, valid = noise(1, 3000, seed=4).argsort()[:, :1100], noise(heads, 1500, seed=5) > 0
    known, means = noise(heads, group, 70, seed=6), noise(heads, 70, wide, seed=7)
    counts = noise(heads, 1, 70, seed=8).masked_fill(noise(heads, 1, 70) > 1, -math.inf)
    sets = [TokenSet(q, near_k, near_v, valid=valid), TokenSet(other_q, far_k, far_v, rows), TokenSet(q, far_k, far_v)]
    some = noise(heads, 70, seed=10).argsort(-1)[:, :50]
    sets += [TokenSet(known.clone(), None, means, log_counts=counts), TokenSet(known[..., :50] - 1, None, means, some)]
    found = attention.attend(sets, softmax)
    near = (0.3 * q.double() @ near_k.double().mT).masked_fill(~valid[:, None], -math.inf)
    there = far_k[:, rows[0]], far_v[:, rows[0]]
    far, every = (0.3 * x.double() @ k.double().mT for x, k in ((other_q, there[0]), (q, far_k)))
    scores = torch.cat((near, far, every, known.double() + counts, known[..., :50].double() - 1), -1)
    values = torch.cat((near_v, there[1], far_v, means, means.take_along_dim(some[..., None], 1)), 1).double()
    torch.testing.assert_close(found.out.double(), scores.softmax(-1) @ values, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    given = scores.softmax(-1)[..., :1500].sum((0, 1))
    torch.testing.assert_close(attention.mass(found, found.lse).double(), given, atol=1e-6, rtol=1e-4)


def test_who_attends_to_nobody_gets_zeros():
    q, k, v = noise(1, 3, 16), noise(1, 5, 16, seed=1), noise(1, 5, 16, seed=2)
    out, lse, *_ = attention.attend([TokenSet(q, k, v, valid=torch.zeros(1, 5, dtype=torch.bool))], Softmax(1.0))
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()


def test_one_of_several_heads_that_attends_to_nobody_gets_zeros():
    q, k, v = noise(2, 3, 16), noise(2, 5, 16, seed=1), noise(2, 5, 16, seed=2)
    valid = torch.tensor([[True] * 5, [False] * 5])
    out, lse = counted_attention(TokenSet(q, k, v, valid=valid), Softmax(1.0))
    assert out[1].eq(0).all()
    assert lse[1].eq(-math.inf).all()
    assert lse[0].isfinite().all()


def test_attention_to_what_is_not_finite_is_not_finite():
    for poison in (math.nan, math.inf):
        k, v = noise(1, 9, 16, seed=1), noise(1, 9, 16, seed=2)
        k[0, 3, 2] = poison
        out, *_ = attention.attend([TokenSet(torch.ones(1, 3, 16), k, v)], Softmax(1.0))
        assert not out.isfinite().any()


@_numba.serial
def exps(x, found):
    for i in range(len(x)):
        found[i] = exp(x[i])


def test_e_to_the_x_is_that_of_float64():
    x = numpy.array([*numpy.linspace(-87, 88, 3001), 0, -math.inf, -88, math.nan], dtype=numpy.float32)
    found = numpy.empty_like(x)
    exps(x, found)
    wanted = numpy.exp(x[:3001].astype(numpy.float64))
    assert (abs(found[:3001] - wanted) <= 4e-7 * wanted).all()
    assert found[3001:-1].tolist() == [1, 0, 0]
    assert math.isnan(found[-1])


@_numba.serial
def highest_of(rows, first, last, found):
    for i in range(len(rows)):
        found[i] = highest(rows[i, first:last])


@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 4), (1, 18), (0, 77)])
def test_the_highest_number_of_a_row(first, last):
    signs = numpy.array([[1], [-1], [1e-42], [0]], dtype=numpy.float32)
    rows = signs * abs(numpy.random.default_rng(0).standard_normal((4, 77)).astype(numpy.float32))
    rows[3, ::2] = -math.inf
    found = numpy.empty(len(rows), numpy.float32)
    highest_of(rows, first, last, found)
    assert found.tolist() == [max(row[first:last], default=-math.inf) for row in rows.tolist()]
    if last > first:
        rows[:, first] = math.nan
        highest_of(rows, first, last, found)
        assert numpy.isnan(found).all()


@pytest.mark.parametrize(("heads", "group", "d", "n"), SHAPES)
def test_keys_that_count_more_or_less_than_once(heads, group, d, n):
    q, k, v = noise(heads, group, d), among_poison(noise(heads, n, d, seed=1)), among_poison(noise(heads, n, d, seed=2))
    counts = noise(heads, group, n, seed=3).masked_fill(noise(heads, group, n, seed=4) > 0, -math.inf)
    counts[0, 0] = -math.inf  # none for this query
    assert gemv.suits(q, k, v)
    found = attention.attend([TokenSet(q, k, v, log_counts=counts)], Softmax(0.3))
    exact = counted_attention(TokenSet(q.double(), k.double(), v.double(), log_counts=counts.double()), Softmax(0.3))
    for one, other in zip(found[:2], exact, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)
    assert found[0][0, 0].eq(0).all()


@pytest.mark.parametrize("rows", [1, 2, gemv.MOST_ROWS])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (17, 3), (130, 65)])
def test_row_products_do_not_depend_on_the_other_rows(rows, n, d):
    x, weight = noise(rows, d), noise(n, d, seed=1)
    found = row_products(x, (weight.numpy(),))
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)
    assert all(torch.equal(row_products(x[[row]], (weight.numpy(),))[0], found[row]) for row in range(rows))


@pytest.mark.parametrize("rows", [1, 2, gemv.MOST_ROWS])
@pytest.mark.parametrize(("sizes", "d"), [((1, 1, 1), 1), ((17, 3, 40), 33), ((130, 64), 65)])
def test_layers_with_the_same_input_share_a_launch(rows, sizes, d):
    x, weights = noise(rows, d), [noise(n, d, seed=n) for n in sizes]
    found = row_products(x, tuple(weight.numpy() for weight in weights))
    torch.testing.assert_close(found.double(), x.double() @ torch.cat(weights).double().T, atol=1e-4, rtol=1e-5)
    alone = [row_products(x, (weight.numpy(),)) for weight in weights]
    assert torch.equal(found, torch.cat(alone, -1))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (17, 33), (130, 65)])
def test_the_gate_of_an_mlp(rows, n, d):
    x, gate, up = 40 * noise(rows, d), noise(n, d, seed=1), noise(n, d, seed=2)  # far on both sides, too
    found = gated_products(x, gate.numpy(), up.numpy())
    exact = torch.nn.functional.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    torch.testing.assert_close(found.double(), exact, atol=1e-2, rtol=1e-4)
    x[0, 0] = math.nan
    assert gated_products(x, gate.numpy(), up.numpy())[0].isnan().all()


@pytest.mark.parametrize(("shape", "shift"), [((1, 1, 64), 0.0), ((2, 3, 5, 33), 1.0)])
def test_norms_of_rows(shape, shift):
    x, weight = among_poison(noise(*shape)), noise(shape[-1], seed=1)
    found = norm_rope.norm_cpu(x, weight, 1e-6, shift)
    torch.testing.assert_close(found, rms_norm_ref(x, weight, 1e-6, shift), atol=1e-6, rtol=1e-5)
    assert found.is_contiguous()


@pytest.mark.parametrize("pairs", ["halves", "neighbours", "part"])
def test_rotations_of_rows(pairs):
    """Queries and keys as projections leave them, heads in front of tokens, what stands beside them as it was."""
    b, heads, kv_heads, n, d, wide = 2, 4, 2, 3, 16, 16 if pairs != "part" else 8
    partner, column, sign = torch.arange(d, dtype=torch.int32), torch.full((d,), -1, dtype=torch.int32), torch.zeros(d)
    for c in range(wide):
        half, other = (c ^ 1, c // 2) if pairs == "neighbours" else ((c + wide // 2) % wide, c % (wide // 2))
        partner[c], column[c] = half, other
        sign[c] = 1.0 if half < c else -1.0
    cos, sin = noise(b, n, wide // 2), noise(b, n, wide // 2, seed=1)
    made = noise(b, n, heads + 2 * kv_heads, d, seed=2)
    q, k, _ = made.transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
    wanted, rotation = made.clone(), Rotation(cos, sin, partner, column, sign)
    rotate_ref(*wanted.transpose(1, 2).split([heads, kv_heads, kv_heads], 1)[:2], rotation)
    norm_rope.rotate_cpu(q, k, rotation)
    torch.testing.assert_close(made, wanted, atol=1e-6, rtol=1e-5)


def test_what_is_not_finite_stays_so():
    k = torch.ones(1, 8, 16)
    k[0, 3, 1], k[0, 5, 2] = math.nan, math.inf
    found = gemv.products(torch.ones(1, 3, 16), k)[0, 0]
    assert found[3].isnan()
    assert found[5] == math.inf
    assert found[[0, 1, 2, 4, 6, 7]].tolist() == [16.0] * 6


@pytest.mark.parametrize("n", [LONG, 1 << 13])
@pytest.mark.parametrize("k", [1, 2, 40, LONG - 1, LONG])
def test_selection_is_the_references_with_ties(k, n):
    generator = torch.Generator().manual_seed(k)
    scores = torch.randint(-40, 40, (3, n), generator=generator) / 8
    scores[0, ::7], scores[1] = -math.inf, 0.0
    scores[1, 5] = -0.0  # equals 0.0 by value
    for each in (scores, noise(3, n, seed=k), noise(3, n, seed=k).abs() * 1e-40):
        expected = topk_pages_ref(each, k).sort(-1).values
        assert torch.equal(topk_pages(each, k), expected)


@pytest.mark.parametrize(
    ("heads", "group", "d", "size", "groups"), [seldom(1, 1, 1, 1, 1), (2, 3, 12, 5, 17), (2, 2, 64, 32, 33)]
)
def test_one_bit_scores_among_poison(heads, group, d, size, groups):
    codes, ranges = quantise_keys(noise(heads, groups, size, d))
    held = torch.full((heads, groups + 4, 2, d), math.nan)
    held[:, 2:-2] = ranges
    more = torch.full((heads, groups + 4, *codes.shape[2:]), 255, dtype=torch.uint8)
    more[:, 2:-2] = codes
    q, own = noise(heads, group, d, seed=1), (more[:, 2:-2], held[:, 2:-2])
    assert fier_kernels.suits(q, *own)
    exact = one_bit_scores_ref(q.double(), codes, ranges)
    torch.testing.assert_close(one_bit_scores(q, *own).double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("heads", "group", "d", "n"), SHAPES)
def test_four_bit_scores_of_chosen_tokens(heads, group, d, n):
    codes, ranges = quantise_four_bit(noise(heads, n + 3, d))
    ranges[:, n:] = math.nan
    q, tokens = noise(heads, group, d, seed=1), noise(heads, n, seed=2).argsort(-1)
    chosen = tokens[..., None].expand(-1, -1, codes.shape[2]), tokens[..., None].expand(-1, -1, 2)
    exact = four_bit_scores(q.double(), codes.gather(1, chosen[0]), ranges.gather(1, chosen[1]))
    found = twilight_kernels.four_bit_scores_cpu(q, codes, ranges, tokens)
    torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=1e-4)


def halves(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def neighbours(x, cos, sin):
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


@pytest.mark.parametrize("turn", [halves, neighbours, None])
@pytest.mark.parametrize(  # alone, others behind them
    ("d", "wide"), [(20, 20), (20, 4), seldom(16, 16), seldom(7, 4), seldom(4, 4), seldom(32, 4)]
)
@pytest.mark.parametrize(("size", "rank", "count"), [(1, 3, 1), (3, 8, 9), (8, 21, 40)])
def test_keys_are_rebuilt_in_their_slots_and_nothing_else_is_touched(turn, d, wide, size, rank, count):
    a, b = noise(60, size, rank), noise(3, rank, d, seed=1)
    heads, order = (noise(count, seed=2).argsort() % 3).sort().values, noise(60, seed=3).argsort()[:count]
    misses = Misses(heads, order, noise(60, seed=4).argsort()[:count])
    k = among_poison(torch.zeros(3, 60, size, d))
    exact = (a.double()[misses.pages] @ b.double()[heads]).float()
    if turn is None:
        shadowkv_kernels.rebuild_keys_cpu(a, b, misses, None, k)
    else:
        angles = noise(2, 60 * size, wide // 2, seed=5)
        tables = angles.repeat_interleave(2, -1) if turn is neighbours else angles.repeat(1, 1, 2)
        turning = Rotation.of(*tables, turn, wide, d)
        shadowkv_kernels.rebuild_keys_cpu(a, b, misses, turning, k)
        exact = rotated(exact, misses.pages[:, None] * size + torch.arange(size), turning)
    torch.testing.assert_close(k[misses.heads, misses.slots], exact, atol=1e-5, rtol=1e-4)
    assert (k != 0).any((2, 3)).sum() == count


@pytest.mark.parametrize("p", [0.05, 0.6, 0.9999999, 1.0])
@pytest.mark.parametrize(("heads", "group", "n", "always"), [(1, 1, 1, 1), (2, 1, 7, 0), (3, 4, 900, 33)])
def test_the_nucleus_of_a_group_is_that_of_torch(heads, group, n, always, p, monkeypatch):
    weights = noise(heads, group, n, seed=1)
    weights[:, :, ::3] = weights[:, :, :1].clone()  # ties
    weights, fixed = (3 * weights).softmax(-1), torch.arange(n) % max(1, n // 17) < always // 17
    tokens = noise(heads, n, seed=2).argsort(-1)
    kept = twilight_kernels.keep_nucleus_cpu(weights, fixed, p)
    found = twilight_kernels.kept_first_cpu(tokens, kept)
    monkeypatch.setattr(_numba, "numba", None)
    assert torch.equal(kept, twilight_kernels.keep_nucleus_cpu(weights, fixed, p))
    assert all(map(torch.equal, found, twilight_kernels.kept_first_cpu(tokens, kept)))


MADE_NUMBERS = [(torch.float32, "k8v4"), (torch.float32, "int4"), (torch.bfloat16, "int8")]
MADE_NUMBERS += [seldom(torch.float32, "int8"), seldom(torch.bfloat16, "k8v4"), seldom(torch.bfloat16, "int4")]


@pytest.mark.parametrize(("dtype", "held"), MADE_NUMBERS)
@pytest.mark.parametrize(("parts", "size", "d"), [(2, 4, 40), (1, 8, 128), (2, 1, 80), (2, 1, 36), seldom(2, 1, 18)])
def test_blocks_that_are_picked_become_numbers_in_their_places(held, parts, size, d, dtype):
    form, count = BlockFormat.of(held, parts, size, d), 70
    blocks, heads = torch.empty(count, form.bytes, dtype=torch.uint8), torch.arange(200) % 3
    sizes = torch.exp2(noise(3, d, seed=9).round()) if form.sized else None
    form.quantise([noise(count, size, d, seed=part) for part in range(parts)], blocks)
    picked, places = noise(200, seed=3).long() % count, noise(300, seed=4).argsort()[:200]
    out = torch.full((parts, 300, size, d), -1.0, dtype=dtype).transpose(0, 1)
    assert form.move(blocks, picked, out, places, sizes, heads)
    wanted = torch.empty(200, parts, size, d)
    form._dequantise_by_parts(blocks[picked], wanted)
    if sizes is not None:
        wanted[:, 0] *= sizes[heads, None]
    assert torch.equal(out[places], wanted.to(dtype))
    others = torch.ones(300, dtype=torch.bool)
    others[places] = False
    assert (out[others] == -1).all()


@pytest.mark.parametrize(("dtype", "held"), MADE_NUMBERS)
@pytest.mark.parametrize(("parts", "size", "d"), [(2, 64, 40), (1, 8, 128), (2, 1, 80)])
def test_numbers_of_blocks_are_bit_for_bit_those_of_torch(held, parts, size, d, dtype, monkeypatch):
    form, count = BlockFormat.of(held, parts, size, d), 5
    blocks = torch.empty(count, form.bytes, dtype=torch.uint8)
    pages = [3 * noise(count, size, d, seed=part) + 7 for part in range(parts)]
    pages[0][1, 0, 0] = math.nan
    sizes = torch.exp2(noise(3, d, seed=9).round()) if form.sized else None
    heads = torch.tensor([2, 0, 1, 1, 2])
    form.quantise(pages, blocks, None if sizes is None else sizes[heads, None])
    around = torch.full((parts, count, size + 2, d), -1.0, dtype=dtype)  # parts one behind the other
    assert quant.suits(blocks, torch.empty(count, parts, size, d))
    out = around[:, :, 1:-1].transpose(0, 1)
    form.dequantise(blocks, out, sizes, heads)
    monkeypatch.setattr(_numba, "numba", None)
    by_torch = torch.empty(count, parts, size, d, dtype=dtype)
    form.dequantise(blocks, by_torch, sizes, heads)
    torch.testing.assert_close(out, by_torch, atol=0, rtol=0, equal_nan=True)
    assert (around[:, :, [0, -1]] == -1).all()


@pytest.fixture(params=[False, True], ids=["one by one", "in registers"])
def looked_up(request, monkeypatch):
    if request.param and not _permutes.permutes():
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(pariskv_kernels, "permutes", lambda: request.param)


@pytest.mark.usefixtures("looked_up")
@pytest.mark.parametrize("n", [19, 1091])
@pytest.mark.parametrize("blocks", [seldom(1), 3, seldom(8), 16, seldom(32), 64])
def test_votes_are_those_of_torch(blocks, n, monkeypatch):
    width = 8 * blocks
    turned = noise(2, n, width)
    held = torch.full((2, n + 4, blocks), 255, dtype=torch.uint8)
    positive = (turned.unflatten(-1, (blocks, 8)) > 0).to(torch.uint8)
    signs = held[:, 2:-2].copy_(positive.mul(2 ** torch.arange(8)).sum(-1))
    assert pariskv_kernels.collision_loops_suit(signs)
    found = [collisions(noise(2, width, seed=1), signs, part) for part in (0.1, 0.6)]
    assert {each.dtype for each in found} == {torch.uint8 if blocks < 64 else torch.int32}
    monkeypatch.setattr(_numba, "numba", None)
    assert all(
        torch.equal(by_loops.int(), collisions(noise(2, width, seed=1), signs, part))
        for by_loops, part in zip(found, (0.1, 0.6), strict=True)
    )
    assert all(len(each.unique()) > 2 for each in found)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize(("n", "k", "least"), [(1, 1, 0), (70, 70, 3), (2100, 13, 0), (2100, 900, 7)])
def test_most_votes_with_ties(n, k, least, dtype):
    votes = torch.randint(least, least + 9, (3, n), generator=torch.Generator().manual_seed(n), dtype=dtype)
    votes[1] = 5
    expected = topk_pages_ref(votes.float(), k).sort(-1).values
    assert torch.equal(most_votes(votes, k, 3), expected)


@pytest.mark.parametrize(("heads", "group", "d"), [(1, 1, 5), (3, 4, 24), (2, 8, 64)])
def test_the_mean_query_of_a_group_is_turned(heads, group, d):
    q, turn = noise(heads, group, d), rotation(d, 0, torch.device("cpu"))
    torch.testing.assert_close(turned_query(q, turn, 1), q.mean(1) @ turn, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "d", "n"), [(1, 5, 1), (3, 24, 20), (2, 64, 32)])
def test_a_few_keys_are_encoded_as_many_are(heads, d, n, monkeypatch):
    keys, turn = among_poison(noise(heads, n, d)), rotation(d, 0, torch.device("cpu"))
    keys[0, 0] = 0  # a key of no length
    *found, weights = encode_keys(keys, turn, n)
    monkeypatch.setattr(_numba, "numba", None)
    *expected, exact = encode_keys(keys, turn, n)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    torch.testing.assert_close(weights, exact, atol=1e-6, rtol=1e-5)


# Compiled for d and for the way of looking up: each has its turn.
LOOKED_UP = [(False, 3, 24, 1100), (True, 1, 200, 90), seldom(True, 3, 24, 1100), seldom(False, 1, 200, 90)]
LOOKED_UP += [seldom(way, *shape) for way in (False, True) for shape in ((1, 5, 1), (2, 64, 300))]


@pytest.mark.usefixtures("looked_up")
@pytest.mark.parametrize(("looked_up", "heads", "d", "n"), LOOKED_UP, indirect=["looked_up"])
def test_products_of_four_bit_keys_where_they_lie(heads, d, n, monkeypatch):
    turn = rotation(d, 0, torch.device("cpu"))
    _, *own = encode_keys(noise(heads, n, d), turn)
    rows = torch.full((heads, n + 4, turn.shape[1] + 8), 255, dtype=torch.uint8)  # as floats no numbers either
    held = rows[:, 2:-2, 4:-4]
    codes, weights = held[..., : own[0].shape[2]], held[..., own[0].shape[2] :].view(torch.float32)
    codes[:], weights[:] = own
    q, tokens = noise(heads, d, seed=1) @ turn, noise(heads, n, seed=2).argsort(-1)[:, : -(-n // 2)]
    assert pariskv_kernels.products_suit_cpu(codes, weights)
    found = estimated_products(q, codes, weights, tokens)
    monkeypatch.setattr(_numba, "numba", None)
    exact = estimated_products(q.double(), codes, weights.double(), tokens)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("heads", "n", "d"), [(1, 1, 1), (3, 2, 7), (4, 1, 64), (2, 30, 129)])
def test_a_few_keys_are_quantised_to_four_bits_as_many_are(heads, n, d):
    keys = noise(heads, n + 2, d)[:, 1:-1]
    keys[0, 0] = 0.7  # all channels are equal
    many = quantise_four_bit(torch.cat([keys] * (FEW + 1), 1))  # by torch
    for found, other in zip(twilight_kernels.quantise_four_bit_cpu(keys), many, strict=True):
        assert torch.equal(found, other[:, :n])


@pytest.mark.parametrize(("heads", "n"), [(1, 1), (3, 700), (2, 40_000)])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 100.0])
def test_scores_near_the_best_are_counted(heads, n, alpha):
    scores = among_poison(noise(heads, n))
    expected = (scores >= scores.amax(1, keepdim=True) - alpha).sum(1)
    for found in (near_best_module.count(scores, alpha), near_best(scores, alpha)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("n", "width", "m"), [(1, 1, 1), (90, 7, 67), (300, 128, 200)])
def test_rows_are_put_where_they_belong_and_nowhere_else(n, width, m):
    blocks, rows = noise(n, width), noise(n, seed=1).argsort()[:m]
    places, into = noise(n, seed=2).argsort()[:m], torch.full((n, width), math.nan)
    expected = into.clone()
    expected[places] = blocks[rows]
    assert host_pool.scatter_cpu(blocks, rows, into, places)
    torch.testing.assert_close(into, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(("heads", "n", "size", "d", "m"), [(1, 1, 1, 1, 1), (3, 90, 1, 7, 67), (2, 40, 16, 64, 30)])
def test_pages_are_brought_to_their_heads_slots_and_nowhere_else(heads, n, size, d, m):
    blocks, kv = noise(n, heads, 2, size, d), torch.full((2, heads, n + 1, size, d), math.nan)
    pages, of = noise(n, seed=1).argsort()[:m], torch.arange(m) % heads
    slots, expected = noise(n + 1, seed=2).argsort()[:m], kv.clone()
    for page, head, slot in zip(pages.tolist(), of.tolist(), slots.tolist(), strict=True):
        expected[:, head, slot] = blocks[page, head]
    host_pool.bring_cpu(blocks, pages, of, kv, slots)
    torch.testing.assert_close(kv, expected, atol=0, rtol=0, equal_nan=True)


def test_without_numba_torch_does_the_same(monkeypatch):
    q, k, v = noise(6, 16), noise(2, 3000, 16, seed=1), noise(2, 3000, 16, seed=2)
    softmax = Softmax(0.25)
    by_loops = decode_attention(q, k, v, softmax), token_scores(q, k, 0.25)
    monkeypatch.setattr(_numba, "numba", None)
    by_torch = decode_attention(q, k, v, softmax), token_scores(q, k, 0.25)
    torch.testing.assert_close(by_loops, by_torch, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(by_loops[0], decode_attention_ref(q, k, v, softmax), atol=1e-5, rtol=1e-4)


def test_loops_are_not_for_parameters_other_dtypes_or_gaps():
    x = noise(2, 4)
    assert gemv.suits(x, noise(3, 4))
    assert not gemv.suits(x, torch.nn.Parameter(noise(3, 4)))
    assert not gemv.suits(x, noise(3, 4).double())
    assert not gemv.suits(x, noise(4, 3).T)
    assert not gemv.suits(noise(gemv.MOST_ROWS + 1, 4), noise(3, 4))
    assert not select_best.suits(noise(3, 0))


def test_a_process_that_is_forked_off_does_without():
    assert gemv.suits(noise(2, 4), noise(3, 4))
    row_products(noise(2, 4), (noise(3, 4).numpy(),))  # threads are there now
    if (child := os.fork()) == 0:
        os._exit(3 if gemv.suits(noise(2, 4), noise(3, 4)) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_is_small_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", 13)
    assert not gemv.suits(noise(2, 4), noise(3, 4))
    assert gemv.suits(noise(2, 4), noise(4, 4))


# These loops, too, are compiled for d, and for the format.
TO_BYTES = [((2, 3, 16, 5), held) for held in QUANTISED] + [((2, 4, 96, 514), "k8v4")]
TO_BYTES += [seldom((2, 4, 96, 514), held) for held in ("int8", "int4")]
TO_BYTES += [seldom(shape, held) for shape in ((1, 1, 2, 1), (2, 3, 12, 5), (3, 8, 64, 1025)) for held in QUANTISED]


@pytest.mark.parametrize(("shape", "held"), TO_BYTES)
def test_attention_to_bytes_is_attention_to_their_numbers(held, shape):
    heads, group, d, n = shape
    form = BlockFormat.of(held, 2, 1, d)
    blocks = torch.full((n, heads, form.bytes), 255, dtype=torch.uint8)
    sizes = torch.exp2(noise(heads, d, seed=4).round())
    form.quantise([noise(n, heads, 1, d, seed=i) for i in (1, 2)], blocks, sizes[:, None])
    numbers = torch.empty(n * heads, 2, 1, d)
    form._dequantise_by_parts(blocks.flatten(0, 1), numbers)
    numbers[:, 0, 0] *= sizes.repeat(n, 1)
    far = numbers.view(n, heads, 2, d).permute(2, 1, 0, 3)
    near = noise(2, heads, 7, d, seed=3)
    k, v = torch.cat((far, near), 2).double()
    q, softmax = noise(heads, group, d), Softmax(0.3, softcap=2.0)
    found = attention.attend_quantised_cpu(q, blocks, form, sizes, *near, softmax)
    for one, other in zip(found, block_attention_ref(q.double(), k, v, softmax), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("heads", "clusters", "room", "follow"), [(1, 1, 0, 0), (3, 700, 250, 90), (2, 40, 10**6, 7)])
def test_clusters_are_divided_by_rank_and_their_tokens_listed(heads, clusters, room, follow):
    scores = noise(heads, 2, clusters)
    scores[:, :, clusters // 2 :] = scores[:, :, : clusters - clusters // 2]  # ties
    cluster = (noise(heads, 900, seed=2).abs() * 1000).int() % clusters  # some have no token
    sizes = torch.stack([row.bincount(minlength=clusters) for row in cluster]).int()
    weights = retroinfer_kernels.weighed_cpu(scores, sizes)
    expected = scores.masked_fill(sizes[:, None] == 0, -math.inf).softmax(-1).sum(1)
    torch.testing.assert_close(weights, expected, atol=1e-7, rtol=1e-5)
    read, estimated, log_counts, counts = retroinfer_kernels.divide_cpu(weights, sizes, room, follow)
    order = weights.argsort(dim=-1, descending=True, stable=True)
    fits = sizes.gather(1, order).cumsum(1) <= room
    assert torch.equal(read, torch.zeros_like(fits).scatter(1, order, fits))
    for own, ranked, behind in zip(range(heads), order, fits.sum(1), strict=True):
        following = ranked[behind : behind + follow]
        assert torch.equal(estimated[own, : len(following)], following)
        counted = log_counts[own].exp()
        torch.testing.assert_close(counted[: len(following)], sizes[own, following].float(), atol=1e-4, rtol=1e-5)
        assert (counted[len(following) :] == 0).all()
    members = cluster.argsort(dim=1, stable=True).int()
    tokens = retroinfer_kernels.listed_cpu(members, sizes, read, counts, 5)
    for own, count, marks, clusters_of in zip(tokens, counts, read, cluster, strict=True):
        expected = [5 + t for c in marks.nonzero()[:, 0] for t in (clusters_of == c).nonzero()[:, 0].tolist()]
        assert own[:count].tolist() == expected
        assert (own[count:] == -1).all()


@pytest.mark.parametrize(("slots", "wanted"), [(7, 7), (9, 4), (1, 1), (60, 33)])
def test_pages_are_given_slots_as_the_reference_gives_them(slots, wanted):
    """Step after step; some slots are empty at first, and some keep pages that nobody wants."""
    n = 3 * slots
    resident = torch.full((slots,), EMPTY)
    for step in range(12):
        pages = noise(n, seed=step).argsort()[:wanted]
        before = resident.clone()
        chosen, absent = page_table.place(resident, pages, n)
        assert torch.equal(resident, before)
        expected, missing = place_pages(resident, pages)
        assert torch.equal(chosen, expected)
        assert torch.equal(absent, missing)
        resident[chosen] = pages


def test_no_page_is_wanted_where_there_are_no_slots():
    """A prefix that ends before the first block leaves the window."""
    none = torch.empty(0, dtype=torch.long)
    for given in place_pages(none, none):
        assert given.shape == (0,)


def test_selections_are_resolved_as_the_reference_resolves_them():
    """Also of heads that keep what they have, empty slots among it."""
    heads, slots, n = 3, 8, 40
    resident = torch.full((heads, slots), EMPTY)
    for step in range(12):
        selected = noise(heads, n, seed=step).argsort(1)[:, :slots]
        if step % 3 == 1:
            selected[1] = resident[1]
        wanted = resolve_pages(resident, selected)
        after = resident.clone()
        after[wanted.heads, wanted.slots] = wanted.pages
        found = page_table.resolve(resident, selected, n)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert torch.equal(resident, after)


def test_a_block_cache_gives_the_slots_that_were_read_longest_ago():
    """Step after step against a dict in the order of use, of equals the lower slot."""
    heads, slots, length = 2, 6, 40
    resident, used = torch.full((heads, slots), -1), torch.zeros(heads, slots, dtype=torch.int64)
    known = [dict.fromkeys(range(slots), (0, None)) for _ in range(heads)]  # slot -> step, token
    for step in range(1, 30):
        rows = [noise(length, seed=97 * step + head).argsort()[: 1 + (step + head) % 5] for head in range(heads)]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        found, misses = retroinfer_kernels.resolve_clusters_cpu(tokens, length, step, resident, used)
        for head, row in enumerate(rows):
            own = known[head]
            held = {token: slot for slot, (_, token) in own.items()}
            own |= {held[token]: (step, token) for token in row.tolist() if token in held}
            free = iter(sorted(own, key=lambda slot: (own[slot][0], slot)))
            gone = [token for token in row.tolist() if token not in held]
            own |= {slot: (step, token) for slot, token in [(next(free), token) for token in gone]}
            assert [own[slot] for slot in found[head, : len(row)].tolist()] == [(step, t) for t in row.tolist()]
            assert misses.pages[misses.heads == head].tolist() == gone
            assert resident[head, misses.slots[misses.heads == head]].tolist() == gone
            assert (found[head, len(row) :] == -1).all()


def test_loops_of_a_head_size_are_found_again_on_the_disk():
    """A loop that refers to another one would be compiled anew by every process."""
    for loop in (
        *gemv._loops(64, 2),
        *attention._loops(64, 64, 2),
        fier_kernels._loop(64, 32, 2),
        twilight_kernels._loop(64, 2),
    ):
        held = [cell.cell_contents for cell in loop.py_func.__closure__ or ()]
        assert all(isinstance(each, int) for each in held)
