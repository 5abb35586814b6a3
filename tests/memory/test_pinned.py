"""Pinned memory with a registrar that only takes notes, and pools whose pages lie in several pieces of it."""

import copy
import os
import re
import threading
import weakref
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from registrar import FakeRegistrar, eventually

from kvcli.errors import ExitCode, KvcliError
from kvcli.kernels.recall import HostPages
from kvcli.kv.cache import Tiers
from kvcli.memory import host_pool as host_module
from kvcli.memory import pinned as pinned_module
from kvcli.memory.host_pool import HostPagePool
from kvcli.memory.pinned import CudaHostRegistrar, PinnedAllocator, nearby_cpus

HK, P, D = 3, 4, 5
CPU, META = torch.device("cpu"), torch.device("meta")
PAGE_BYTES = HK * 2 * P * D * 4


@pytest.fixture
def notes():
    return FakeRegistrar()


@pytest.fixture
def pinned(notes):
    memory = PinnedAllocator(notes)
    yield memory
    notes.go.set()
    memory.close()


@pytest.fixture
def tiers(pinned, monkeypatch):
    """Tiers whose host memory is pinned in pieces of three pages."""
    monkeypatch.setattr(host_module, "PIECE_BYTES", 3 * PAGE_BYTES + 7)
    return Tiers(CPU, CPU, torch.float32, pinned)


@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (4097,), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exactly_what_is_asked_for_is_pinned_at_whole_pages(shape, dtype, notes, pinned):
    tensor = pinned.allocate(shape, dtype).result(10)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert notes.held == ({tensor.data_ptr(): tensor.nbytes} if tensor.numel() else {})
    assert tensor.data_ptr() % 4096 == 0
    tensor.fill_(3)
    assert (tensor == 3).all()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no list of mappings here")
def test_huge_pages_are_asked_for_and_a_fork_does_not_share_them(pinned):
    tensor = pinned.allocate((4 << 20,), torch.uint8).result(10)
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    (flags,) = (
        re.search("VmFlags:(.*)", mapping)[1].split() for mapping in mappings if tensor.data_ptr() in addresses(mapping)
    )
    assert "dc" in flags
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def addresses(mapping):
    start, stop = mapping.split()[0].split("-")
    return range(int(start, 16), int(stop, 16))


def test_memory_is_let_go_with_the_last_view_of_it(notes, pinned):
    tensor = pinned.allocate((8, 6), torch.float32).result(10)
    view = tensor[2:].transpose(0, 1)
    view.fill_(5)
    del tensor
    assert list(pinned.registered) == list(notes.held)
    assert len(notes.held) == 1
    assert (view == 5).all()
    del view
    eventually(lambda: pinned.registered == notes.held == {})
    assert threading.current_thread() not in notes.threads


def test_memory_that_cannot_be_unregistered_stays_mapped_and_is_tried_again(notes, pinned):
    first, second = (pinned.allocate((8,), torch.uint8).result(10) for _ in range(2))
    address, notes.busy = first.data_ptr(), True
    del first
    third = pinned.allocate((8,), torch.uint8).result(10)  # after the worker has tried
    assert set(pinned.registered) == set(notes.held) == {address, second.data_ptr(), third.data_ptr()}
    notes.busy = False
    del second, third
    eventually(lambda: pinned.registered == notes.held == {})


def test_while_unpinning_is_held_memory_is_pinned_and_none_is_unpinned(notes, pinned):
    tensor = pinned.allocate((8,), torch.uint8).result(10)
    address = tensor.data_ptr()
    with pinned.unpinning_held():
        del tensor
        other = pinned.allocate((9,), torch.uint8).result(10)
        assert set(notes.held) == set(pinned.registered) == {address, other.data_ptr()}
    eventually(lambda: set(pinned.registered) == set(notes.held) == {other.data_ptr()})


def test_unpinning_that_has_begun_is_waited_for_before_it_is_held(notes, pinned, monkeypatch):
    begun, go, unregister = threading.Event(), threading.Event(), notes.unregister
    monkeypatch.setattr(notes, "unregister", lambda address: (begun.set(), go.wait(10), unregister(address)))
    tensor = pinned.allocate((8,), torch.uint8).result(10)
    del tensor
    assert begun.wait(10)
    threading.Timer(0.05, go.set).start()
    with pinned.unpinning_held():
        assert notes.held == {}


def test_closing_unregisters_what_is_still_in_use_and_leaves_it_readable(notes):
    pinned = PinnedAllocator(notes)
    tensor = pinned.allocate((8,), torch.uint8).result(10).fill_(3)
    pinned.close()
    assert pinned.registered == notes.held == {}
    assert (tensor == 3).all()


