"""Linear layers one after another in one loop, against torch in float64."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

from kvcli.kernels import _numba, chain, gemv, packed_linear
from kvcli.kernels.chain import Chain, Gate, Normalised, Products, TurnedHeads
from kvcli.kernels.decode_attention import TOLD, AttentionInChain, Tokens, decode_attention_ref
from kvcli.kernels.norm_rope import Rotation, rms_norm_ref, rotate_ref
from kvcli.kernels.packed_linear import PACKINGS, PackedWeight
from kvcli.kernels.softmax import Softmax

pytestmark = pytest.mark.skipif(_numba.numba is None, reason="numba is not there")

D = 64
seldom = partial(pytest.param, marks=pytest.mark.exhaustive)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(rows, columns, seed, bias=False):
    """A matrix of fp32, with its numbers and its bias."""
    weight, added = noise(rows, columns, seed=seed), noise(rows, seed=seed + 100) if bias else torch.zeros(rows)
    return gemv.matrix_of(weight.numpy(), added.numpy() if bias else None), weight.double(), added.double()


def packed(rows, columns, seed):
    """A matrix of Q8_0, with its numbers."""
    size = PACKINGS["Q8_0"].row_bytes(columns)
    blocks = torch.randint(0, 256, (rows, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    blocks.view(rows, -1, 34)[..., :2] = torch.from_numpy(np.array([0.01], np.float16).view(np.uint8))
    weight = PackedWeight(blocks, PACKINGS["Q8_0"], torch.float32)
    return packed_linear.matrix_of(weight), weight.unpack().double()


def near(found, wanted):
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("m", [1, 3, 8])
def test_stages_read_inputs_and_results_by_name(m):
    x, z, weight = noise(m, D), noise(m, 75, seed=1), noise(D, seed=2)
    (first, a, bias), (second, b) = plain(70, D, 3, bias=True), packed(5, D, 4)
    (gate, c, _), (up, e, _) = plain(40, 75, 5), plain(40, 75, 6)
    stages = [
        Normalised("x", "normed", weight, 1e-5, 1.0),
        Products("normed", "sum", [first, second], plus="z"),
        Gate("sum", "gated", gate, up),
    ]
    chain = Chain(["x", "z"], stages, ["gated", "normed"])
    gated, normed = chain(x, z)
    wide = rms_norm_ref(x.double(), weight, 1e-5, 1.0)
    total = torch.cat([wide @ a.T + bias, wide @ b.T], -1) + z
    near(normed, wide)
    near(gated, functional.silu(total @ c.T) * (total @ e.T))
    again = chain(x, z)
    assert again[0].data_ptr() != gated.data_ptr()  # who keeps results keeps them
    assert torch.equal(again[0], gated)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_heads_are_normalised_and_rotated_in_place(normed, turned):
    """Those from a column on; half of the channels of a head stay as they are."""
    tokens, heads, d, first = 3, 4, 16, 8
    matrix, weight, _ = plain(first + heads * d, D, 1)
    x, cos, sin, scale = noise(tokens, D), noise(tokens, 8, seed=2), noise(tokens, 8, seed=3), noise(d, seed=4)
    channels = torch.arange(d, dtype=torch.int32)
    column = torch.where(channels < 8, channels, -1)
    partner, sign = torch.where(channels < 8, (channels + 4) % 8, channels), torch.where(channels < 4, -1.0, 1.0)
    turn = (partner, column, sign) if turned else None
    norm = (scale, 1e-6, 0.0) if normed else None
    stages = [Products("x", "out", [matrix]), TurnedHeads("out", first, heads, d, norm, turn, 8)]
    (found,) = Chain(["x", "cos", "sin"], stages, ["out"])(x, cos, sin)
    wanted = x.double() @ weight.T
    own = wanted[:, first:].reshape(tokens, heads, d).transpose(0, 1)[None]
    own = rms_norm_ref(own, scale, 1e-6) if normed else own.clone()
    if turned:
        rotate_ref(own, own[:, :0], Rotation(cos[None], sin[None], partner, column, sign))
    near(found[:, :first], wanted[:, :first])
    near(found[:, first:], own[0].transpose(0, 1).reshape(tokens, -1))


class Attending:
    """A chain of products, and attention by them: calls it with tokens; `weight` are the products'."""

    def __init__(self, group, kv_heads, d, softmax=None, seeds=(7,)):
        heads = group * kv_heads
        matrices = [plain((heads + 2 * kv_heads) * d, D, seed) for seed in seeds]
        self.attention = AttentionInChain(heads, kv_heads, d, softmax or Softmax(d**-0.5))
        self.weights, stages = [weight for _, weight, _ in matrices], []
        for at, (matrix, _, _) in enumerate(matrices):
            stages += [Products("x", "products", [matrix]), *self.attention.stages("products", f"out{at}", at)]
        self.chain = Chain(["x"], stages, ["products", *(f"out{at}" for at in range(len(seeds)))])

    def __call__(self, x, *tokens):
        room = torch.full((max(self.attention.room(each) for each in tokens) + 1,), torch.nan)
        told = np.zeros((len(tokens), TOLD), np.int64)
        for row, each in zip(told, tokens, strict=True):
            assert self.attention.tell(row, each, room.data_ptr()) > 0
        found = self.chain(x, told=told)
        assert room[-1].isnan()
        return found


