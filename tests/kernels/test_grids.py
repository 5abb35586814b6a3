"""Grids of kernels whose programs grow with the context, at a million tokens: what a device does not take."""

import pytest
import torch
from fake_cuda import CUDA, fake_cuda

from kvcli.kernels.page_scores import page_scores_device
from kvcli.kernels.page_table import SlotLayout
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores_device
from kvcli.kernels.topk import Selection, topk_pages_device

TOKENS, LAYOUT = 1 << 20, SlotLayout(1, 16, 2016, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "d"), [(128, 576), (32, 128)], ids=["latents", "keys"])
def test_tokens_and_pages_of_one_token_are_scored(heads, d, dtype, monkeypatch):
    kv_heads = 1 if d > 256 else 8
    with fake_cuda(monkeypatch) as (launched, _):
        q, lengths = torch.empty(1, heads, d, device=CUDA, dtype=dtype), torch.empty(1, device=CUDA, dtype=torch.int32)
        keys = torch.empty(1, kv_heads, TOKENS, d, device=CUDA, dtype=dtype)
        bounds = torch.empty(1, kv_heads, TOKENS, 2, d, device=CUDA, dtype=dtype)
        out = torch.empty(1, kv_heads, TOKENS, device=CUDA, dtype=torch.float32)
        token_scores_device(q, keys, lengths, LAYOUT, Softmax(1.0), "mean_s", out)
        page_scores_device(q, bounds, lengths, LAYOUT, 1.0, "mean_s", out)
    pooled = ["_norm_kernel", "_pool_kernel"]  # of many blocks
    assert launched == ["_token_kernel", *pooled, "_score_kernel", *pooled]


@pytest.mark.parametrize("k", [3, 700, 2016])
@pytest.mark.parametrize("entries", [5, 9000, TOKENS])
def test_as_many_are_chosen_as_are_wanted(entries, k, monkeypatch):
    with fake_cuda(monkeypatch) as (launched, _):
        lengths = torch.empty(1, device=CUDA, dtype=torch.int32)
        scores = torch.empty(1, 8, entries, device=CUDA)
        topk_pages_device(scores, lengths, LAYOUT._replace(selected=k), Selection.empty(scores, k))
    assert launched == ["_topk_kernel"]