def test_what_is_asked_for_comes_in_order_while_others_go_on(notes, pinned):
    notes.go.clear()
    asked = [pinned.allocate((size,), torch.uint8) for size in (5, 3, 9, 1)]
    assert notes.begun.wait(10)
    assert not any(future.done() for future in asked)
    notes.go.set()
    assert [len(future.result(10)) for future in asked] == notes.sizes == [5, 3, 9, 1]
    assert len(notes.threads) == 1
    assert threading.current_thread() not in notes.threads


def test_what_is_prepared_is_given_in_order_and_the_rest_let_go(notes, pinned):
    pinned.prepare([((4, 2), torch.float32), ((9,), torch.uint8), ((9,), torch.uint8)])
    eventually(lambda: notes.sizes == [32, 9, 9])
    first, second = (pinned.allocate((9,), torch.uint8).result(10) for _ in range(2))
    assert [first.data_ptr(), second.data_ptr()] == list(notes.held)[1:]
    assert len(pinned.allocate((8,), torch.uint8).result(10)) == 8  # of another shape: new
    pinned.forget()
    eventually(lambda: sorted(notes.held.values()) == [9, 9])


def test_nothing_is_pinned_for_a_caller_that_has_gone(notes, pinned):
    notes.go.clear()
    asked = [pinned.allocate((size,), torch.uint8) for size in (1, 2, 3)]
    assert notes.begun.wait(10)
    del asked[1]
    notes.go.set()
    assert [len(future.result(10)) for future in asked] == notes.sizes == [1, 3]


def test_closing_waits_for_what_is_being_pinned_and_for_no_more(notes, pinned):
    notes.go.clear()
    asked = [pinned.allocate((size,), torch.uint8) for size in (1, 2, 3)]
    assert notes.begun.wait(10)
    threading.Timer(0.05, notes.go.set).start()
    pinned.close()
    assert len(asked[0].result(0)) == 1
    assert notes.sizes == [1]


def test_a_caller_that_waits_learns_that_the_system_pins_no_more():
    notes = FakeRegistrar(limit=3000)
    pinned = PinnedAllocator(notes)
    first, second, third = (pinned.allocate((size,), torch.uint8) for size in (2048, 2048, 512))
    assert len(first.result(10)) == 2048
    for _ in range(2):
        with pytest.raises(
            KvcliError, match=r"does not pin 2\.00 KiB of host memory on top of the 2\.00 KiB pinned already: no more"
        ) as e:
            second.result(10)
        assert "ulimit -l" in e.value.hint
        assert e.value.exit_code == ExitCode.WILL_NOT_FIT
    assert len(third.result(10)) == 512, "the worker goes on"
    assert len(notes.held) == len(pinned.registered) == 2
    pinned.close()


def tokens(pages, seed=0):
    return torch.randn(2, HK, pages, P, D, generator=torch.Generator().manual_seed(seed)).unbind()


def everything(pages):
    """Every page of every head, in no order."""
    order = torch.randperm(pages * HK, generator=torch.Generator().manual_seed(1))
    return order // HK, order % HK


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("writes", [[0, 11], [0, 1, 2, 8, 9, 11], [0, 3, 6, 11], [0, 0, 2, 11]])
def test_pool_gives_back_what_was_written(layout, in_pieces, writes, tiers):
    tiers = tiers if in_pieces else Tiers.for_device(CPU, torch.float32)
    pool = HostPagePool(HK, D, P, 11, tiers, layout)
    k, v = tokens(11)
    for start, stop in pairwise(writes):
        assert pool.write(start, k[:, start:stop], v[:, start:stop]) == (stop - start) * PAGE_BYTES
    assert [len(piece) for piece in pool.pieces] == ([3, 3, 3, 2] if in_pieces else [11])
    pages, heads = everything(11)
    blocks = pool.fetch(pages, heads)
    assert torch.equal(blocks, torch.stack((k, v), 2)[heads, pages])
    assert pool.fetch(pages[:0], heads[:0]).shape == (0, 2, P, D)
    host = HostPages.of([pool.pieces], layout, CPU)
    assert torch.equal(torch.stack([host.block(0, int(p), int(h)) for p, h in zip(pages, heads, strict=True)]), blocks)


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("pages", [0, 1, 3, 4, 11])
def test_planning_counts_the_bytes_and_pins_none(layout, pages, tiers, notes):
    planned = HostPagePool(HK, D, P, pages, Tiers.for_device(META, torch.float32), layout)
    assert notes.held == {}
    assert all(piece.is_meta for piece in planned.pieces)
    real = HostPagePool(HK, D, P, pages, tiers, layout)
    assert (
        planned.footprint().host
        == real.footprint().host
        == sum(piece.nbytes for piece in real.pieces)
        == pages * PAGE_BYTES
    )
    assert sum(notes.held.values()) == pages * PAGE_BYTES


