"""Gates: what they mix against plain loops, and where the loss sends them."""

import math

import pytest
import torch
from families import KV_HEADS, LAYERS, tiny_checkpoint

from kvcli.inputs.profiles import resolve_profile
from kvcli.kernels.softmax import Softmax
from kvcli.models.loading import ModelSpec, load_model
from kvcli.quality.calibrate import tensors as gates_module
from kvcli.quality.calibrate.tensors import Gates, gated_attention
from kvcli.quality.fidelity import Passage
from kvcli.runtime.engine import engine


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_a_gate_mixes_everything_with_sinks_and_window(sinks):
    n, d, sink, window, gate = 9, 4, 2, 3, torch.tensor([0.3, 1.0])
    q, k, v = (torch.randn(h, n, d, dtype=torch.float64) for h in (4, 2, 2))
    out = gated_attention(q, k, v, Softmax(0.5, sinks=sinks), gate, sink, window)
    for h in range(4):
        for i in range(n):
            mixed = 0
            for part, seen in ((gate[h // 2], range(i + 1)), (1 - gate[h // 2], None)):
                tokens = seen or [j for j in range(i + 1) if j < sink or i - j < window]
                exps = [math.exp(0.5 * float(q[h, i] @ k[h // 2, j])) for j in tokens]
                norm = sum(exps) + (0 if sinks is None else math.exp(sinks[h]))
                mixed = mixed + part * sum(e * v[h // 2, j] for e, j in zip(exps, tokens, strict=True)) / norm
            assert torch.allclose(out[h, i], mixed.double(), atol=1e-6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(ModelSpec(str(tiny_checkpoint("gemma2", tmp_path_factory.mktemp("gemma2")))))


def found(model, **settings):
    ids = torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    passage = Passage("random", ids[:36], ids[36:])
    source = Gates(resolve_profile("duoattention", overrides=settings), model.geometry.layers)
    with engine(model, [passage.capacity]) as ready:
        for _ in range(2):
            source.read(ready, passage, lambda _: None)
    return source.tensors()["gates"]


def test_gates_fall_where_nothing_is_lost_and_stay_where_it_matters(model, monkeypatch):
    monkeypatch.setattr(gates_module, "LEARNING_RATE", 0.1)
    monkeypatch.setattr(gates_module, "ROUNDS", 8)
    sliding = [layer.index for layer in model.geometry.layers if layer.window is not None]
    split = [layer for layer in range(LAYERS) if layer not in sliding]
    lost_nothing = found(model, sink=0, window=64)
    assert lost_nothing.shape == (LAYERS, KV_HEADS)
    assert not lost_nothing[split].any()
    assert (lost_nothing[sliding] == 1).all()
    narrow = found(model, sink=0, window=2)
    assert (narrow[split] > 0.5).any()
    assert narrow.min() >= 0
    assert narrow.max() <= 1


def test_the_gradient_is_that_of_small_differences(model):
    ids = torch.randint(3, 90, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    source = Gates(resolve_profile("duoattention", overrides={"sink": 1, "window": 3}), model.geometry.layers)
    with engine(model, [30]) as ready:
        ready.rope.use([30])

        def loss(gates):
            return source._last_hidden(ready, ids, 4, gates).square().mean()

        gates = torch.full((LAYERS, KV_HEADS), 0.5, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss(gates), gates)
        for layer in source.layers:
            step = torch.zeros_like(gates)
            step[layer, 0] = 0.02
            with torch.no_grad():
                slope = (loss(gates + step) - loss(gates - step)) / 0.04
            assert torch.isclose(gradient[layer, 0], slope, rtol=0.05, atol=1e-4)
