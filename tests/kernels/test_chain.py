"""Linear layers one after another in one loop, against torch in float64."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from kvcli.kernels import _numba, gemv, packed_linear
from kvcli.kernels.chain import Chain, Gate, Normalised, Products, TurnedHeads
from kvcli.kernels.norm_rope import Rotation, rms_norm_ref, rotate_ref
from kvcli.kernels.packed_linear import PACKINGS, PackedWeight

pytestmark = pytest.mark.skipif(_numba.numba is None, reason="numba is not there")

D = 64


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
