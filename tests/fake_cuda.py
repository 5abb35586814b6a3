"""A CUDA device without one: tensors of shapes and dtypes alone, on which steps run and are watched.

torch's fake tensors need a build for CUDA in a few places of its Python interface; `NoDevice` goes around them.
"""

import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from kernel_modules import kernel_modules
from registrar import pinned_in_name_only
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcli.runtime.gpu import recorder

CUDA = torch.device("cuda", 0)
PAIR = CUDA, torch.device("cuda", 1)
aten = torch.ops.aten
NAMES = {"__invert__": "bitwise_not", "__and__": "bitwise_and", "__or__": "bitwise_or"}
# What makes the host wait for the device: sizes or values that only it knows.
WAITING = {"_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "bincount", "equal", "is_nonzero"}
NOTHING = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "split",
}
NOTHING |= {"_reshape_alias", "detach", "alias", "split_with_sizes", "unbind"}


class NoDevice(TorchFunctionMode):
    """Does by operations what torch's Python interface does only where CUDA is linked; notes numbers of the host."""

    def __init__(self):
        super().__init__()
        self.from_host = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            self.from_host.append(name)
            device = args[0].device if func is torch.Tensor.new_tensor else torch.device(kwargs.get("device") or "cpu")
            if device.type == "cuda":
                # torch takes a single number for a constant, and would move it in earnest.
                made = torch.tensor(args[-1], dtype=kwargs.get("dtype", getattr(args[0], "dtype", None)))
                return torch.empty(made.shape, dtype=made.dtype, device=device)
        first = args[0] if args else None
        if not (isinstance(first, torch.Tensor) and first.is_cuda):
            return func(*args, **kwargs)
        if func is torch.Tensor.__getitem__:
            return _taken(*args)
        if func is torch.Tensor.__setitem__:
            if isinstance(args[1], torch.Tensor):
                return aten.index_put_(first, [args[1]], args[2])
            target, value = _taken(first, args[1], view=True), args[2]
            return aten.copy_(target, value) if isinstance(value, torch.Tensor) else aten.fill_(target, value)
        if func is torch.Tensor.contiguous:
            return first if first.is_contiguous() else aten.clone(first, memory_format=torch.contiguous_format)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "not linked" not in str(error):
                raise
            return getattr(aten, NAMES.get(name, name))(*args, **kwargs)


def _taken(x, index, view=False):
    index = index if isinstance(index, tuple) else (index,)
    known = sum(i is not None and i is not Ellipsis for i in index)
    if any(i is Ellipsis for i in index):
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        index = (*index[:at], *[slice(None)] * (x.dim() - known), *index[at + 1 :])
    dim, tensors = 0, []
    for i in index:
        if i is None:
            x, dim = aten.unsqueeze(x, dim), dim + 1
        elif isinstance(i, int):
            x = aten.select(x, dim, i)
        elif isinstance(i, slice):
            x = x if i == slice(None) else aten.slice(x, dim, i.start, i.stop, i.step or 1)
            dim += 1
        else:
            tensors += [None] * (dim - len(tensors)) + [torch.as_tensor(i)]
            dim += 1
    assert not (tensors and view)
    return aten.index(x, tensors) if tensors else x


class Watch(TorchDispatchMode):
    """Counts operations that launch a kernel, and notes what a captured step may not do."""

    def __init__(self):
        super().__init__()
        self.kernels, self.faults = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in WAITING:
            self.faults.append(f"{name} waits for the device")
        out = func(*args, **(kwargs or {}))
        if func.namespace != "aten":
            return out
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in tensors if x.dim() or x.is_cuda}
        if devices == {"cpu", "cuda"}:
            self.faults.append(f"{name} copies between host and device")
        if "cuda" in devices and not func.is_view and name not in NOTHING:
            self.kernels[name] += 1
        return out