def test_pool_waits_for_the_memory_of_what_it_writes_only(tiers, notes):
    notes.go.clear()
    pool = HostPagePool(HK, D, P, 11, tiers)
    assert pool.footprint().host == 11 * PAGE_BYTES
    k, v = tokens(3)
    writing = threading.Thread(target=pool.write, args=(0, k, v))
    writing.start()
    writing.join(0.05)
    assert writing.is_alive()
    notes.limit = 3 * PAGE_BYTES
    notes.go.set()
    writing.join(10)
    assert not writing.is_alive()
    with pytest.raises(KvcliError, match="does not pin"):
        pool.write(3, k, v)
    with pytest.raises(KvcliError, match="does not pin"):
        _ = pool.pieces


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_copied_pool_shares_what_is_written_and_owns_what_comes(in_pieces, tiers, notes):
    pool = HostPagePool(HK, D, P, 11, tiers if in_pieces else Tiers.for_device(CPU, torch.float32), "nhd")
    k, v = tokens(7)
    pool.write(0, k, v)
    first, second = copy.deepcopy({"one": pool, "same": pool}), copy.deepcopy(pool)
    assert first["one"] is first["same"]
    assert second.footprint().host == 4 * PAGE_BYTES
    if in_pieces:
        eventually(lambda: sum(notes.held.values()) == (11 + 4 + 4) * PAGE_BYTES)
    later = [tokens(4, seed=seed) for seed in range(3)]
    pools = [pool, first["one"], second]
    for each, (more_k, more_v) in zip(pools, later, strict=True):
        each.write(7, more_k, more_v)
    pages, heads = everything(11)
    for each, (more_k, more_v) in zip(pools, later, strict=True):
        expected = torch.stack((torch.cat((k, more_k), 1), torch.cat((v, more_v), 1)), 2)
        assert torch.equal(each.fetch(pages, heads), expected[heads, pages])
        assert each.pieces[0].data_ptr() == pool.pieces[0].data_ptr()
    gone = weakref.ref(pool)
    del pool, pools, each, first
    assert gone() is None
    third = copy.deepcopy(second)
    assert torch.equal(third.fetch(pages, heads), second.fetch(pages, heads))
    del second, third
    eventually(lambda: not notes.held)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("written", [0, 2, 5, 6])
def test_a_pool_shares_pages_of_another_as_far_as_they_are_written(written, in_pieces, tiers):
    tiers = tiers if in_pieces else Tiers.for_device(CPU, torch.float32)
    pool, other = HostPagePool(HK, D, P, 8, tiers), HostPagePool(HK, D, P, 10, tiers)
    other.share(pool, 5)
    assert other.footprint().host == 5 * PAGE_BYTES  # as planned, whatever will be written
    k, v = tokens(8)
    pool.write(0, k[:, :written], v[:, :written])
    mine_k, mine_v = tokens(10, seed=4)
    mine_k[:, :5], mine_v[:, :5] = k[:, :5], v[:, :5]
    shared = min(written, 5)
    assert other.write(0, mine_k[:, :3], mine_v[:, :3]) == max(0, 3 - shared) * PAGE_BYTES
    assert other.footprint().host == (10 - shared) * PAGE_BYTES
    assert other.write(3, mine_k[:, 3:], mine_v[:, 3:]) == (10 - max(3, shared)) * PAGE_BYTES
    pages, heads = everything(10)
    assert torch.equal(other.fetch(pages, heads), torch.stack((mine_k, mine_v), 2)[heads, pages])
    assert (other.pieces[0].data_ptr() == pool.pieces[0].data_ptr()) is (shared > 0)
    pages, heads = everything(written)
    assert torch.equal(pool.fetch(pages, heads), torch.stack((k, v), 2)[heads, pages])


def test_pools_of_other_pages_share_nothing(tiers):
    pool = HostPagePool(HK, D, P, 8, tiers)
    for other in (HostPagePool(HK, D, P, 8, tiers, "nhd"), HostPagePool(HK, D, 2, 8, tiers)):
        other.share(pool, 5)
        assert other.footprint().host == 8 * other.page_bytes


def test_host_memory_of_other_caches_is_pinned_at_once(tiers, notes):
    tensor = tiers.on_host(2, 3)
    assert notes.held == {tensor.data_ptr(): 24}
    assert copy.deepcopy(tiers).pinned is tiers.pinned


class Driver:
    """What of the CUDA driver is asked for an attribute of a device; None: the driver does not know it."""

    def __init__(self, value):
        self.value, self.asked = value, []

    def cuInit(self, flags):  # noqa: N802
        return 0

    def cuDeviceGet(self, device, index):  # noqa: N802
        device._obj.value = 100 + index
        return 0

    def cuDeviceGetAttribute(self, found, attribute, device):  # noqa: N802
        self.asked.append((attribute, device.value))
        if self.value is None:
            return 1
        found._obj.value = self.value
        return 0


