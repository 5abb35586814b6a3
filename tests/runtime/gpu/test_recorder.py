"""Captures that fail, on a device that is made up: what torch's own graphs and allocator do then is done here."""

import gc
import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import cache

import pytest
import torch
from engine import run
from families import VOCAB, tiny_model
from registrar import FakeRegistrar, eventually, pinned_in_name_only
from stated import settings

from kvcli.conformance.crossed import crossed
from kvcli.memory.pinned import PinnedAllocator
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.decode import BlockingStepper
from kvcli.runtime.gpu import recorder as recorder_module
from kvcli.runtime.gpu.piecewise import PiecewiseStepper
from kvcli.runtime.gpu.recorder import WARM_UP, CaptureError, CudaRecorder, CudaStreams
from kvcli.runtime.gpu.stepper import SlotStepper

BROKEN = "operation not permitted when stream is capturing"
DEVICE = torch.device("cuda", 0)


class Device:
    """What of a CUDA device a capture changes: its pools' users, who allocates from one, and the current stream.

    Work that the device does not allow in a capture breaks it off (`break_off`): ending it fails, too. An event that
    was recorded in a capture is waited for in that one alone.
    """

    def __init__(self, monkeypatch):
        self.pools, self.allocating, self.broken, self.streams = Counter(), [], False, [None]
        self.captures = 0
        device = self

        class Graph:
            ended = False

            def capture_begin(self, pool, capture_error_mode):
                assert capture_error_mode == "thread_local"
                assert device.streams[-1] is not None
                device.pools[pool] += 1
                device.captures += 1
                device.allocating.append(pool)
                self.pool, device.broken = pool, False

            def capture_end(self):
                if device.broken:
                    raise RuntimeError("operation failed due to a previous error during capture")
                device.allocating.remove(self.pool)
                self.ended = True

            def __del__(self):
                if self.ended:
                    device.pools[self.pool] -= 1

        class Stream:
            def __init__(self, *_, **__): ...

            def wait_stream(self, other): ...

            def record_event(self):
                return device.captures if device.allocating else None

            def wait_event(self, event):
                assert event is None or (device.allocating and event == device.captures)

        @contextmanager
        def stream(given):
            self.streams.append(given)
            try:
                yield
            finally:
                self.streams.pop()

        made = {
            "CUDAGraph": Graph,
            "stream": stream,
            "Stream": Stream,
            "current_stream": lambda _: Stream(),
            "graph_pool_handle": lambda: (0, 1),
            "synchronize": lambda _: None,
        }
        for name, fake in made.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(recorder_module, "pinned_allocator", pinned_in_name_only)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release)

    def end(self, index, pool):
        if pool not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove(pool)

    def release(self, index, pool):
        self.pools[pool] -= 1

    def break_off(self):
        self.broken = True
        raise RuntimeError(BROKEN + "\nand where to read about it")

    def as_before(self):
        gc.collect()
        return (self.allocating, +self.pools, -self.pools, self.streams) == ([], Counter(), Counter(), [None])


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def test_a_capture_leaves_its_graphs_in_one_pool(device):
    recorder, tried = CudaRecorder(DEVICE), []
    recorder.record(lambda: tried.append(len(device.allocating)), recorder.cut)
    assert tried == [0] * WARM_UP
    assert device.allocating == []
    assert device.pools == {(0, 1): 2}
    del recorder
    assert device.as_before()


@pytest.mark.parametrize("cuts", [0, 2])
def test_a_capture_that_is_broken_off_leaves_nothing(device, cuts):
    recorder = CudaRecorder(DEVICE)

    def work():
        for _ in range(cuts):
            recorder.cut()
        device.break_off()

    with pytest.raises(CaptureError, match=f"^{BROKEN}$"):
        recorder.record(lambda: None, work)
    assert device.as_before()


def test_an_interrupt_in_a_capture_leaves_nothing_and_goes_on(device):
    def work():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CudaRecorder(DEVICE).record(lambda: None, work)
    assert device.as_before()


