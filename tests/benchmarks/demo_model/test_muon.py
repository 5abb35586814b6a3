"""Muon in float32, beside torch's own, which computes in bfloat16."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "demo_model"))

from muon import Muon, orthogonalised


def test_singular_values_come_out_near_one_in_both_shapes():
    torch.manual_seed(0)
    for shape in ((3, 8, 20), (2, 20, 8)):
        matrices = torch.randn(shape)
        found = orthogonalised(matrices)
        values = torch.linalg.svdvals(found)
        assert ((values > 0.6) & (values < 1.3)).all()
        u, _, v = torch.linalg.svd(matrices, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(found.flatten(), (u @ v).flatten(), dim=0) > 0.97


def test_steps_are_those_of_torch_in_bfloat16_up_to_rounding():
    torch.manual_seed(0)
    start = [torch.randn(8, 20), torch.randn(20, 8), torch.randn(8, 20)]
    moved = []
    for make in (
        lambda weights: Muon(weights, lr=1e-2),
        lambda weights: torch.optim.Muon(weights, lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    ):
        weights = [torch.nn.Parameter(weight.clone()) for weight in start]
        optimizer = make(weights)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        moved.append(torch.cat([(weight - own).detach().flatten() for weight, own in zip(weights, start, strict=True)]))
    assert torch.allclose(moved[0], moved[1], atol=0.05 * float(moved[1].abs().max()))


def test_a_weight_without_gradient_stays():
    weights = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(2, 3))]
    weights[0].grad = torch.randn(2, 3)
    Muon(weights).step()
    assert not torch.equal(weights[0], torch.ones(2, 3))
    assert torch.equal(weights[1], torch.ones(2, 3))