def cache_of(kv_heads, d, held, capacity):
    """Keys and values of some tokens, and nonsense where there are none."""
    kv = torch.full((2, kv_heads, capacity, d), torch.nan)
    kv[:, :, :held] = noise(2, kv_heads, held, d, seed=8)
    return kv


# Loops are compiled for group and d, which takes seconds.
SHAPES = [(2, 1, 16, None), (8, 3, 20, 2.0)]
SHAPES += [seldom(1, 1, 16, None), seldom(3, 3, 64, None), seldom(8, 2, 20, 2.0), seldom(5, 3, 80, None)]


@pytest.mark.parametrize("held", [0, 1, 6, 1023, 1024, 2500])
@pytest.mark.parametrize(("group", "kv_heads", "d", "softcap"), SHAPES)
def test_attention_appends_and_reads_everything(group, kv_heads, d, softcap, held):
    softmax = Softmax(d**-0.5, softcap)
    chained = Attending(group, kv_heads, d, softmax)
    x, kv = noise(1, D), cache_of(kv_heads, d, held, held + 3)
    before = kv.clone()
    products, out = chained(x, Tokens(kv, held + 1))
    q, k, v = products.view(-1, d).split([group * kv_heads, kv_heads, kv_heads])
    assert torch.equal(kv[:, :, held], torch.stack([k, v]))
    kv[:, :, held] = torch.nan
    torch.testing.assert_close(kv, before, rtol=0, atol=0, equal_nan=True)
    k, v = (torch.cat([x[:, :held], new[:, None]], 1).double() for x, new in zip(before, (k, v), strict=True))
    near(out.view(-1, d), decode_attention_ref(q.double(), k, v, softmax))


@pytest.mark.parametrize("row", [0, 3, 1023, 1024, 1499])
def test_the_newest_token_goes_to_any_row(row):
    """It takes the place of one that has left a ring."""
    group, kv_heads, d, softmax = 2, 2, 16, Softmax(0.25)
    x, kv = noise(1, D), cache_of(kv_heads, d, 1500, 1503)
    before = kv.clone()
    products, out = Attending(group, kv_heads, d, softmax)(x, Tokens(kv, 1500, row))
    q, k, v = products.view(-1, d).split([group * kv_heads, kv_heads, kv_heads])
    before[:, :, row] = torch.stack([k, v])
    torch.testing.assert_close(kv, before, rtol=0, atol=0, equal_nan=True)
    near(out.view(-1, d), decode_attention_ref(q.double(), *before[:, :, :1500].double(), softmax))


def test_attentions_of_several_layers_have_their_own_tokens():
    group, kv_heads, d = 2, 2, 16
    chained = Attending(group, kv_heads, d, Softmax(1.0), seeds=(1, 2))
    x, held = noise(1, D), (1500, 4)
    caches = [cache_of(kv_heads, d, count, 1501) for count in held]
    _, *outs = chained(x, *[Tokens(kv, count + 1) for kv, count in zip(caches, held, strict=True)])
    for out, kv, count, weight in zip(outs, caches, held, chained.weights, strict=True):
        q = (x.double() @ weight.T).view(-1, d)[: group * kv_heads]
        k, v = kv[:, :, : count + 1].double()
        near(out.view(-1, d), decode_attention_ref(q, k, v, Softmax(1.0)))


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_gives_the_same(threads, monkeypatch):
    """Also more than there are: a thread takes what nobody has taken."""
    chained = Attending(8, 3, 20)
    x, kv = noise(1, D), cache_of(3, 20, 3000, 3001)
    expected = chained(x, Tokens(kv, 3001))
    use = chain.use_threads
    monkeypatch.setattr(chain, "use_threads", lambda numbers: (use(numbers), threads)[1])
    for found, wanted in zip(chained(x, Tokens(kv, 3001)), expected, strict=True):
        assert torch.equal(found, wanted)
