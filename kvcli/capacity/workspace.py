"""The workspace of the prefill, in addition to weights and caches: an estimate of the largest tensors at one time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from kvcli.kernels.selected_attention import AT_ONCE
from kvcli.memory.tiers import nbytes
from kvcli.methods.contract import AnyMethod
from kvcli.models.geometry import ModelGeometry
from kvcli.runtime.layer_major import CHUNKS_ON_DEVICE, chunk_length, streamed
from kvcli.runtime.own_selection import SCORES_AT_ONCE
from kvcli.runtime.prefill import prefill_buffers

_AT_ONCE = 256  # tokens; recurrences are computed by chunks of 64 to 256


@dataclass(frozen=True)
class Workspace:
    """Bytes of each term, on the `device` and in the `host` memory of a GPU.

    Meanwhile `away` bytes of the caches on the device wait in host memory. After the prompts are read `stacked` bytes
    are needed in addition: a layer of a batch exists in its old and its stacked form, or a layer that selects by itself
    scores the tokens of all sequences.
    """

    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)
    away: int = 0
    stacked: int = 0

    @property
    def on_device(self) -> int:
        """Bytes on the device in addition to complete caches: when decoding begins, at least the rotary tables."""
        return max(sum(self.device.values()) - self.away, self.device.get("rotary tables", 0) + self.stacked)

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
        method: AnyMethod | None = None,
    ) -> Workspace:
        """Find the terms for a prompt of `length` tokens; with a `window`, windows of that size pass all layers.

        The KV of a layer in each buffer and the rotary tables (cosines, sines) are as long as the prompt. So is the KV
        that later layers read again, if no window limits it. Tokens,
        positions and hidden states, which layers overwrite, are as long as everything that is read `together`; on a
        GPU, hidden states beyond a size are in host memory, with a few chunks on the device. The intermediates of a
        layer and the angles looked up in the tables are as long as a chunk. By windows, only the tables are as long as
        the prompt. With a `method`, what it holds for other layers waits in host memory if hidden states do, and layers
        whose cache lends its rows to a prompt that is alone need no buffer.
        """
        layer = max(geometry.layers, key=lambda layer: layer.token_size)
        alone = together == length
        rotary = layer.head_dim - layer.index_channels - (layer.latent or 0)
        tables = itemsize * length * 2 * rotary
        if window is not None:
            length = together = min(length, window)
        chunk = min(length, chunk_length(device) if window is None else window)
        states = itemsize * geometry.streams * geometry.hidden_size  # of a token
        hidden, host, away = states * together, dict[str, int](), 0
        if window is None and streamed(geometry, together, itemsize, device):
            host["hidden states"] = hidden
            hidden = CHUNKS_ON_DEVICE * chunk * states
        needs = [itemsize * length * each.token_size for each in geometry.layers]
        if method is not None and alone:
            lent = [
                cache.lends and not each.readers for cache, each in zip(method.caches, geometry.layers, strict=True)
            ]
            needs = [0 if none else size for none, size in zip(lent, needs, strict=True)]
        kv = max(needs) * max(len(each.attention) for each in geometry.decoder)
        buffers = prefill_buffers(device, kv) * kv
        if window is None and method is not None and streamed(geometry, length, itemsize, device):
            waiting = sum(nbytes(*each.waiting()) for each in method.waiting)
            present = [nbytes(*each.waiting()) if waiting else 0 for each in method.caches]
            # A layer's own is there in addition to the buffers, which exist from the first layer on that needs one.
            beside = max(size + (buffers if any(needs[: at + 1]) else 0) for at, size in enumerate(present))
            away = waiting + buffers - beside
            host |= {"KV that waits for the device": sum(present)} if waiting else {}
        narrow, wide = (itemsize * chunk * size for size in (geometry.hidden_size, geometry.intermediate_size))
        attention = 4 * itemsize * chunk * layer.num_heads * layer.head_dim + 2 * narrow
        mlp = 3 * (wide + narrow)  # gate, up and their product; the residual, and the input and the output
        in_attention = buffers + max(attention, mlp)
        most = max([in_attention, *_with_state(geometry, chunk, length, itemsize, buffers)])
        read_again = sum(
            itemsize * each.token_size * (together if each.window is None else min(each.window, length))
            for each in geometry.layers
            if each.readers
        )
        terms = {
            "rotary tables": tables,
            "tokens and positions": 2 * torch.int64.itemsize * together,
            "hidden states": hidden,
            "KV of a layer": buffers,
            "a chunk in a layer": itemsize * 2 * rotary * chunk + most - buffers,
        }
        if geometry.selects is not None:
            most = max(each.selects.most(length) for each in geometry.layers if each.selects is not None)
            read = chunk * most * layer.num_kv_heads * (layer.head_dim - layer.index_channels)
            gathered = min(AT_ONCE, torch.float32.itemsize * read)
            scores = min(SCORES_AT_ONCE, geometry.scratch * chunk * length)
            # Keys, values, both in fp32; and entries without the rows between them.
            entries = max(itemsize * length * each.grows if each.near else 0 for each in geometry.layers)
            terms["the model's own selection"] = scores + 3 * gathered + entries
        if geometry.shares:
            terms["KV that later layers read"] = read_again
        if geometry.beside_hidden:  # two terms and their sum
            terms["made before the first layer"] = 3 * itemsize * together * geometry.beside_hidden
        if geometry.form is not None:
            matrix = geometry.hidden_size * geometry.intermediate_size
            product = 2 * (wide + narrow) + geometry.form.beside(matrix, wide // itemsize, device, itemsize)
            terms["a weight made wide"] = max(0, product - max(attention, mlp))
        if method is not None and method.wants_logits:  # after a layer's tensors are freed
            logits = itemsize * chunk * geometry.vocab_size
            terms["logits of a window"] = max(0, logits - terms["a chunk in a layer"])
        return cls(terms, host, away)


def _with_state(geometry: ModelGeometry, chunk: int, length: int, itemsize: int, buffers: int) -> Iterator[int]:
    """Yield the bytes within each layer that keeps a state, including its input: the layer's own, and normalised.

    The buffers of KV exist from the first layer on that attends.
    """
    states, attended = iter(geometry.states), False
    for layer in geometry.decoder:
        attended = attended or bool(layer.attention)
        if layer.state is None:
            continue
        state = next(states)
        tokens = chunk if state.resumes else length
        rounded = -(-tokens // _AT_ONCE) * _AT_ONCE  # so that few lengths are run
        own = state.temporaries(rounded) + 2 * tokens * geometry.hidden_size * itemsize
        yield own + buffers * attended
