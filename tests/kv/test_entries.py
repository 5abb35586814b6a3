"""Caches of layers whose entries stand for several tokens, against a softmax over the last tokens and the entries."""

import pytest
import torch

from kvcli.kernels.softmax import Softmax
from kvcli.kv.entries import attend_to_entries, ended
from kvcli.memory.tiers import nbytes
from kvcli.methods import get_method
from kvcli.methods.contract import SequenceContext
from kvcli.models.layers import LayerGeometry, OwnSelection

H, D, C, RATE, NEAR, TOP = 4, 8, 6, 4, 5, 3
CAPACITY = 41
INDEXED = OwnSelection(TOP, C, 1, alone=True, rate=RATE, near=NEAR)
WHOLE = OwnSelection(0, 0, 1, alone=True, rate=RATE, near=NEAR)
KINDS = [("full", {}), ("native", {"slots": TOP + 1}), ("native", {"slots": 4096})]


def layer_of(selects):
    return LayerGeometry(0, H, 1, selects.channels + 2 * D, None, True, latent=D, selects=selects)


def rows_of(count, layer):
    """Random rows: entries in those that end one, and zeros in the others."""
    rows = torch.randn(1, count, layer.head_dim, generator=torch.Generator().manual_seed(1))
    ends = torch.arange(count) % RATE == RATE - 1
    rows[:, ~ends, : layer.index_channels] = 0
    return rows


def chosen_of(length, layer, seed):
    """The entries that a query selects, filled up with those that are none."""
    entries = length // RATE
    if not layer.selects.tokens:
        return torch.arange(entries)[None]
    chosen = torch.randperm(entries, generator=torch.Generator().manual_seed(seed))[:TOP]
    return torch.cat((chosen, torch.full((TOP - len(chosen),), -1)))[None]


def expected(q, rows, length, chosen, sinks):
    """Attend with q [H, d] after `length` rows, in float64."""
    keys = rows[0, max(0, length - NEAR) : length, -D:]
    entries = [rows[0, RATE * int(each) + RATE - 1, -2 * D : -D] for each in chosen[0] if each >= 0]
    keys = torch.stack([*keys, *entries]).double()
    scores = torch.cat((q.double() @ keys.T * 0.3, sinks[:, None].double()), 1)
    return (scores.softmax(-1)[:, :-1] @ keys).float()


@pytest.fixture(params=[INDEXED, WHOLE], ids=["indexed", "whole"])
def layer(request):
    return layer_of(request.param)


def cache_of(layer, name, settings, device="cpu"):
    method = get_method(name)
    context = SequenceContext.of(1, torch.device(device), torch.float32, CAPACITY)
    return method(method.Config(**settings), [layer], context)


@pytest.mark.parametrize(("name", "settings"), KINDS)
@pytest.mark.parametrize("read", [1, 3, 4, 19, 20])
def test_a_step_attends_to_the_last_tokens_and_the_entries_selected(layer, name, settings, read):
    rows, sinks = rows_of(CAPACITY, layer), torch.randn(H)
    method = cache_of(layer, name, settings)
    if read > 2:
        method.take_part(0, rows[:, : read - 1], rows[:, : read - 1])
    method.prefill(0, rows[:, :read], rows[:, :read], torch.empty(H, 0, D), Softmax(0.3))
    for at in range(read, CAPACITY):
        q, chosen = torch.randn(H, D), chosen_of(at + 1, layer, at)
        softmax = Softmax(0.3, sinks=sinks, selected=chosen[:, None])
        out = method.attend(0, q, rows[:, at], rows[:, at], softmax)
        torch.testing.assert_close(out, expected(q, rows, at + 1, chosen, sinks))
        seen = torch.zeros(1, at + 1, dtype=torch.bool)
        seen[:, -NEAR:] = True
        for entry in chosen[0][chosen[0] >= 0]:
            seen[:, RATE * int(entry) : RATE * int(entry) + RATE] = True
        assert torch.equal(method.attended(0), seen)


@pytest.mark.parametrize("part", [1, 2, 7, 41])
def test_a_prompt_attends_to_the_same(layer, part):
    rows, sinks, q = rows_of(CAPACITY, layer), torch.randn(H), torch.randn(H, CAPACITY, D)
    for start in range(0, CAPACITY, part):
        stop = min(start + part, CAPACITY)
        chosen = [chosen_of(at + 1, layer, at)[0] for at in range(start, stop)]
        widest = max(map(len, chosen))
        selected = torch.stack([torch.cat((each, each.new_full((widest - len(each),), -1))) for each in chosen])[None]
        out = attend_to_entries(q[:, start:stop], rows[:, :stop], Softmax(0.3, sinks=sinks, selected=selected), layer)
        for at in range(start, stop):
            wanted = expected(q[:, at], rows, at + 1, chosen[at - start][None], sinks)
            torch.testing.assert_close(out[:, at - start], wanted)


def test_entries_are_found_in_rows(layer):
    rows = rows_of(CAPACITY, layer)
    assert ended(rows, layer).shape == (1, CAPACITY // RATE, layer.index_channels)
    assert ended(rows[:, : RATE - 1], layer).shape[1] == 0
    assert layer.of_entries.head_dim == layer.index_channels == D + layer.selects.channels


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cache_holds_entries_in_place_of_tokens(layer, device):
    entries, index = CAPACITY // RATE, layer.selects.channels
    full = cache_of(layer, "full", {}, device).footprint()
    assert (full.device, full.host) == (4 * (NEAR * D + entries * (D + index)), 0)
    native = cache_of(layer, "native", {"slots": TOP + 1}, device).footprint()
    assert native.host == (4 * entries * D if index else 0)
    assert layer.grows == -(-(D + index) // RATE)


def test_what_is_not_written_is_not_read(layer):
    rows, method = rows_of(CAPACITY, layer), cache_of(layer, "full", {})
    cache = method.caches[0]
    for tensor in (cache.near.kv, cache.entries.kv):
        tensor.fill_(float("nan"))
    cache.load(rows[:, :2], rows[:, :2])
    softmax = Softmax(0.3, selected=torch.empty(1, 1, 0, dtype=torch.long))
    assert cache.attend(torch.randn(H, D), softmax).isfinite().all()
    assert nbytes(cache.near.kv) == 4 * NEAR * D
