"""Kernels that quantise keys to bits, score by them, and resolve tokens, against loops in float64."""

import math

import pytest
import torch

from kvcli.kernels.one_bit_keys import quantise_keys
from kvcli.kernels.one_bit_scores import one_bit_scores
from kvcli.kernels.resolve_tokens import resolve_tokens

HK, G = 2, 3


def keys(groups, size, d, dtype=torch.float32):
    return torch.randn(HK, groups, size, d, generator=torch.Generator().manual_seed(groups)).to(dtype)


def dequantised(k):
    """Every key as code * s + z, by channel and group, in plain loops; the bits beside it."""
    heads, groups, _, d = k.shape
    values, bits = torch.zeros(k.shape, dtype=torch.float64), torch.zeros(k.shape, dtype=torch.bool)
    for head in range(heads):
        for group in range(groups):
            for c in range(d):
                channel = k[head, group, :, c].tolist()
                z = torch.tensor((max(channel) + min(channel)) / 2).to(k.dtype).item()
                s = torch.tensor((max(channel) - min(channel)) / 2).to(k.dtype).item()
                for t, value in enumerate(channel):
                    bits[head, group, t, c] = value >= z
                    values[head, group, t, c] = z + s if value >= z else z - s
    return values, bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "d"), [(5, 8), (32, 13), (1, 16), (7, 3)])
def test_codes_are_signs_about_the_middle_eight_to_a_byte(dtype, size, d):
    k = keys(3, size, d, dtype)
    codes, ranges = quantise_keys(k)
    assert codes.shape == (HK, 3, size, math.ceil(d / 8))
    assert (codes.dtype, ranges.dtype) == (torch.uint8, dtype)
    _, bits = dequantised(k)
    for c in range(d):
        assert torch.equal((codes[..., c // 8] >> c % 8) & 1 == 1, bits[..., c])
    spare = codes[..., -1].int() >> ((d - 1) % 8 + 1)
    assert not spare.any(), "bits of no channel are not set"


def test_a_key_in_the_middle_counts_as_above():
    k = torch.tensor([-1.0, 0.0, 1.0]).view(1, 1, 3, 1)
    codes, ranges = quantise_keys(k)
    assert codes.flatten().tolist() == [0, 1, 1]
    assert ranges.flatten().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "d"), [(5, 8), (32, 13), (8, 64)])
def test_scores_are_those_of_the_dequantised_keys(dtype, size, d):
    k = keys(4, size, d, dtype)
    q = torch.randn(HK, G, d, generator=torch.Generator().manual_seed(7)).to(dtype)
    found = one_bit_scores(q, *quantise_keys(k))
    values, _ = dequantised(k)
    expected = torch.einsum("hgd,hntd->hgnt", q.double(), values).flatten(2)
    error = (found.double() - expected).norm() / expected.norm()
    assert found.shape == (HK, G, 4 * size)
    assert error < 1e-6


def test_no_group_no_scores():
    assert one_bit_scores(torch.ones(HK, G, 8), *quantise_keys(keys(1, 4, 8)[:, :0])).shape == (HK, G, 0)


def test_quantised_keys_take_an_eighth_at_groups_of_32_in_16_bits():
    k = keys(3, 32, 64, torch.bfloat16)
    codes, ranges = quantise_keys(k)
    assert codes.nbytes + ranges.nbytes == k.nbytes / 8


@pytest.mark.parametrize("wanted", [1, 4, 6])
def test_resolution_fetches_what_is_missing_into_slots_that_are_free(wanted):
    generator = torch.Generator().manual_seed(wanted)
    for _ in range(50):
        resident = torch.stack([torch.randperm(13, generator=generator)[:6] for _ in range(HK)])
        selected = torch.stack([torch.randperm(13, generator=generator)[:wanted] for _ in range(HK)])
        resident[0, :2] = -1
        misses, leaving = resolve_tokens(resident, selected, 13)
        after = resident.clone()
        after[leaving] = -1
        after[misses.heads, misses.slots] = misses.pages
        for head in range(HK):
            held, chosen = set(resident[head].tolist()), set(selected[head].tolist())
            assert set(after[head].tolist()) - {-1} == chosen
            assert (after[head] != -1).sum() == wanted, "none is held twice"
            stays = torch.tensor([token in chosen for token in resident[head].tolist()])
            assert torch.equal(after[head][stays], resident[head][stays]), "hits do not move"
            assert torch.equal(leaving[head], ~stays)
            assert int((misses.heads == head).sum()) == len(chosen - held)


def test_resolution_of_a_hit_moves_nothing():
    misses, leaving = resolve_tokens(torch.tensor([[3, 5, -1]]), torch.tensor([[5, 3]]), 6)
    assert all(len(part) == 0 for part in misses)
    assert leaving.tolist() == [[False, False, True]]
