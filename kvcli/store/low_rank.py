"""The pre-RoPE keys of a layer as low-rank factors (ShadowKV, arXiv 2410.21465, sections 3.1 and 4.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kernels import rebuild_rows
from kvcli.kernels.key_bases import gram_matrix, rebuild_keys, right_factor
from kvcli.kernels.page_table import Misses
from kvcli.kv.cache import Tiers
from kvcli.memory.state import Settled
from kvcli.memory.tiers import nbytes
from kvcli.sizes import slices

if TYPE_CHECKING:
    from kvcli.models.rope import Rotary

# Chunks whose keys are un-rotated at once: fp32 copies of them stay this long.
PIECE = 512


class LowRankKeys:
    """On the device: `a` [chunks, c, r] and `b` [Hk, r, d], whose product are the keys without their rotation.

    The factorised matrix has a row for each token, the keys of its heads side by side; r is `rank`, at most Hk*d. The
    factors are computed in fp32 and kept in the cache's dtype. With `refreshable` the Gram matrix `gram` [Hk*d, Hk*d]
    of all keys seen is kept, by which they can be factorised again.
    """

    def __init__(
        self,
        heads: tuple[int, int],  # Hk, d
        chunk: int,
        num_chunks: int,
        rank: int,
        rotary: Rotary | None,
        tiers: Tiers,
        refreshable: bool = False,
    ):
        num_kv_heads, head_dim = heads
        width = num_kv_heads * head_dim
        self.chunk, self.rank, self.rotary = chunk, min(rank, width), rotary
        held = self.rank if num_chunks else 0
        self.a = tiers.on_device(num_chunks, chunk, held)
        self.b = tiers.on_device(num_kv_heads, held, head_dim)
        self.gram = tiers.on_device(*(width, width) if refreshable and num_chunks else (0, 0), dtype=torch.float32)
        self.squares = tiers.on_device(2, dtype=torch.float32).zero_()  # of the error and of the keys
        self.in_gram = 0  # tokens
        self.stored = 0  # chunks

    @property
    def error(self) -> float | None:
        """Relative error (Frobenius) of the keys that `fit` stored against the exact ones; None before it."""
        error, keys = self.squares.tolist()
        return (error / keys) ** 0.5 if keys else None

    def fit(self, k: Tensor, num_chunks: int) -> None:
        """Factorise the keys k [Hk, s, d] of the first s tokens, and store their first `num_chunks` chunks."""
        gram = torch.zeros(k.shape[0] * k.shape[2], k.shape[0] * k.shape[2], device=k.device)
        for part in slices(k.shape[1], PIECE * self.chunk):
            gram += gram_matrix(self._unrotated(k[:, part], part.start))
        self._set_factor(right_factor(gram, self.rank))
        if len(self.gram):
            self.gram.copy_(gram)
        self.in_gram = k.shape[1]
        for part in slices(num_chunks, PIECE):
            start = part.start * self.chunk
            exact = self._unrotated(k[:, start : part.stop * self.chunk], start)
            self._project(part.start, exact)
            error = self.a[part].flatten(0, 1).float() @ self._factor() - exact
            self.squares += torch.stack((error.square().sum(), exact.square().sum()))

    def put(self, chunk: int, k: Tensor) -> None:
        """Store one chunk k [Hk, c, d] by the present factor."""
        start = chunk * self.chunk
        exact = self._unrotated(k, start)
        self._project(chunk, exact)
        if len(self.gram):
            self.gram += gram_matrix(exact[max(0, self.in_gram - start) :])
            self.in_gram = max(self.in_gram, start + self.chunk)

    def refresh(self, num_chunks: int) -> None:
        """Factorise again by the Gram matrix of the exact keys seen, and convert the stored chunks to the new factor.

        What the old factor left out of these chunks stays lost; later chunks have the new factor's full accuracy.
        """
        old = self._factor().clone()  # it may share memory with what is overwritten next
        self._set_factor(right_factor(self.gram, self.rank))
        change = old @ self._factor().T  # [r, r]
        for part in slices(num_chunks, PIECE):
            self.a[part] = (self.a[part].float() @ change).to(self.a.dtype)

    def rebuild(self, heads: Tensor, chunks: Tensor) -> Tensor:
        """Rebuild the keys, rotated to their positions, of `chunks` [m] of `heads` [m] (ascending): [m, c, d], fp32."""
        return self._rotated(rebuild_keys(self.a, self.b, heads, chunks), chunks)

    def rebuild_missing(self, misses: Misses, k: Tensor) -> None:
        """Rebuild likewise the chunks that `misses` lists, in their slots of k [Hk, slots, c, d]."""
        if rebuild_rows.suits(self.a, self.b, k):
            rotation = None if self.rotary is None else self.rotary.rotation(k.shape[3])
            rebuild_rows.rebuild_rows(self.a, self.b, misses, rotation, k)
        else:
            k[misses.heads, misses.slots] = self.rebuild(misses.heads, misses.pages).to(k.dtype)

    def rebuilt_from(self, chunks: int) -> int:
        """Bytes that so many chunks of a KV head are rebuilt of: their rows, and every head's factor."""
        return chunks * self.chunk * self.rank * self.a.element_size() + nbytes(self.b)

    def rebuilding(self, chunks: int) -> int:
        """Operations that rebuild so many chunks of a KV head."""
        return 2 * chunks * self.chunk * self.rank * self.b.shape[-1]

    def settled(self) -> list[Settled]:
        """Chunks do not change, unless they are factorised again."""
        return [Settled(self.a, 0, 0 if len(self.gram) else self.stored, self.stored)]

    def nbytes(self) -> int:
        """Bytes on the device."""
        return nbytes(self.a, self.b, self.gram, self.squares)

    def _unrotated(self, k: Tensor, start: int) -> Tensor:
        """Undo the rotation of keys k [Hk, n, d] of tokens from position `start` on: [n, Hk*d] in fp32."""
        k = k.float()
        if self.rotary is not None:
            k = self.rotary.unrotate(k, torch.arange(start, start + k.shape[1], device=k.device))
        return k.transpose(0, 1).flatten(1)

    def _rotated(self, keys: Tensor, chunks: Tensor) -> Tensor:
        """Rotate keys [m, c, d] of `chunks` [m] to their positions."""
        if self.rotary is None:
            return keys
        positions = chunks[:, None] * self.chunk + torch.arange(self.chunk, device=chunks.device)  # [m, c]
        return self.rotary.rotate(keys.flatten(0, 1), positions.flatten()).view_as(keys)

    def _factor(self) -> Tensor:
        return self.b.float().transpose(0, 1).flatten(1)  # [r, Hk*d]

    def _set_factor(self, factor: Tensor) -> None:
        self.b.copy_(factor.view(self.rank, *self.b.shape[::2]).transpose(0, 1))

    def _project(self, first: int, exact: Tensor) -> None:
        """Store consecutive chunks from `first` on, their un-rotated keys `exact` [n * c, Hk*d]."""
        rows = exact @ self._factor().T  # [n * c, r]
        self.stored = first + len(rows) // self.chunk
        self.a[first : self.stored] = rows.view(-1, self.chunk, self.rank).to(self.a.dtype)
