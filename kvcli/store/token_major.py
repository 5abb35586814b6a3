"""A layer whose tokens lie in order, one after another, on the device or in host memory."""

from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.softmax import Softmax
from kvcli.store.cache import Footprint, LayerCache, Tiers, Traffic, both, nbytes, token_mask
from kvcli.store.host_pool import OFFLOAD_BYTES
from kvcli.store.pages import slices
from kvcli.store.state import Settled


class TokenMajorCache(LayerCache):
    """Every token, k and v [capacity, Hk, d] in one piece kv, on the device or, with `offload`, in host memory.

    Any range of tokens is contiguous and crosses the bus in one piece.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, tiers: Tiers, offload: bool):
        self.length = self.held = 0  # tokens seen; tokens kept of them
        self.tiers, self.offload = tiers, offload
        self._hold_in(self._rows(tiers.parts, capacity, num_kv_heads, head_dim))

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        self.length = self.held = k.shape[1]
        self._fill(self.k, k)
        self._fill(self.v, v)
        return self._moved(self.held)

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        self.k[self.held].copy_(k, non_blocking=True)
        self.v[self.held].copy_(v, non_blocking=True)
        self.length += 1
        self.held += 1
        return self._moved(1)

    def fetch(self) -> tuple[Tensor, Tensor, int]:
        """Return keys and values [Hk, held, d] on the device, and the bytes moved there from the host."""
        held = (rows[: self.held].to(self.tiers.device, non_blocking=True).transpose(0, 1) for rows in self.kv)
        k, *others = held
        return k, others[0] if others else k, self._moved(self.held)

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        k, v, _ = self.fetch()
        return decode_attention(q, k, v, softmax)

    def settled(self) -> list[Settled]:
        """Tokens stay as they came."""
        return [Settled(self.kv, 1, self.held)]

    @override
    def attended(self) -> Tensor:
        return token_mask(self.k[0], self.length, range(self.length))

    @override
    def footprint(self) -> Footprint:
        held = nbytes(self.kv)
        return Footprint(host=held) if self.offload else Footprint(device=held)

    @override
    def traffic(self, length: int) -> Traffic:
        attended = length * nbytes(self.kv[:, :1])
        return Traffic(attended, recalled=attended if self.offload else 0)

    def _fill(self, rows: Tensor, tokens: Tensor) -> None:
        """Put tokens [Hk, n, d] into the first rows of k or v; from a GPU to pinned memory this only queues copies."""
        if not (self.offload and tokens.is_cuda):
            rows[: tokens.shape[1]] = tokens.transpose(0, 1)
            return
        # The layout changes on the device, so that contiguous copies cross the bus; a little at a time, for room.
        for part in slices(tokens.shape[1], max(1, OFFLOAD_BYTES // nbytes(rows[:1]))):
            rows[part].copy_(tokens[:, part].transpose(0, 1).contiguous(), non_blocking=True)

    def _hold_in(self, kv: Tensor) -> None:
        self.kv = kv
        self.k, self.v = both(kv)

    def _rows(self, *shape: int) -> Tensor:
        return self.tiers.on_host(*shape) if self.offload else self.tiers.on_device(*shape)

    def _moved(self, tokens: int) -> int:
        """Bytes of so many tokens that cross to or from the host: none where the cache is on the device."""
        return nbytes(self.kv[:, :tokens]) if self.offload else 0
