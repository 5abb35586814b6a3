"""Sizes of channels of pools of single tokens: measured once, and those of another pool where its pages are read."""

import copy
from dataclasses import replace

import pytest
import torch

from kvcli.kernels.quant import TOKENS, channel_sizes
from kvcli.memory.disk_tier import DiskTier
from kvcli.memory.host_pool import DiskPagePool, page_pool
from kvcli.memory.tiers import Tiers

HK, D, COUNT = 2, 16, 3 * TOKENS
HOST = replace(Tiers.for_device(torch.device("cpu"), torch.float32), kv_dtype="int4")


@pytest.fixture(params=["host", "disk"])
def tiers(request, tmp_path):
    if request.param == "host":
        yield HOST
        return
    with DiskTier(tmp_path, 1 << 14) as tier:
        on_disk = replace(HOST, disk=tier.share())
        assert isinstance(page_pool(HK, D, 1, COUNT, on_disk), DiskPagePool)
        yield on_disk


def tokens(seed, factor=1.0):
    return factor * torch.randn(2, HK, COUNT, 1, D, generator=torch.Generator().manual_seed(seed))


def read(pool, count=COUNT):
    heads = torch.arange(HK).repeat(count)
    return pool.fetch(torch.arange(count).repeat_interleave(HK), heads)


def test_they_are_measured_by_the_first_tokens_and_stay(tiers):
    k, v = tokens(1)
    pool = page_pool(HK, D, 1, COUNT, tiers)
    pool.write(0, k[:, :0], v[:, :0])  # nothing yet
    pool.write(0, k[:, :TOKENS], v[:, :TOKENS])
    before = read(pool, TOKENS)
    pool.write(TOKENS, 100 * k[:, TOKENS:], v[:, TOKENS:])
    assert torch.equal(pool.sizes, channel_sizes(k[:, :TOKENS, 0]))
    assert torch.equal(read(pool, TOKENS), before)
    assert (before[:, 0, 0].view(TOKENS, HK, D).transpose(0, 1) - k[:, :TOKENS, 0]).abs().max() < 1


def test_who_reads_pages_of_another_pool_has_its_sizes(tiers):
    lender, borrower = (page_pool(HK, D, 1, COUNT, tiers) for _ in range(2))
    lender.write(0, *tokens(1, factor=50.0))
    assert borrower.share(lender, TOKENS)
    borrower.write(0, *tokens(2))  # of which the first ones are taken to be those that are there
    assert torch.equal(borrower.sizes, lender.sizes)
    assert torch.equal(read(borrower, TOKENS), read(lender, TOKENS))
    others = read(borrower)[TOKENS * HK :, 0, 0].view(-1, HK, D).transpose(0, 1)
    assert (others - tokens(2)[0, :, TOKENS:, 0]).abs().max() < 1


def test_too_few_tokens_to_measure_by_are_not_shared(tiers):
    lender, borrower = (page_pool(HK, D, 1, COUNT, tiers) for _ in range(2))
    lender.write(0, *tokens(1))
    assert not borrower.share(lender, TOKENS - 1)
    borrower.write(0, *tokens(2, factor=50.0))
    assert torch.equal(borrower.sizes, channel_sizes(tokens(2, factor=50.0)[0, :, :, 0]))


@pytest.mark.parametrize("written", [0, 7])
def test_a_copy_goes_on_with_its_own(tiers, written):
    pool = page_pool(HK, D, 1, COUNT, tiers)
    pool.write(0, *tokens(1)[:, :, :written])
    other = copy.deepcopy(pool)
    rest = tokens(2, factor=50.0)[:, :, written:]
    other.write(written, *rest)
    pool.write(written, *tokens(1)[:, :, written:])
    assert torch.equal(read(pool, written), read(other, written))
    for each, first in ((pool, tokens(1)), (other, tokens(1) if written else rest)):
        assert torch.equal(each.sizes, channel_sizes(first[0, :, : written or TOKENS, 0]))
