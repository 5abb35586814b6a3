"""The values of a layer in host memory, by chunks; their keys stay on the device in another form."""

from __future__ import annotations

from torch import Tensor

from kvcli.store.cache import Tiers, nbytes


class HostValuePool:
    """Full chunks of one layer of one sequence: blocks [chunks, Hk, c, d], those of one KV head contiguous."""

    def __init__(self, num_kv_heads: int, head_dim: int, chunk: int, num_chunks: int, tiers: Tiers):
        self.blocks = tiers.on_host(num_chunks, num_kv_heads, chunk, head_dim)

    def write(self, first: int, v: Tensor) -> int:
        """Store consecutive full chunks from chunk `first` on: v [Hk, n, c, d]. Returns the bytes moved."""
        target = self.blocks[first : first + v.shape[1]]
        # The layout changes on the device, so that one contiguous copy crosses the bus.
        target.copy_(v.transpose(0, 1).contiguous() if v.is_cuda else v.transpose(0, 1), non_blocking=True)
        return nbytes(target)

    def rows(self, chunks: Tensor, heads: Tensor) -> Tensor:
        """Say in host memory where chunk (chunks[i], heads[i]) lies for every i, for `take`.

        This waits for the device, and with it for every earlier `write` of its stream.
        """
        return (chunks * self.blocks.shape[1] + heads).to(self.blocks.device)

    def take(self, rows: Tensor) -> Tensor:
        """Collect the chunks that lie at `rows` [m] -> [m, c, d] in host memory; does not wait for the device."""
        return self.blocks.flatten(0, 1).index_select(0, rows)

    def nbytes(self) -> int:
        """Bytes in host memory."""
        return nbytes(self.blocks)
