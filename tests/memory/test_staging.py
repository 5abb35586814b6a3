"""Uploads through pinned buffers, with copies that happen as late as the events allow."""

import copy
from itertools import count

import pytest
import torch
from registrar import FakeRegistrar

from kvcli.kv import dense as token_major
from kvcli.kv.cache import Tiers
from kvcli.kv.dense import TokenMajorCache
from kvcli.kv.pages import paged
from kvcli.memory import host_pool
from kvcli.memory import pinned as staging
from kvcli.memory.host_pool import HostPagePool
from kvcli.memory.pinned import PinnedAllocator, PinnedStaging

CPU = torch.device("cpu")


class Late(torch.Tensor):
    """A tensor into which copies happen only when they are waited for."""

    pending: list

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.copy_:
            return super().__torch_function__(func, types, args, kwargs or {})
        target, source = (x.as_subclass(torch.Tensor) for x in args)
        cls.pending.append(lambda: target.copy_(source))
        return args[0]


class Event:
    """Comes after the copies begun before it."""

    def __init__(self):
        self.after = len(Late.pending)
        self.waited = False

    def synchronize(self):
        self.waited = True
        for index in range(self.after):
            Late.pending[index]()
            Late.pending[index] = lambda: None


@pytest.fixture
def notes():
    return FakeRegistrar()


@pytest.fixture
def late(notes):
    Late.pending = []
    allocator = PinnedAllocator(notes)
    yield PinnedStaging(allocator, Event)
    allocator.close()


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_buffer_is_not_filled_again_before_its_copy_is_done(rows, dtype, late, notes, monkeypatch):
    monkeypatch.setattr(staging, "BUFFER_BYTES", 50)
    source = torch.arange(rows * 6).view(rows, 2, 3).to(dtype)
    uploads = []
    for _ in range(3):
        target = torch.zeros_like(source).as_subclass(Late)
        late.upload(target, lambda out, part: out.copy_(source[part]))
        uploads.append(target.as_subclass(torch.Tensor))
    Event().synchronize()
    assert all(torch.equal(found, source) for found in uploads)
    assert len(notes.sizes) <= 2
    assert set(notes.sizes) <= {50}


def test_rows_longer_than_a_buffer_get_longer_buffers(late, notes, monkeypatch):
    monkeypatch.setattr(staging, "BUFFER_BYTES", 8)
    for width in (1, 5, 2):
        source = torch.arange(4.0 * width).view(4, width)
        target = torch.zeros_like(source).as_subclass(Late)
        late.upload(target, lambda out, part, source=source: out.copy_(source[part]))
        Event().synchronize()
        assert torch.equal(target.as_subclass(torch.Tensor), source)
    assert notes.sizes == [8, 8, 20, 20]


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("piece_bytes", [300, 1 << 20])
def test_a_pool_is_fetched_through_the_buffers(layout, piece_bytes, notes, monkeypatch):
    heads, d, size, pages = 3, 5, 2, 7
    monkeypatch.setattr(staging, "BUFFER_BYTES", 170)
    monkeypatch.setattr(host_pool, "PIECE_BYTES", piece_bytes)
    allocator, copies = PinnedAllocator(notes), count()

    class Copied:
        def synchronize(self):
            next(copies)

    tiers = Tiers(CPU, CPU, torch.float32, allocator, PinnedStaging(allocator, Copied))
    pool = HostPagePool(heads, d, size, pages, tiers, layout)
    k, v = torch.randn(2, heads, pages, size, d, generator=torch.Generator().manual_seed(0))
    pool.write(0, k, v)
    order = torch.randperm(pages * heads, generator=torch.Generator().manual_seed(1))
    blocks = pool.fetch(order // heads, order % heads)
    assert torch.equal(blocks, torch.stack((k, v), 2)[order % heads, order // heads])
    assert next(copies) == 11 - 2, "two blocks of 80 bytes at a time"
    assert copy.deepcopy(tiers).staging is tiers.staging
    allocator.close()


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("at_once", [1, 500, 1 << 20])
def test_prompts_reach_the_host_a_part_at_a_time(layout, at_once, notes, monkeypatch):
    heads, d, size, pages = 3, 5, 2, 7
    monkeypatch.setattr(host_pool, "OFFLOAD_BYTES", at_once)
    monkeypatch.setattr(token_major, "OFFLOAD_BYTES", at_once)
    allocator = PinnedAllocator(notes)
    tiers = Tiers(CPU, CPU, torch.float32, allocator)
    k, v = torch.randn(2, heads, pages * size, d, generator=torch.Generator().manual_seed(0))
    pool = HostPagePool(heads, d, size, pages, tiers, layout)
    pool.write(0, *(paged(x.as_subclass(OnGpu), size) for x in (k, v)))
    index = torch.arange(pages * heads)
    blocks = pool.fetch(index // heads, index % heads)
    assert torch.equal(blocks, torch.stack((paged(k, size), paged(v, size)), 2)[index % heads, index // heads])
    cache = TokenMajorCache(heads, d, 20, tiers, offload=True)
    assert cache.load(k.as_subclass(OnGpu), v.as_subclass(OnGpu)) == k.nbytes + v.nbytes
    assert all(torch.equal(*pair) for pair in zip(cache.fetch()[:2], (k, v), strict=True))
    allocator.close()