class Graphs(Watch):
    """CUDA graphs of fake devices, watched while they are captured; `kernels` are of all, `faults` what none may hold.

    A graph holds work of the one device on which its capture began, and ends where that is the current one again.
    """

    def __init__(self, monkeypatch, current):
        super().__init__()
        self.open = None
        watch = self

        class Graph:
            kernels = 0

            def capture_begin(self, pool, capture_error_mode):
                assert watch.open is None
                assert pool == ("pool", current.device)
                watch.open, self.device = self, current.device

            def capture_end(self):
                assert watch.open is self
                assert self.device == current.device
                watch.open = None

        class Stream:
            def __init__(self, device, priority):
                self.device = device

            def wait_stream(self, other): ...

        handles = iter(PAIR)
        made = {
            "CUDAGraph": Graph,
            "Stream": Stream,
            "stream": lambda stream: current.within(stream.device),
            "current_stream": lambda device: Stream(device, 0),
            "graph_pool_handle": lambda: ("pool", next(handles)),
            "synchronize": lambda _: None,
        }
        for name, fake in made.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(recorder, "pinned_allocator", pinned_in_name_only)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.open is None:
            return func(*args, **(kwargs or {}))
        before, name = self.kernels.total(), func.overloadpacket.__name__
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.kernels.total() > before:
            self.open.kernels += 1
            devices = {x.device for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor) and x.is_cuda}
            if devices != {self.open.device}:
                self.faults.append(f"{name} on {devices} in a graph of {self.open.device}")
        return out


class CurrentDevice:
    """Stands in for the device that kernels are launched on, where there is more than one."""

    def __init__(self, monkeypatch):
        self.device = CUDA
        monkeypatch.setattr(torch.cuda, "set_device", self.set)
        monkeypatch.setattr(torch.cuda, "device", self.within)

    def set(self, device):
        self.device = device

    @contextmanager
    def within(self, device):
        before, self.device = self.device, device
        yield
        self.device = before


@contextmanager
def fake_cuda(monkeypatch, current=None):
    """Inside, CUDA tensors are fake, and launches of Triton kernels are noted: yields the list of their names.

    With a `current` device nothing may be launched on another one's tensors.
    """
    launched = []

    def launch(kernel, grid, *args, warps=4, **_):
        assert math.prod(grid) > 0
        assert warps in (1, 2, 4, 8, 16, 32), f"{kernel.__name__} asks for {warps} warps: Triton wants a power of two"
        assert all(side < 1 << 16 for side in grid[1:]), f"{kernel.__name__} has a grid {grid}: CUDA allows 65,535"
        for x in args:
            assert not isinstance(x, torch.Tensor) or x.is_cuda, f"{kernel.__name__} reads {x.device}"
            wrong = current is not None and isinstance(x, torch.Tensor) and x.device != current.device
            assert not wrong, f"{kernel.__name__} runs on {current.device} and reads {x.device}"
        launched.append(kernel.__name__)

    for module in kernel_modules():
        for attribute, stand_in in (("launch", launch), ("multiprocessors", lambda _: 132)):
            if hasattr(module, attribute):
                monkeypatch.setattr(module, attribute, stand_in)
    with FakeTensorMode(allow_non_fake_inputs=True), NoDevice() as mode, torch.inference_mode():
        yield launched, mode


def on_fake_cuda(x, device=CUDA):
    """A fake tensor of the same shape, strides and dtype."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def parts_on_fake_cuda(modules, device=CUDA):
    """Put parameters and buffers of modules there."""
    for module in modules:
        for parts, kind in (
            (module._parameters, partial(nn.Parameter, requires_grad=False)),
            (module._buffers, torch.Tensor),
        ):
            parts.update({name: kind(on_fake_cuda(x, device)) for name, x in parts.items() if x is not None})


def method_on_fake_cuda(method, placement=None):
    """Put a method's caches and states there, each layer's where it is placed, and leave their host memory as it is."""
    method.context.tiers = replace(method.context.tiers, device=CUDA)
    method.context.placement = placement
    for layer, cache in enumerate(method.caches):
        there = partial(on_fake_cuda, device=method.context.device(layer))
        for part in [own for _, own in cache.apart] or [cache]:
            slots = part.as_slots()
            kv = slots.kv if slots.on_host else there(slots.kv)
            slots = slots._replace(kv=kv, tensors={n: there(x) for n, x in slots.tensors.items()})
            part.as_slots = lambda slots=slots: slots
            part.adopt_slots = lambda _: None
    for state in method.states.layers:
        state.update({name: on_fake_cuda(x) for name, x in state.items()})
    return method
