import pytest
import torch

from kvcli.kernels import selected_attention as kernel
from kvcli.kernels.block_attention import add_sinks, merge_blocks
from kvcli.kernels.selected_attention import part_of_selection, selected_attention
from kvcli.kernels.softmax import Softmax

H, HK, M, N, C, D = 6, 3, 11, 29, 7, 5


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("at_once", [1, kernel.AT_ONCE])
def test_a_query_attends_to_its_own_tokens(apart, sinks, softcap, at_once, monkeypatch):
    monkeypatch.setattr(kernel, "AT_ONCE", at_once)
    torch.manual_seed(0)
    q, k, v = torch.randn(H, M, D), torch.randn(HK, N, D), torch.randn(HK, N, D + 2)
    heads = HK if apart else 1
    selected = torch.stack([torch.randperm(N)[:C] for _ in range(heads * M)]).view(heads, M, C)
    selected[:, ::2, -3:] = -1  # some have fewer
    k[:, 0], v[:, 0] = 100.0, 100.0  # no token is read in the place of none
    selected[selected == 0] = 1
    softmax = Softmax(0.3, softcap, torch.randn(H) if sinks else None, selected)
    found = selected_attention(q, k, v, softmax)
    for h in range(H):
        for i in range(M):
            mine = [j for j in selected[h // 2 if apart else 0, i].tolist() if j >= 0]
            scores = 0.3 * k[h // 2, mine].double() @ q[h, i].double()
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            extra = [] if not sinks else [softmax.sinks[h].double()[None]]
            weights = torch.cat([scores, *extra]).softmax(0)[: len(mine)]
            assert torch.allclose(found[h, i].double(), weights @ v[h // 2, mine].double(), atol=1e-5)


def test_keys_that_are_values_are_gathered_once():
    torch.manual_seed(0)
    q, k = torch.randn(H, M, D), torch.randn(HK, N, D)
    softmax = Softmax(1.0, selected=torch.randint(0, N, (1, M, C)))
    assert torch.equal(selected_attention(q, k, k, softmax), selected_attention(q, k, k.clone(), softmax))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_parts_of_a_selection_are_merged_into_the_whole(apart, sinks):
    torch.manual_seed(0)
    q, k, v = torch.randn(H, D), torch.randn(HK, N, D), torch.randn(HK, N, D + 2)
    selected = torch.stack([torch.randperm(N)[:C] for _ in range(HK if apart else 1)])
    softmax = Softmax(0.3, None, torch.randn(H) if sinks else None, selected[:, None])
    of_first = torch.rand(selected.shape) < 0.5
    of_first[0] = False  # there a part is empty
    parts = [part_of_selection(q, k, v, selected.masked_fill(~mine, -1), softmax) for mine in (of_first, ~of_first)]
    assert torch.equal(parts[0][0][: H // len(selected)], torch.zeros(H // len(selected), D + 2))
    out, lse = merge_blocks(*parts)
    out = out if softmax.sinks is None else add_sinks(out, lse, softmax.sinks)
    assert torch.allclose(out, selected_attention(q[:, None], k, v, softmax)[:, 0], atol=1e-6)