@pytest.mark.parametrize(("value", "serves"), [(1, True), (0, False), (None, True)])
def test_a_device_is_asked_whether_it_sees_host_memory_at_the_hosts_address(value, serves, monkeypatch):
    driver, device = Driver(value), torch.device("cuda", 3)
    pinned_module.reads_host_addresses.cache_clear()
    monkeypatch.setattr(pinned_module.ctypes, "CDLL", lambda _: driver)
    for _ in range(2):
        assert pinned_module.reads_host_addresses(device) is serves
    assert driver.asked == [(91, 103)]  # once
    pinned_module.reads_host_addresses.cache_clear()


def test_where_there_is_no_driver_nothing_is_held_against_it():
    pinned_module.reads_host_addresses.cache_clear()
    assert pinned_module.reads_host_addresses(torch.device("cuda", 0))


def test_memory_that_the_device_would_see_elsewhere_is_refused_in_one_line(monkeypatch):
    """Kernels would read wherever the host's address leads to on the device."""
    monkeypatch.setattr(pinned_module, "reads_host_addresses", lambda _: False)
    monkeypatch.setattr(pinned_module, "nearby_cpus", lambda _: set())
    pinned = PinnedAllocator(CudaHostRegistrar(torch.device("cuda", 1)))
    with pytest.raises(KvcliError, match=r"cuda:1 does not see pinned host memory at the host's address") as refused:
        pinned.allocate((8,), torch.uint8).result(10)
    assert "\n" not in refused.value.what
    assert "--device cpu" in refused.value.hint
    pinned.close()


def test_cuda_is_asked_to_map_memory_and_its_refusals_have_reasons(monkeypatch):
    class Runtime:
        calls, codes = [], [0, 0, 2, 712]

        def cudaHostRegister(self, *args):  # noqa: N802
            self.calls.append(args)
            return self.codes.pop(0)

        cudaHostUnregister = cudaHostRegister  # noqa: N815

    runtime, waited, registrar = Runtime(), [], CudaHostRegistrar(torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(waited.append(device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(len(runtime.calls)))
    monkeypatch.setattr(torch.cuda, "CudaError", lambda code: RuntimeError(f"code {code}"))
    registrar.register(4096, 100)
    registrar.unregister(4096)
    assert runtime.calls == [(4096, 100, 0), (4096,)]
    assert waited == [registrar.device, registrar.device, 1], "the device is waited for before memory is unregistered"
    with pytest.raises(RuntimeError, match="code 2"):
        registrar.register(4096, 100)
    with pytest.raises(RuntimeError, match="code 712"):
        registrar.unregister(4096)


@pytest.mark.parametrize(("text", "cpus"), [("0-2,8-9\n", {0, 1, 2, 8, 9}), ("5\n", {5}), ("\n", set()), (None, set())])
def test_the_processors_near_a_device_are_those_of_its_memory_node(text, cpus, tmp_path, monkeypatch):
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    if text is not None:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(text)
    assert nearby_cpus(torch.device("cuda", 0), tmp_path) == cpus


@pytest.mark.parametrize("there", [True, False])
def test_the_pinning_thread_alone_moves_to_the_processors_near_the_device(there, monkeypatch):
    """Where the process may not use them, or none are known, it stays where it is."""
    allowed = os.sched_getaffinity(0)
    near = {min(allowed)} if there else {max(allowed) + 1000}
    monkeypatch.setattr("kvcli.memory.pinned.nearby_cpus", lambda _: near)
    registrar = CudaHostRegistrar(torch.device("cuda", 0))
    monkeypatch.setattr(registrar, "register", lambda address, size: None)
    monkeypatch.setattr(registrar, "unregister", lambda address: None)
    ran_on = []
    monkeypatch.setattr(
        registrar, "settle", lambda: (CudaHostRegistrar.settle(registrar), ran_on.append(os.sched_getaffinity(0)))
    )
    memory = PinnedAllocator(registrar)
    memory.allocate((4,), torch.float32).result()
    memory.close()
    assert ran_on == [near if there else allowed]
    assert os.sched_getaffinity(0) == allowed


def test_memory_is_pinned_where_a_device_does_not_say_where_it_is(monkeypatch):
    def refuses(_):
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuses)
    registrar = CudaHostRegistrar(torch.device("cuda", 0))
    monkeypatch.setattr(registrar, "register", lambda address, size: None)
    monkeypatch.setattr(registrar, "unregister", lambda address: None)
    memory = PinnedAllocator(registrar)
    assert memory.allocate((4,), torch.float32).result(timeout=10).shape == (4,)
    memory.close()
