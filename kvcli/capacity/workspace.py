"""What the prefill holds beside weights and caches, term by term: an estimate of the largest tensors at one time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from kvcli.models.geometry import ModelGeometry
from kvcli.runtime.hidden_states import CHUNKS_ON_DEVICE, streamed
from kvcli.runtime.prefill import chunk_length
from kvcli.store.prefill_offloader import prefill_buffers

_AT_ONCE = 256  # tokens; recurrences are computed by chunks of 64 to 256


@dataclass(frozen=True)
class Workspace:
    """Bytes by what they are, on the `device` and in `host` memory beside one."""

    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def on_device(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())

    @property
    def on_host(self) -> int:
        """Bytes in the host memory of a GPU."""
        return sum(self.host.values())

    @classmethod
    def of(
        cls,
        geometry: ModelGeometry,
        length: int,
        window: int | None,
        device: torch.device,
        together: int,
        itemsize: int,
    ) -> Workspace:
        """Find the terms for a prompt of `length` tokens, by windows of so many through all layers where one is given.

        As long as the prompt are a layer's KV in each buffer and the rotary tables (cosines, sines). As long as all
        that is read `together` are the tokens, their positions, and the hidden states, which layers write over; on a
        GPU these are in host memory beyond a size, and so many chunks of them on the device. As long as a chunk are the
        intermediates of a layer, and what is looked up in the tables. By windows, only the tables are as long as the
        prompt.
        """
        layer = max(geometry.layers, key=lambda layer: layer.token_size)
        rotary = layer.head_dim - (layer.latent or 0)
        tables = itemsize * length * 2 * rotary
        if window is not None:
            length = together = min(length, window)
        chunk = min(length, chunk_length(device) if window is None else window)
        hidden, host = itemsize * together * geometry.hidden_size, dict[str, int]()
        if window is None and streamed(geometry, together, itemsize, device):
            host = {"hidden states": hidden}
            hidden = itemsize * CHUNKS_ON_DEVICE * chunk * geometry.hidden_size
        kv = itemsize * length * layer.token_size
        buffers = prefill_buffers(device, kv) * kv
        per_chunk_token = 4 * geometry.intermediate_size + 4 * layer.num_heads * layer.head_dim
        in_attention = buffers + itemsize * chunk * per_chunk_token
        most = max([in_attention, *_with_state(geometry, chunk, length, itemsize, buffers)])
        terms = {
            "rotary tables": tables,
            "tokens and positions": 2 * torch.int64.itemsize * together,
            "hidden states": hidden,
            "KV of a layer": buffers,
            "a chunk in a layer": itemsize * 2 * rotary * chunk + most - buffers,
        }
        return cls(terms, host)


def _with_state(geometry: ModelGeometry, chunk: int, length: int, itemsize: int, buffers: int) -> Iterator[int]:
    """Bytes within each layer that keeps a state, those of its own input beside it: the layer's, and normalised.

    The buffers of KV are there from the first layer on that attends.
    """
    states, attended = iter(geometry.states), False
    for layer in geometry.decoder:
        attended = attended or layer.attention is not None
        if layer.state is None:
            continue
        state = next(states)
        tokens = chunk if state.resumes else length
        rounded = -(-tokens // _AT_ONCE) * _AT_ONCE  # so that few lengths are run
        own = state.temporaries(rounded) + 2 * tokens * geometry.hidden_size * itemsize
        yield own + buffers * attended
