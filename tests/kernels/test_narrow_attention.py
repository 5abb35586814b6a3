"""Attention over tiles of narrow KV against float64 over the numbers that they hold, with poison around these."""

from functools import partial

import pytest
import torch
from narrow_oracle import rounded

from kvcli.kernels import _numba
from kvcli.kernels import narrow_attention as narrow_kernels
from kvcli.kernels.decode_attention import decode_attention_ref
from kvcli.kernels.narrow_attention import TILE, NarrowTokens, TileFormat, narrow_attention
from kvcli.kernels.quant import channel_sizes
from kvcli.kernels.softmax import Softmax

FORMS = ["bfloat16", "int8", "k8v4"]
seldom = partial(pytest.param, marks=pytest.mark.exhaustive)
# Hk, G, d, n. Loops are compiled for G and d, which takes seconds: two queries of 64 channels are those of the bundled
# model. Torch takes 12 and 80 channels, and 9 queries.
SHAPES = [(2, 2, 64, 130, "int8"), (1, 8, 32, 1093, "bfloat16"), (3, 2, 64, 1, "k8v4"), (2, 2, 12, 70, "int8")]
SHAPES += [(1, 9, 64, 65, "k8v4"), (2, 1, 80, 64, "k8v4")]
SHAPES += [seldom(2, 4, 64, 130, "int8"), seldom(3, 4, 64, 1, "k8v4")]
SHAPES += [seldom(2, 3, 64, 130, "int8"), seldom(1, 9, 32, 65, "k8v4")]
SHAPES += [seldom(*shape, held) for shape in ((2, 4, 128, 2051), (1, 5, 256, 513), (2, 1, 96, 64)) for held in FORMS]


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", 1)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens_of(heads, d, n):
    """Keys with large and small channels, and values."""
    return noise(heads, n, d, seed=1) * torch.exp2(noise(d, seed=4).round()), 3 * noise(heads, n, d, seed=2) + 1


def poisoned(heads, n, form):
    """Tiles for n tokens and more; as scales or as bfloat16 the bytes are NaN."""
    return tuple(torch.full((heads, n // TILE + 2, size), 255, dtype=torch.uint8) for size in form.bytes)


@pytest.mark.parametrize(("heads", "group", "d", "n", "held"), SHAPES)
def test_tokens_are_those_that_were_rounded_however_they_came(heads, group, d, n, held):
    form, (k, v) = TileFormat(held, d), tokens_of(heads, d, n)
    sizes = torch.ones(heads, d) if held == "bfloat16" else channel_sizes(k)
    whole, parts = poisoned(heads, n, form), poisoned(heads, n, form)
    form.write_ref(whole, 0, k, v, sizes)
    for first, last in ((0, n // 3), (n // 3, n - 1), (n - 1, n)):
        if last > first:
            form.write(parts, first, *(x[:, first:last] for x in (k, v)), sizes)
    for one, other in zip(whole, parts, strict=True):
        assert (one != other).float().mean() < 1e-3, "a number half way between two codes may go to either"
    for tiles in (whole, parts):
        for part, (found, x) in enumerate(zip(form.read(tiles, n, sizes), (k, v), strict=True)):
            off = (found.double() - rounded(x, held, part, sizes)).abs() > 1e-4
            assert off.float().mean() <= 1e-2 * (held == "k8v4")


@pytest.fixture(params=[False, True], ids=["widened", "in bytes"])
def in_bytes(request, monkeypatch):
    """Whether codes are multiplied as they are."""
    if request.param and not narrow_kernels.multiplies_bytes():
        pytest.skip("this processor does not multiply four bytes at once")
    monkeypatch.setattr(narrow_kernels, "multiplies_bytes", lambda: request.param)
    return request.param


@pytest.mark.parametrize("softmax", [Softmax(0.2), Softmax(0.2, softcap=2.0, sinks=torch.tensor(0.5))])
@pytest.mark.parametrize(("heads", "group", "d", "n", "held"), SHAPES)
def test_attention_is_that_over_the_rounded_tokens(heads, group, d, n, held, softmax, in_bytes):
    form, (k, v), q = TileFormat(held, d), tokens_of(heads, d, n), noise(heads * group, d)
    sizes = torch.ones(heads, d) if held == "bfloat16" else channel_sizes(k)
    tiles = poisoned(heads, n, form)
    form.write(tiles, 0, k, v, sizes)
    if softmax.sinks is not None:
        softmax = softmax._replace(sinks=softmax.sinks.expand(heads * group).contiguous())
    near = noise(2, heads, 5, d, seed=7)
    far = NarrowTokens(tiles, n, form, sizes)
    found = narrow_attention(q, far, near, softmax)
    keys, values = (torch.cat(both, 1).double() for both in zip(far.read(), near, strict=True))
    for head, query in enumerate(q.double()):
        scores = softmax.scores(keys[head // group] @ query)
        total = scores.exp().sum() + (0 if softmax.sinks is None else softmax.sinks[head].double().exp())
        exact = (scores.exp() @ values[head // group]) / total
        span = (v[head // group].max() - v[head // group].min()).item()
        off = 3e-5 * span if in_bytes else 2e-5
        torch.testing.assert_close(found[head].double(), exact, atol=off, rtol=1e-4)


@pytest.mark.parametrize(("held", "group", "d"), [("bfloat16", 8, 32), ("int8", 2, 64), ("k8v4", 2, 64)])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.usefixtures("in_bytes")
def test_what_is_not_a_number_stays_none(held, group, d, part):
    form, (k, v) = TileFormat(held, d), tokens_of(2, d, 70)
    (k, v)[part][1, 66, 5] = float("nan")
    tiles, sizes = poisoned(2, 70, form), torch.ones(2, d)
    form.write(tiles, 0, k, v, sizes)
    far, near = NarrowTokens(tiles, 70, form, sizes), noise(2, 2, 1, d)
    found = narrow_attention(noise(2 * group, d), far, near, Softmax(0.1)).isnan().any(1)
    assert found.tolist() == [False] * group + [True] * group


def test_queries_of_another_dtype_keep_it():
    form, (k, v) = TileFormat("int8", 64), tokens_of(2, 64, 70)
    tiles, sizes = poisoned(2, 70, form), channel_sizes(k)
    form.write(tiles, 0, k.bfloat16(), v.bfloat16(), sizes)
    q = noise(4, 64).bfloat16()
    far, near = NarrowTokens(tiles, 70, form, sizes), noise(2, 2, 3, 64).bfloat16()
    found = narrow_attention(q, far, near, Softmax(0.1))
    assert found.dtype == torch.bfloat16
    wide = narrow_attention(q.float(), far, near.float(), Softmax(0.1))
    torch.testing.assert_close(found, wide.bfloat16())


def test_without_tokens_in_tiles_it_is_attention_to_the_others():
    form, (q, near) = TileFormat("int8", 64), (noise(4, 64), noise(2, 2, 300, 64, seed=3))
    far = NarrowTokens(poisoned(2, 70, form), 0, form, torch.ones(2, 64))
    found = narrow_attention(q, far, near, Softmax(0.1))
    torch.testing.assert_close(found, decode_attention_ref(q, *near, Softmax(0.1)), atol=1e-5, rtol=1e-4)
