"""What is prepared for a sequence is what it asks for."""

import pytest
import torch
from families import tiny_config
from registrar import FakeRegistrar, eventually

from kvcli.capacity.ahead import host_tensors
from kvcli.inputs.profiles import resolve_profile
from kvcli.memory.pinned import PinnedAllocator
from kvcli.memory.tiers import Tiers
from kvcli.methods import get_method, method_names
from kvcli.methods.contract import SequenceContext
from kvcli.models.geometry import geometry_of

CPU = torch.device("cpu")
SMALL = {"budget": 48, "sink": 8, "window": 8, "page_size": 8, "dense_layers": 1, "chunk": 4, "outliers": 2, "local": 1}
OFFLOADING = [name for name in method_names() if get_method(name).offloads]


@pytest.mark.parametrize("name", OFFLOADING)
def test_a_sequence_takes_all_that_was_prepared_for_it(name):
    method = get_method(name)
    wanted = {key: value for key, value in SMALL.items() if key in method.Config.model_fields}
    family = "deepseek_v32" if name == "native" else "llama"
    profile, geometry = resolve_profile(method=name, overrides=wanted), geometry_of(tiny_config(family), torch.float32)
    tensors = host_tensors(profile, geometry, torch.float32, 200, 30)
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors]
    assert sum(sizes) > 0
    notes = FakeRegistrar()
    pinned = PinnedAllocator(notes)
    pinned.prepare(tensors)
    context = SequenceContext.of(len(geometry.layers), CPU, torch.float32, 230, prompt_tokens=200)
    context.tiers = Tiers(CPU, CPU, torch.float32, pinned)
    held = method(profile.settings, geometry.layers, context)
    pinned.forget()
    assert len(pinned.allocate((1,), torch.uint8).result(10)) == 1  # comes after all else that was asked for
    assert notes.sizes == [*(size for size in sizes if size), 1]
    eventually(lambda: sorted(notes.held.values()) == sorted(size for size in sizes if size))  # nothing was let go
    del held
    pinned.close()
