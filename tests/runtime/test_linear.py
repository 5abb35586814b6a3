import pytest
import torch
from torch import nn

from kvcli.runtime.linear import cpu_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 37), (3, 1, 37), (1, 65, 37), (5, 37)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_same_as_torch_within_rounding(shape, bias, dtype, error):
    torch.manual_seed(0)
    layer, x = nn.Linear(37, 19, bias=bias).to(dtype), torch.randn(shape).to(dtype)
    exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    with torch.inference_mode(), cpu_linears(nn.Sequential(layer)):
        out = layer(x)
    assert out.dtype == dtype
    assert out.shape == (*shape[:-1], 19)
    assert float((out.double() - exact).detach().norm() / exact.detach().norm()) < error


def test_the_forward_comes_back_and_strangers_are_left_alone():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Linear(4, 4).half())
    with cpu_linears(model):
        assert ["forward" in vars(layer) for layer in model] == [True, False, False]
    assert not any("forward" in vars(layer) for layer in model)
