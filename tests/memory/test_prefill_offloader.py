"""The buffers of the prefill, on a CPU and on a GPU that is made up, against what is planned for them."""

import weakref
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from families import tiny_config

from kvcli.capacity.workspace import Workspace
from kvcli.models.geometry import geometry_of
from kvcli.runtime import prefill as prefill_offloader
from kvcli.runtime.prefill import PrefillOffloader, prefill_buffers

LENGTH = 50
GEOMETRY = geometry_of(tiny_config("llama"), torch.float32)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Stream:
    """Notes what is waited for."""

    log: ClassVar = []

    def __init__(self, device):
        del device

    def wait_event(self, event):
        self.log.append(("wait", event))

    def wait_stream(self, stream):
        del stream

    def record_event(self):
        self.log.append(("done", len(self.log)))
        return self.log[-1][1]

    def synchronize(self):
        self.log.append(("finish", None))


@pytest.fixture
def buffers(monkeypatch):
    """Weak references to all that is allocated."""
    allocated, real = [], torch.empty
    monkeypatch.setattr(Stream, "log", [])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream))

    def empty(shape, dtype, device=CPU):
        del device
        tensor = real(shape, dtype=dtype)
        allocated.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(prefill_offloader, "host_memory", empty)
    return allocated


def prefill(device, shapes, buffers):
    """Hand layers of these shapes over: the offloader, and the most bytes that lived at once."""
    offloader, most, buffer = PrefillOffloader(device), 0, None
    for shape in shapes:
        del buffer
        buffer = offloader.buffer(shape, torch.float32)
        most = max(most, sum(x().nbytes for x in buffers if x() is not None))
        offloader.start(buffer, lambda: None)
    return offloader, most


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_the_plan_counts_the_buffers_that_live_at_once(device, buffers):
    layer = GEOMETRY.layers[0]
    shapes = [(2, layer.num_kv_heads, LENGTH, layer.head_dim)] * 5
    _, most = prefill(device, shapes, buffers)
    assert most == Workspace.of(GEOMETRY, LENGTH, None, device, LENGTH, 4).device["KV of a layer"]
    assert len(buffers) == prefill_buffers(device, most)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_no_third_buffer_lives_where_layers_differ(device, buffers):
    _, most = prefill(device, [(2, heads, LENGTH, 4) for heads in (3, 1, 3, 1, 3)], buffers)
    assert most <= prefill_buffers(device, 0) * 2 * 3 * LENGTH * 4 * 4


def test_a_buffer_is_lent_again_after_its_work_and_all_are_freed_in_the_end(buffers):
    offloader, _ = prefill(CUDA, [(2, 3, LENGTH, 4)] * 4, buffers)
    done = [at for kind, at in Stream.log if kind == "done"]
    assert [at for kind, at in Stream.log if kind == "wait"] == done[:2]
    offloader.finish()
    assert Stream.log[-1] == ("finish", None)
    assert [x() for x in buffers] == [None, None]


def test_a_large_buffer_is_alone(buffers, monkeypatch):
    """What does not fit beside another one waits for the work on it; small ones before it are let go of."""
    large = (2, 3, LENGTH, 4)
    monkeypatch.setattr(prefill_offloader, "ALONE_BYTES", 2 * 3 * LENGTH * 4 * 4 - 1)
    _, most = prefill(CUDA, [(2, 1, LENGTH, 4)] * 3 + [large] * 3, buffers)
    assert most == 2 * 3 * LENGTH * 4 * 4
    assert len(buffers) == 3
    done = [at for kind, at in Stream.log if kind == "done"]
    assert [at for kind, at in Stream.log if kind == "wait"] == done[:5]
