"""The page loss against its definition, written out query by query and page by page."""

import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "demo_model"))

from architecture import demo_config
from page_loss import PAGE, SINK, WINDOW, Recorder, page_loss


def reference(query, key, rows):
    heads, d = query.shape[1], query.shape[3]
    group = heads // key.shape[1]
    total = 0.0
    for batch, position in rows.tolist():
        for head in range(heads):
            q, k = query[batch, head, position], key[batch, head // group]
            probability = (k[: position + 1] @ q / math.sqrt(d)).softmax(0)
            masses, bounds = [], []
            for start in range(0, k.shape[0] - PAGE + 1, PAGE):
                if start < SINK or start + PAGE > position + 1 - WINDOW:
                    continue
                page = k[start : start + PAGE]
                masses.append(probability[start : start + PAGE].sum())
                bounds.append(torch.maximum(q * page.amin(0), q * page.amax(0)).sum() / math.sqrt(d))
            if masses:
                mass = torch.stack(masses)
                total -= (mass * mass.max() * torch.stack(bounds).log_softmax(0)).sum()
    return total / (len(rows) * heads)


def draw(seed, length, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    query = scale * torch.randn(2, 4, length, 8, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 2, length, 8, generator=generator, dtype=torch.float64)
    return query, key


@pytest.mark.parametrize("length", [257, 300, 351])
def test_page_loss_is_its_definition(length):
    query, key = draw(length, length, scale=3.0)
    rows = torch.tensor([[0, length - 1], [1, length - 40], [1, 200], [0, 150], [1, 20]])
    assert torch.allclose(page_loss(query, key, rows), reference(query, key, rows), rtol=1e-6)


def test_without_queries_or_candidates_the_loss_is_zero():
    query, key = draw(1, 130)
    assert page_loss(query, key, torch.zeros(0, 2, dtype=torch.long)) == 0.0
    assert page_loss(query, key, torch.tensor([[0, 129], [1, 3]])) == 0.0


def test_descending_it_ranks_the_attended_page_first():
    query, key = draw(5, 352)
    target = 5 * PAGE + 7
    query[0, :, 351] = 4.0 * key[0, 0, target]  # attends to the target, though other pages have larger bounds
    rows = torch.tensor([[0, 351]])
    free = key.clone().requires_grad_()
    optimizer = torch.optim.Adam([free], lr=0.03)
    before = page_loss(query[:, :2], free[:, :1], rows).item()
    for _ in range(60):
        loss = page_loss(query[:, :2], free[:, :1], rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.6 * before


def test_recorder_keeps_the_latest_queries_and_keys_and_changes_nothing():
    torch.manual_seed(3)
    model = LlamaForCausalLM(demo_config(50, 64, width=64, layers=3)).eval()
    ids = torch.randint(0, 50, (2, 37))
    with torch.no_grad():
        before = model(ids).logits
        recorder = Recorder(model)
        after = model(ids).logits
    assert torch.allclose(before, after, atol=1e-6)
    assert sorted(recorder.queries) == sorted(recorder.keys) == [0, 1, 2]
    assert recorder.queries[2].shape == (2, 2, 37, 32)
    assert recorder.keys[2].shape == (2, 1, 37, 32)
