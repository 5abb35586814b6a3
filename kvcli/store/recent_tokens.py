"""The newest tokens of a layer as the model made them, where host memory holds all of them rounded.

A token is read most while it is new: what is being written is copied from and continued, and an error there is made
again with every token. So the literature keeps a residual of recent tokens (KIVI, arXiv 2402.02750, section 3.2). Which
tokens these are moves with the text, so that they lie in a ring.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.store.footprint import Footprint, nbytes
from kvcli.store.tiers import Tiers

RECENT = 128
"""Tokens that are kept so: KIVI's residual length."""


class RecentTokens:
    """The tokens from `first` to `end`, at most RECENT of them, in rows kv [t, n, Hk, d] of the device."""

    def __init__(self, capacity: int, num_kv_heads: int, head_dim: int, tiers: Tiers):
        self.first = self.end = 0
        self.kv = tiers.on_device(tiers.parts, min(RECENT, capacity), num_kv_heads, head_dim)

    def put(self, start: int, parts: Sequence[Tensor]) -> None:
        """Take tokens from `start` on, keys and values [n, Hk, d], which come behind those that are here."""
        size, count = self.kv.shape[1], len(parts[0])
        if start != self.end:
            self.first = start
        self.end = start + count
        self.first = max(self.first, self.end - size)
        rows = self._rows(range(max(start, self.first), self.end))
        for mine, x in zip(self.kv, parts, strict=True):
            mine[rows] = x[count - len(rows) :]

    def rewind(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self.end = min(self.end, length)
        self.first = min(self.first, self.end)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Copy their keys and values, in order: [Hk, n, d] each."""
        k, v = self.kv[:, self._rows(range(self.first, self.end))].transpose(1, 2)
        return k, v

    def restore(self, kv: Tensor, held: int) -> None:
        """Put them in the place of the same rows of kv [t, rows, Hk, d], of which `held` are tokens."""
        tokens = range(self.first, min(self.end, held))
        rows = self._rows(tokens)
        for target, mine in zip(kv, self.kv, strict=True):
            target[tokens.start : tokens.stop] = mine[rows]

    def footprint(self) -> Footprint:
        """Count the bytes allocated."""
        return Footprint(device=nbytes(self.kv))

    def _rows(self, tokens: range) -> Tensor:
        return torch.arange(tokens.start, max(tokens.start, tokens.stop), device=self.kv.device) % self.kv.shape[1]
