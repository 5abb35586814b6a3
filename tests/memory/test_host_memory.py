import mmap

import psutil
import pytest
import torch

from kvcli.kv.cache import Tiers
from kvcli.memory.pinned import HUGE_PAGE, host_memory


@pytest.mark.parametrize("shape", [(3, 5, 7), (1 << 20, 3), (0, 4)])
def test_memory_begins_at_a_page_and_can_be_written_after_inference(shape):
    with torch.inference_mode():
        memory = host_memory(shape, torch.bfloat16)
    assert (memory.shape, memory.dtype) == (shape, torch.bfloat16)
    assert not memory.is_inference()
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    memory.fill_(2)
    assert memory.double().sum() == 2 * memory.numel()


def test_memory_ends_with_its_last_view():
    rss = _rss()
    memory = host_memory((64 << 20,), torch.uint8).fill_(1)
    part = memory[7:9]
    del memory
    assert _rss() - rss > 60 << 20
    assert part.tolist() == [1, 1]
    del part
    assert _rss() - rss < 8 << 20


def test_a_system_without_huge_pages_gives_memory_all_the_same(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert host_memory((10,), torch.float32).sum() == 0


def test_the_host_tier_is_such_memory():
    tiers = Tiers.for_device(torch.device("cpu"), torch.float32)
    assert tiers.on_host(5, 3).data_ptr() % mmap.PAGESIZE == 0
    assert Tiers.for_device(torch.device("meta"), torch.float32).on_host(5, 3).is_meta


def _rss():
    return psutil.Process().memory_info().rss


def test_what_stays_on_a_cpu_is_such_memory_where_it_fills_a_huge_page():
    tiers = Tiers.for_device(torch.device("cpu"), torch.float32)
    large = tiers.on_device(2, HUGE_PAGE // 8)
    assert (large.shape, large.dtype) == ((2, HUGE_PAGE // 8), torch.float32)
    assert large.data_ptr() % mmap.PAGESIZE == 0
    assert tiers.on_device(3, dtype=torch.int64).dtype == torch.int64
    assert Tiers.for_device(torch.device("meta"), torch.float32).on_device(1 << 40, 1 << 20).is_meta


def test_memory_that_a_system_does_not_give_is_an_error_of_memory():
    with pytest.raises(MemoryError, match="the system gives no"):
        host_memory((1 << 60,), torch.uint8)