def test_what_fails_before_the_capture_is_no_capture_that_failed(device):
    with pytest.raises(RuntimeError, match="out of memory"):
        CudaRecorder(DEVICE).record(lambda: (_ for _ in ()).throw(RuntimeError("out of memory")), lambda: None)
    assert device.as_before()


@pytest.mark.parametrize("broken", [False, True])
def test_nothing_is_unpinned_during_a_capture_and_everything_after_it(broken, device, monkeypatch):
    """To unpin, the device is waited for, which a capture does not allow; pinning goes on."""
    notes, captured, tensors = FakeRegistrar(), [], []
    unregister = notes.unregister
    monkeypatch.setattr(
        notes, "unregister", lambda address: (captured.append(bool(device.allocating)), unregister(address))
    )
    memory = PinnedAllocator(notes)
    monkeypatch.setattr(recorder_module, "pinned_allocator", lambda _: memory)
    tensors += [memory.allocate((8,), torch.uint8).result(10) for _ in range(64)]

    def work():
        tensors.clear()
        kept.append(memory.allocate((9,), torch.uint8).result(10))  # in order: the thread has seen all that was freed
        if broken:
            device.break_off()

    kept = []
    with pytest.raises(CaptureError) if broken else nullcontext():
        CudaRecorder(DEVICE).record(lambda: None, work)
    eventually(lambda: list(notes.held.values()) == [9])
    assert captured == [False] * 64
    memory.close()


def planted_in(name):
    """A ragged batch: one has outgrown its budget, the other never does."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (61, 23)]
    return tiny_model("llama"), name, settings(name), prompts, 4


@cache
def steps_of_the_blocking_pipeline(name):
    return run(*planted_in(name))


@pytest.mark.parametrize(("name", "layer"), crossed(["freekv", "infinigen", "h2o", "offload", "infllm"], [0, 2]))
def test_steps_go_on_after_a_capture_that_failed(name, layer, device, monkeypatch):
    """Planted in a layer: one notice, nothing held, and the steps are those of the blocking pipeline."""
    case, notices, graphs = planted_in(name), [], []
    expected = steps_of_the_blocking_pipeline(name)

    def step(hook, rope, sequences):
        recorder = CudaRecorder(DEVICE)
        attend = Hook.run

        def planted(self, handler, *args):
            def broken(at, *parts):
                if device.allocating and at == layer:
                    graphs.append(weakref.ref(recorder.pieces[-1][-1].graph))
                    device.break_off()
                return handler(at, *parts)

            return attend(self, broken, *args)

        monkeypatch.setattr(Hook, "run", planted)
        if name == "infllm":
            return PiecewiseStepper(hook, sequences, rope, notices.append, recorder)
        return SlotStepper(hook, sequences, rope, notices.append, streams=CudaStreams(DEVICE), recorder=recorder)

    found = run(*case, step=step)
    assert device.as_before()
    assert [graph() for graph in graphs] == [None]
    (notice,) = notices
    assert notice.endswith(f"launched one by one: {BROKEN}")
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.counters.counts == other.counters.counts
        assert one.method.statistics() == other.method.statistics()


def test_an_interrupt_in_a_capture_leaves_the_model_as_it_was(device, monkeypatch):
    prompts, counts = [list(range(3, 40))], []

    def step(hook, rope, sequences):
        def replaced():
            return sum("forward" in vars(module) for module in hook.model.modules())

        def interrupted(*_):
            counts.append(replaced())
            raise KeyboardInterrupt

        counts.append(replaced())
        with monkeypatch.context() as patch:
            patch.setattr(Hook, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                PiecewiseStepper(hook, sequences, rope, recorder=CudaRecorder(DEVICE))
        counts.append(replaced())
        return BlockingStepper(hook, rope)

    run(tiny_model("llama"), "infllm", settings("infllm"), prompts, 2, step=step)
    before, during, after = counts
    assert during > before == after
