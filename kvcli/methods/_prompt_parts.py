"""What a method does with a layer's KV before all of it is there, or sees of the prompt once more, and where what it
holds on the device waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import LayerCache
from kvcli.kv.parking import Waits
from kvcli.telemetry.counters import Count

if TYPE_CHECKING:
    from kvcli.methods.base import SequenceContext


class PromptParts:
    """The part of a method that a prompt passes through in parts."""

    caches: list[LayerCache]
    context: SequenceContext

    def take_part(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Take what can leave of a layer's k, v [Hk, m, d] of the first tokens; `prefill` comes with all of them."""
        self.open(layer)
        if k.shape[1] >= self.caches[layer].first_part:
            self.context.counters.add(layer, Count.BYTES_TO_HOST, self.caches[layer].take(k, v))

    def lend(self, layer: int, length: int) -> Tensor | None:
        """Lend rows [t, Hk, length, d] in which a layer's KV is collected, where `prefill` would copy it there."""
        self.open(layer)
        return self.caches[layer].lend(length)

    @property
    def repeated(self) -> Sequence[slice]:
        """Parts of the prompt's document that the model is to repeat behind it, for `observe_repeated` to see."""
        return ()

    def observe_repeated(self, layer: int, part: slice, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """See how a layer reads a part of the document once more, asked to repeat it, in pieces, before `prefill`.

        The repetition's next queries q [H, n, d], all keys up to them k [Hk, m, d]: those of the document, and from
        there on its own, the request's among them. The caller uses the tensors again afterwards.
        """

    @property
    def waiting(self) -> Sequence[Waits]:
        """What can wait in host memory while a layer that needs none of it is read: where KV goes there anyway."""
        offloads = getattr(self, "offloads", False) or getattr(getattr(self, "config", None), "offload", False)
        return self.caches if offloads else ()

    def wait(self, made: Waits, keeps: bool = True) -> None:
        """Let what was just made wait, if the prompt is so long; what `keeps` nothing of it needs no host memory."""
        if self.context.parking is not None and any(each is made for each in self.waiting):
            self.context.parking.enter(made, keeps)

    def open(self, layer: int) -> None:
        """Have what a layer holds on the device there."""
        if self.context.parking is not None:
            self.context.parking.open(self.caches[layer])

    def close(self, layer: int) -> None:
        """Let it wait, after `prefill`; nobody reads any more what was lent."""
        if self.context.parking is not None:
            self.context.parking.close(self.caches[layer])

    def be_present(self) -> None:
        """Have everything there from now on."""
        if self.context.parking is not None:
            self.context.parking.leave()
            self.context.parking = None


def last_used_here(*tensors: Tensor) -> None:
    """Keep memory of the stream that reads the prompt from its next user until the one that stores the prompt is done.

    For tensors that are made in `observe` and let go of in `prefill`.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
