"""LM-Infinite attends to the sinks and the newest tokens; test_actqkv.py holds its outputs against an oracle."""

import torch
from driver import HK, SOFTMAX, D, H, layers
from engine import new_method

SETTINGS = {"budget": 64, "sink": 8, "window": 24, "page_size": 8, "prefill_window": 10}


def test_it_attends_to_the_first_and_the_newest_tokens():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(heads, 230, D, generator=generator) for heads in (H, HK, HK))
    method = new_method("lm_infinite", SETTINGS, layers(), 230)
    for start in range(0, 200, 10):
        part = slice(start, start + 10)
        method.attend_window(1, q[:, part], k[:, part], v[:, part], SOFTMAX)
    for at in range(200, 230):
        method.attend(1, q[:, at], k[:, at], v[:, at], SOFTMAX)
        attended = method.attended(1)[0].nonzero()[:, 0].tolist()
        newest = attended[8:]
        assert attended[:8] == list(range(8))
        assert newest == list(range(newest[0], at + 1))
        assert 64 - 8 < len(attended) <= 64
