"""A layer that keeps a part of its prompt, and every token after it, on the device or in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.softmax import Softmax
from kvcli.store.cache import Footprint, LayerCache, Tiers, Traffic, nbytes, token_mask


class PrunedCache(LayerCache):
    """The kept tokens in order, each with the position it had: k, v [rows, Hk, d] in one tier.

    Before the prompt there are rows for `capacity` tokens, an upper bound. `load_kept` gives back those of the tokens
    that are dropped, so that from then on the memory held is that of the tokens kept and those to come.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, tiers: Tiers, offload: bool):
        self.length = self.held = 0
        self.dropped = range(0)  # tokens of the prompt
        self.capacity, self.tiers, self.offload = capacity, tiers, offload
        self.k, self.v = (self._rows(capacity, num_kv_heads, head_dim) for _ in range(2))

    def load(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.load`; keeps everything."""
        return self.load_kept(k, v, 0, k.shape[1])

    def load_kept(self, k: Tensor, v: Tensor, first: int, last: int) -> int:
        """Take over a prompt k, v [Hk, s, d], but keep only its `first` and `last` tokens, first + last <= s.

        Returns the bytes written to the host tier.
        """
        self.length, self.held = k.shape[1], first + last
        self.dropped = range(first, self.length - last)
        rows = self.capacity - self.length + self.held
        if rows < len(self.k):
            num_kv_heads, head_dim = self.k.shape[1:]
            del self.k, self.v  # before there are others, so that the bound holds at any time
            with torch.inference_mode(False):  # like every cache, writable wherever decoding goes on
                self.k, self.v = (self._rows(rows, num_kv_heads, head_dim) for _ in range(2))
        for kept, tokens in ((self.k, k.transpose(0, 1)), (self.v, v.transpose(0, 1))):
            kept[:first] = tokens[:first]
            kept[first : self.held] = tokens[self.length - last :]
        return self._moved(self.held)

    def append(self, k: Tensor, v: Tensor) -> int:
        """See `LayerCache.append`."""
        self.k[self.held].copy_(k, non_blocking=True)
        self.v[self.held].copy_(v, non_blocking=True)
        self.length += 1
        self.held += 1
        return self._moved(1)

    def bring(self) -> tuple[Tensor, Tensor, int]:
        """Keys and values [Hk, held, d] on the device, and the bytes moved there from the host tier."""
        k, v = (rows[: self.held].to(self.tiers.device, non_blocking=True).transpose(0, 1) for rows in (self.k, self.v))
        return k, v, self._moved(self.held)

    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """See `LayerCache.attend`."""
        k, v, _ = self.bring()
        return decode_attention(q, k, v, softmax)

    def attended(self) -> Tensor:
        """See `LayerCache.attended`."""
        kept = range(self.dropped.start), range(self.dropped.stop, self.length)
        return token_mask(self.k[0], self.length, *kept)

    def footprint(self) -> Footprint:
        """See `LayerCache.footprint`."""
        held = nbytes(self.k, self.v)
        return Footprint(host=held) if self.offload else Footprint(device=held)

    def traffic(self, length: int) -> Traffic:
        """See `LayerCache.traffic`; of a prompt that everything is kept of."""
        attended = length * nbytes(self.k[:1], self.v[:1])
        return Traffic(attended, recalled=attended if self.offload else 0)

    def _rows(self, *shape: int) -> Tensor:
        return self.tiers.on_host(*shape) if self.offload else self.tiers.on_device(*shape)

    def _moved(self, tokens: int) -> int:
        """Bytes that cross to or from the host tier with so many tokens."""
        return nbytes(self.k[:tokens], self.v[:tokens]) if self.offload else 0
