"""Products of a few rows at the edges of their sizes, and what they refuse; `test_triton.py` has the usual ones."""

import pytest
import torch

from kvcli.kernels import _triton
from kvcli.kernels.skinny_linear import MOST_ROWS, InputNorm, skinny_linear, skinny_linear_ref, starts_early


@pytest.fixture(autouse=True)
def kernels_take_all(monkeypatch):
    monkeypatch.setattr(_triton, "on_cpu", True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "out", "width"), [(1, 1, 1), (MOST_ROWS, 17, 5), (2, 8, 128), (3, 33, 1030)])
def test_sizes_that_no_block_divides(rows, out, width, gated):
    generator = torch.Generator().manual_seed(rows)
    height = 2 * out if gated else out
    x, weight = torch.randn(rows, width, generator=generator), torch.randn(height, width, generator=generator)
    weight /= width**0.5
    bias, residual = torch.randn(height, generator=generator), torch.randn(rows, out, generator=generator)
    given = bias, residual, InputNorm(torch.randn(width, generator=generator), 1e-5)
    wide = bias.double(), residual.double(), InputNorm(given[2].weight.double(), 1e-5)
    exact = skinny_linear_ref(x.double(), weight.double(), *wide, gated)
    torch.testing.assert_close(skinny_linear(x, weight, *given, gated).double(), exact, rtol=1e-5, atol=1e-5)


def test_no_row_takes_anything_from_another():
    x, weight = torch.randn(4, 64), torch.randn(20, 64)
    x[2] = float("nan")
    found = skinny_linear(x, weight, norm=InputNorm(torch.ones(64), 1e-6))
    assert found[2].isnan().all()
    alone = torch.cat([skinny_linear(row[None], weight, norm=InputNorm(torch.ones(64), 1e-6)) for row in x])
    torch.testing.assert_close(found, alone, rtol=0, atol=0, equal_nan=True)


def test_what_it_cannot_read_is_refused():
    x, weight = torch.randn(2, 16), torch.randn(6, 16)
    with pytest.raises(ValueError, match="9 rows"):
        skinny_linear(torch.randn(9, 16), weight)
    with pytest.raises(ValueError, match="weight has shape"):
        skinny_linear(x, weight[:, :8])
    with pytest.raises(ValueError, match="weight is"):
        skinny_linear(x, weight.bfloat16())
    with pytest.raises(ValueError, match="bias has shape"):
        skinny_linear(x, weight, torch.randn(5))
    with pytest.raises(ValueError, match="residual has shape"):
        skinny_linear(x, weight, None, torch.randn(1, 6))
    with pytest.raises(ValueError, match="weight of the norm"):
        skinny_linear(x, weight, norm=InputNorm(torch.randn(6), 1e-6))


def test_only_devices_of_a_capability_start_early(monkeypatch):
    assert not starts_early(torch.empty(1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(1, device="cuda")
        assert not starts_early(x)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        assert starts_early(x)
