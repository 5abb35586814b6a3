"""A prefill of any length on a fake CUDA device: what lives there at once, by bytes, and what the host waits for.

Nothing is computed. The model has the shapes of a config; its rotary tables are as long as the context.
"""

import copy
import weakref
from collections import Counter
from contextlib import nullcontext

import torch
import transformers
from engine import WordlessTokenizer
from fake_cuda import CUDA, WAITING, CurrentDevice, fake_cuda, parts_on_fake_cuda
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcli.kernels import block_attention
from kvcli.kv import parking
from kvcli.memory import tiers
from kvcli.models.devices import place
from kvcli.models.geometry import geometry_of_model
from kvcli.models.loading import Model
from kvcli.models.rope import Rope
from kvcli.runtime.attention_hook import attached
from kvcli.runtime.engine import Engine


class FakeStream:
    """Does at once what it is given."""

    def __init__(self, *_, **__):
        pass

    def record_event(self):
        return "event"

    wait_event = wait_stream = lambda *_: None

    def synchronize(self):
        FakeStream.waits += 1

    waits = 0


class DeviceBytes(TorchDispatchMode):
    """Counts what lives on the fake device, and what crosses to and from the host."""

    def __init__(self):
        super().__init__()
        self.held, self.now, self.most = {}, 0, 0
        self.copies, self.waits = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in WAITING:
            self.waits[name] += 1
        if name == "copy_" and args[0].device != args[1].device:
            self.copies["to the device" if args[0].is_cuda else "to the host"] += 1
        elif name == "_to_copy" and args[0].device != out.device and args[0].dim():
            self.waits["an unpinned copy"] += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                self._see(tensor.untyped_storage())
        return out

    def refresh(self):
        """Count storages again, some of which have got another size."""
        for key, (storage, _) in list(self.held.items()):
            memory = storage()
            if memory is not None:
                self.held[key] = storage, memory.nbytes()
        self.now = sum(size for _, size in self.held.values())
        self.most = max(self.most, self.now)

    def _see(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.held:
            self.held[key] = weakref.ref(storage), size
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key):
        self.now -= self.held.pop(key)[1]


class Prefilled:
    """What a prefill came to: bytes on the device at its peak and after it, beside the weights; copies and waits.

    Of several `devices` each has some of the layers.
    """

    def __init__(self, config, profile, length, max_tokens, patch, devices=(CUDA,)):
        text = config.get_text_config(decoder=True)
        with torch.device("meta"):
            big = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
        capacity = length + max_tokens
        rope = _rope(text, capacity)
        patch.setattr(torch.cuda, "Stream", FakeStream)
        patch.setattr(torch.cuda, "current_stream", FakeStream)
        patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        patch.setattr(block_attention, "preferred_attention", lambda *_: SDPBackend.FLASH_ATTENTION)
        patch.setattr(tiers, "pinned_allocator", lambda _: None)
        patch.setattr(tiers, "pinned_staging", lambda _: None)
        patch.setattr(tiers, "host_memory", lambda shape, dtype: torch.empty(shape, dtype=dtype))
        placement = None
        if len(devices) > 1:
            placement = place(big, geometry_of_model(big), devices, [1 << 40] * len(devices))
        current = CurrentDevice(patch) if placement else None
        with attached(big, placement) as hook, fake_cuda(patch, current) as (_, mode):
            tables = [table for _, table in rope._of_length.values()]
            parts_on_fake_cuda([*big.modules(), *tables])
            for name, device in placement.modules.items() if placement else ():
                parts_on_fake_cuda(big.get_submodule(name).modules(), device)
            for table in tables:
                table._buffers.update(
                    {
                        name: torch.empty(capacity, x.shape[1], dtype=torch.bfloat16, device=CUDA)
                        for name, x in table._buffers.items()
                    }
                )
                for device in devices[1:]:
                    table._elsewhere[device] = copy.deepcopy(table).to(device)
            decoder = big.model
            decoder.rotary_emb = rope
            geometry = hook.geometry
            made = Model(big, WordlessTokenizer(), geometry, CUDA, torch.bfloat16, "", "", placement)
            ready = Engine(made, hook, rope, print)
            self.bytes = DeviceBytes()
            _told(parking.Parking, self.bytes, patch)
            with self.bytes:
                self.method = method = ready.method(profile, ready.context(length, max_tokens), True)
                self.bytes.copies.clear()
                mode.from_host.clear()
                FakeStream.waits = 0
                self.logits = ready.prefill(range(length), [method])
                self.bytes.refresh()
            self.uploads, self.syncs = len(mode.from_host), FakeStream.waits
            self.tables = sum(x.nbytes for table in tables for x in table._buffers.values())
            self.peak, self.after = self.bytes.most + self.tables, self.bytes.now + self.tables


def _told(parked, counted, patch):
    """Have `counted` look again after each call that gives storages another size."""
    for name in ("enter", "open", "close", "leave"):
        patch.setattr(parked, name, _then(getattr(parked, name), counted.refresh))


def _then(call, after):
    def both(*args, **kwargs):
        call(*args, **kwargs)
        after()

    return both


def _rope(text, capacity):
    """The rotary tables of a small model of the same heads, which is told that they are as long as the context."""
    small = type(text)(
        hidden_size=2 * text.head_dim,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=text.head_dim,
        vocab_size=8,
        rope_parameters=text.rope_parameters,
        max_position_embeddings=text.max_position_embeddings,
    )
    model = transformers.AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16)
    rope = Rope(model, model.model.rotary_emb, [16])
    (entry,) = rope._of_length.values()
    rope._of_length = {capacity: entry}
    rope.use([capacity])
    return rope
