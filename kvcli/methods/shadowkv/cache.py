"""The cache of ShadowKV: low-rank keys on the device, values in host memory (section 4.1).

The rows on the device, k and v [Hk, rows, d], are in this order, and those that hold tokens are always a prefix:

    [ outlier chunks | selected chunks, one set per KV head | local chunks, the partly filled one last | generated ]

The keys of the selected chunks are rebuilt, all others are exact. A short context is not divided: row j holds token j
until there are more full chunks than places for them. Over slots the local chunks of a rolling window lie in a ring,
with one more place for the chunk that is being filled, so that no row moves (`ShadowLayout.ring`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.group_pooling import pool_scores
from kvcli.kernels.key_bases import gram_matrix, rebuild_keys, right_factor
from kvcli.kernels.page_table import EMPTY, Misses, SlotLayout, resolve_pages, slot_of_page
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.token_scores import token_scores
from kvcli.kernels.topk import topk_pages
from kvcli.kv.cache import NEVER, LayerCache, LayerSlots, ResidentCache, Tiers, token_mask
from kvcli.kv.pages import paged, take
from kvcli.memory.disk_blocks import DiskBlocks
from kvcli.memory.host_pool import page_pool
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Traffic, nbytes
from kvcli.methods.shadowkv import kernels as shadowkv_kernels
from kvcli.models.geometry import LayerGeometry
from kvcli.sizes import slices
from kvcli.telemetry import report

if TYPE_CHECKING:
    from kvcli.models.rope import Rotary


# Chunks that are summarised, or whose rotation is undone, at once; bounds the fp32 copies of keys.
PIECE = 512


class Landmarks:
    """Landmarks on the device: `means` [Hk, chunks, d], the mean keys; `excluded` [Hk, chunks] marks outliers.

    Outliers are chunks that their mean represents badly; they are always attended to and never selected.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, num_chunks: int, tiers: Tiers):
        self.means = tiers.on_device(num_kv_heads, num_chunks, head_dim)
        self.filled = 0  # chunks
        self.excluded = tiers.on_device(num_kv_heads, num_chunks, dtype=torch.bool).fill_(False)

    def fill(self, first: int, keys: Tensor) -> Tensor:
        """Compute the landmarks of full chunks from `first` on, keys [Hk, n, c, d]; return their fits [Hk, n]."""
        self.filled = first + keys.shape[1]
        fits = []
        for part in slices(keys.shape[1], PIECE):
            self.means[:, first:][:, part], fit = chunk_landmarks(keys[:, part])
            fits.append(fit)
        return torch.cat(fits, 1)

    def exclude_worst(self, fit: Tensor, count: int) -> Tensor:
        """Mark the `count` chunks of worst fit [Hk, n] as outliers; return their numbers [Hk, count]."""
        chunks = outlier_chunks(fit, count)
        self.excluded.scatter_(1, chunks, True)
        return chunks

    def scores(self, q: Tensor, num_chunks: int, scale: float) -> Tensor:
        """Score the first `num_chunks` with queries [H, d], outliers lowest; return [Hk, num_chunks] in fp32."""
        return landmark_scores(q, self.means[:, :num_chunks], self.excluded[:, :num_chunks], scale)

    def settled(self) -> list[Settled]:
        """Return the means, which no longer change."""
        return [Settled(self.means, 1, self.filled)]

    def nbytes(self) -> int:
        """Count the bytes on the device."""
        return nbytes(self.means, self.excluded)


def chunk_landmarks(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the landmarks [Hk, n, d] of full chunks, keys [Hk, n, c, d], and their fits [Hk, n]; both in fp32.

    L_j = mean_t k_jt      fit_j = min_t cos(L_j, k_jt)
    """
    keys = keys.float()
    landmarks = keys.mean(2)
    return landmarks, functional.cosine_similarity(keys, landmarks[:, :, None], dim=-1).amin(-1)


def outlier_chunks(fit: Tensor, count: int) -> Tensor:
    """Return the `count` chunks per head that fit their landmark worst, fit [Hk, n] -> [Hk, count]; ties: the lower."""
    if count == 0:
        return torch.empty(fit.shape[0], 0, dtype=torch.int64, device=fit.device)
    return topk_pages(-fit, count)


def landmark_scores(q: Tensor, landmarks: Tensor, excluded: Tensor, scale: float) -> Tensor:
    """Score chunks in fp32 for every KV head: q [H, d], landmarks [Hk, n, d], excluded [Hk, n] bool -> [Hk, n].

        s_j = max_g softmax_j(scale * q_g . L_j)

    The softmax of each query head runs over the selectable chunks, the maximum over the G query heads of a KV head. An
    excluded chunk gets -1, less than any other.
    """
    scores = token_scores(q.float(), landmarks.float(), scale)  # [Hk, G, n]
    weights = pool_scores(scores.masked_fill(excluded[:, None], float("-inf")), "max_s")
    return weights.masked_fill(excluded, -1.0)


class LowRankKeys:
    """Low-rank keys on the device: the product of `a` [chunks, c, r] and `b` [Hk, r, d] is the keys without rotation.

    The factorised matrix has one row per token, the keys of its heads concatenated; r is `rank`, at most Hk*d. The
    factors are computed in fp32 and kept in the cache's dtype. With `refreshable` the Gram matrix `gram` [Hk*d, Hk*d]
    of all keys seen is kept, so that they can be factorised again.
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
        """Relative error (Frobenius) of the keys that `fit` stored; None before it."""
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
        """Store one chunk k [Hk, c, d] by the current factor."""
        start = chunk * self.chunk
        exact = self._unrotated(k, start)
        self._project(chunk, exact)
        if len(self.gram):
            self.gram += gram_matrix(exact[max(0, self.in_gram - start) :])
            self.in_gram = max(self.in_gram, start + self.chunk)

    def refresh(self, num_chunks: int) -> None:
        """Factorise again by the Gram matrix of the exact keys seen, and convert the stored chunks to the new factor.

        What the old factor lost of these chunks stays lost; later chunks have the full accuracy of the new factor.
        """
        old = self._factor().clone()  # it may share memory with what is overwritten next
        self._set_factor(right_factor(self.gram, self.rank))
        change = old @ self._factor().T  # [r, r]
        for part in slices(num_chunks, PIECE):
            self.a[part] = (self.a[part].float() @ change).to(self.a.dtype)

    def rebuild(self, heads: Tensor, chunks: Tensor) -> Tensor:
        """Rebuild and rotate the keys of `chunks` [m] of `heads` [m] (ascending); return [m, c, d] in fp32."""
        return self._rotated(rebuild_keys(self.a, self.b, heads, chunks), chunks)

    def rebuild_missing(self, misses: Misses, k: Tensor) -> None:
        """Rebuild the chunks that `misses` lists, directly in their slots of k [Hk, slots, c, d]."""
        if shadowkv_kernels.rebuild_loops_suit(self.a, self.b, k):
            rotation = None if self.rotary is None else self.rotary.rotation(k.shape[3])
            shadowkv_kernels.rebuild_keys_cpu(self.a, self.b, misses, rotation, k)
        else:
            k[misses.heads, misses.slots] = self.rebuild(misses.heads, misses.pages).to(k.dtype)

    def rebuilt_from(self, chunks: int) -> int:
        """Count the bytes read to rebuild `chunks` chunks of a KV head: their rows of `a`, and every head's factor."""
        return chunks * self.chunk * self.rank * self.a.element_size() + nbytes(self.b)

    def rebuilding(self, chunks: int) -> int:
        """Count the operations that rebuild `chunks` chunks of a KV head."""
        return 2 * chunks * self.chunk * self.rank * self.b.shape[-1]

    def settled(self) -> list[Settled]:
        """Return the stored chunks, which change only where they can be factorised again."""
        return [Settled(self.a, 0, 0 if len(self.gram) else self.stored, self.stored)]

    def nbytes(self) -> int:
        """Count the bytes on the device."""
        return nbytes(self.a, self.b, self.gram, self.squares)

    def _unrotated(self, k: Tensor, start: int) -> Tensor:
        """Undo the rotation of keys k [Hk, n, d] of tokens from position `start` on; return [n, Hk*d] in fp32."""
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
        """Store chunks from `first` on, given their un-rotated keys `exact` [n * c, Hk*d]."""
        rows = exact @ self._factor().T  # [n * c, r]
        self.stored = first + len(rows) // self.chunk
        self.a[first : self.stored] = rows.view(-1, self.chunk, self.rank).to(self.a.dtype)


@dataclass(frozen=True)
class ShadowLayout:
    """Sizes in chunks of `size` tokens: `outliers`, `selected` and at least `local` chunks; and the `rank` of the keys.

    With `rolling`, generated tokens leave the device as the local window moves on; otherwise they all stay. The keys
    are factorised again after every `refresh` generated tokens.
    """

    size: int
    outliers: int
    selected: int
    local: int
    rank: int
    rolling: bool = False
    refresh: int | None = None
    fp8: bool = False

    @property
    def total(self) -> int:
        """Full chunks of the prompt on the device once the context is divided."""
        return self.outliers + self.selected + self.local

    @property
    def local_row(self) -> int:
        """First row of the local chunks."""
        return (self.outliers + self.selected) * self.size

    def rounded(self, x: Tensor) -> Tensor:
        """Round keys or values to fp8 precision, if `fp8` is set; the dtype stays."""
        return x.to(torch.float8_e5m2).to(x.dtype) if self.fp8 else x

    @property
    def ring(self) -> SlotLayout:
        """The rows of a rolling window that moves no row: a new chunk takes the slot of the one that has left."""
        return SlotLayout(self.size, self.outliers + self.selected, 0, self.local + 1, early=True)

    def active(self, length: int) -> bool:
        """Return whether a context of `length` tokens has to be divided."""
        return length // self.size > self.total

    def divides_between(self, prompt: int, capacity: int) -> bool:
        """Return whether a prompt of `prompt` tokens is divided on its way to `capacity`, and not before."""
        return self.rolling and self.active(capacity) and not self.active(prompt)

    def stored(self, capacity: int, prompt: int) -> int:
        """Return the most chunks that leave the device, for a prompt of `prompt` tokens continued to `capacity`."""
        longest = capacity if self.rolling else prompt
        return longest // self.size - self.local if self.active(longest) else 0

    def elements(self, tokens: int, width: int, rank: int) -> int:
        """Count the numbers that a layer keeps on the device for S `tokens` whose keys are M = Hk*d = `width` wide.

        S*M/C + 2(K+O)*C*M + S*r + r*M: landmarks, selected and outlier chunks, A and B (ShadowKV, appendix A.2,
        corrected).
        """
        chunks = self.selected + self.outliers
        return tokens * width // self.size + 2 * chunks * self.size * width + tokens * rank + rank * width

    def rows(self, capacity: int, prompt: int) -> int:
        """Return the most tokens on the device, for a prompt of `prompt` tokens continued to `capacity`."""
        generated = 0 if self.rolling else capacity - prompt
        return min(capacity, (self.total + 1) * self.size + generated)


class ShadowCache(ResidentCache):
    """The cache of a layer: chunks before the local window have values in host memory and low-rank keys on the device.

    The device also holds their landmarks, the rows, and `resident` [Hk, selected], the chunk in each selected slot, or
    EMPTY. `prompt` is the length of the prompt where it is known; otherwise there is room for any split of `capacity`.
    """

    def __init__(
        self,
        layer: LayerGeometry,
        capacity: int,
        prompt: int | None,
        layout: ShadowLayout,
        rotary: Rotary | None,
        tiers: Tiers,
    ):
        heads, d = layer.num_kv_heads, layer.head_dim
        num_chunks = layout.stored(capacity, capacity if prompt is None else prompt)
        self.divides = layout.divides_between(0 if prompt is None else prompt, capacity)  # unless the prompt was longer
        super().__init__(heads, d, layout.rows(capacity, 0 if prompt is None else prompt), tiers)
        self.layout, self.selected = layout, layout.selected  # chunks that a step selects
        self.num_chunks = 0  # before the local window; none until the context is divided
        self.divided_at = 0  # tokens seen when it was divided
        self.resident = tiers.on_device(heads, layout.selected, dtype=torch.int64)  # chunk in each selected slot
        self.keys = LowRankKeys((heads, d), layout.size, num_chunks, layout.rank, rotary, tiers, bool(layout.refresh))
        self.landmarks = Landmarks(heads, d, num_chunks, tiers)
        self.values = page_pool(heads, d, layout.size, num_chunks, tiers, tensors=1, kept=1)

    @property
    def active(self) -> bool:
        """Whether the context is divided, so that chunks have to be selected."""
        return self.num_chunks > 0

    @override
    def share(self, other: LayerCache, tokens: int) -> None:
        assert isinstance(other, ShadowCache)
        self.values.share(other.values, max(0, tokens // self.layout.size - self.layout.local))

    @property
    @override
    def disk(self) -> DiskBlocks | None:
        return self.values.on_disk

    @override
    def waiting(self) -> Sequence[Tensor]:
        return self.kv, self.keys.a, self.landmarks.means

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        k, v = self.layout.rounded(k), self.layout.rounded(v)
        self.length = k.shape[1]
        if self.layout.active(self.length):
            return self._divide(k, v)
        self._fill(0, k, v)
        return 0

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        """Store the current token; with a rolling window, move the chunk that leaves it to the host."""
        self._fill(self._held, self.layout.rounded(k)[:, None], self.layout.rounded(v)[:, None])
        self.length += 1
        if not self.layout.rolling:
            return 0
        if not self.active:
            if not self.layout.active(self.length):
                return 0
            return self._divide(self.k[:, : self.length].clone(), self.v[:, : self.length].clone())
        written = 0
        if self.length // self.layout.size - self.num_chunks > self.layout.local:
            written = self._offload_oldest()
        if self.layout.refresh and (self.length - self.divided_at) % self.layout.refresh == 0:
            self._refresh()
        return written

    @property
    def candidates(self) -> range:
        """Chunks that are scored: those before the local window, including outliers, which score lowest."""
        return range(self.num_chunks)

    def recall(self, selected: Tensor) -> tuple[list[int], int]:
        """Bring the missing chunks of `selected` [Hk, k] to the device: values from the host, keys rebuilt.

        The device rebuilds the keys while the host gathers the values. Returns the misses of each KV head and the bytes
        moved.
        """
        misses = resolve_pages(self.resident, selected)
        on_host = misses.pages.to("cpu"), misses.heads.to("cpu")  # waits for the device, so before more work is queued
        self.keys.rebuild_missing(misses, self._slots(self.k))
        values = self.values.fetch(*on_host)[:, 0]  # [m, c, d]
        self._slots(self.v)[misses.heads, misses.slots] = values
        self.resident[misses.heads, misses.slots] = misses.pages
        return misses.by_head(len(selected)), len(values) * self.values.block_bytes

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        return decode_attention(q, self.k[:, : self._held], self.v[:, : self._held], softmax)

    @override
    def attended(self) -> Tensor:
        if not self.active:
            return token_mask(self.k, self.length, range(self.length))
        mask = token_mask(self.k, self.length, range(self.num_chunks * self.layout.size, self.length))
        outliers = self.landmarks.excluded[:, : self.num_chunks]
        chunks = outliers.scatter(1, self.resident, True)  # [Hk, num_chunks]
        mask[:, : self.num_chunks * self.layout.size] = chunks.repeat_interleave(self.layout.size, 1)
        return mask

    @property
    @override
    def keeps_form(self) -> bool:
        return self.active or not self.divides

    @override
    def as_slots(self) -> LayerSlots:
        """Lay the cache out in slots; the context must be divided already, or never be.

        A rolling window becomes a ring. The chunk that leaves it with the next token is stored now, because over slots
        this happens one token earlier.
        """
        layout, low_rank, marks = self.layout, self.keys, self.landmarks
        rolls, room = layout.rolling and self.active, marks.means.shape[1]
        selectable = self.num_chunks
        if rolls and (self.length + 1) % layout.size == 0 and selectable < room:
            self._store_oldest()
            selectable += 1
        if rolls:
            self._turn_window()
        tensors = {"resident": self.resident.int(), "a": low_rank.a, "b": low_rank.b}
        tensors |= {"means": marks.means, "excluded": marks.excluded}
        numbers = torch.tensor([selectable, room], dtype=torch.int32, device=self.k.device)
        tensors["chunks"], tensors["room"] = numbers
        return LayerSlots(
            self.kv,
            layout.ring if rolls else SlotLayout.everything(self.k.shape[1]),
            tensors,
            dropped=0 if rolls else self.length - self._held,
            active_from=1 if self.active else NEVER,
            into=SlotLayout(layout.size, layout.outliers, layout.selected, 0),
            pieces=self.values.pieces,
            format=self.values.format,
        )

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        super().adopt_slots(slots)
        tensors, low_rank, marks = slots.tensors, self.keys, self.landmarks
        self.resident, low_rank.a, low_rank.b = tensors["resident"], tensors["a"], tensors["b"]
        marks.means, marks.excluded = tensors["means"], tensors["excluded"]

    @override
    def footprint(self) -> Footprint:
        device = nbytes(self.resident) + self.keys.nbytes() + self.landmarks.nbytes()
        return super().footprint() + Footprint(device) + self.values.footprint()

    @override
    def traffic(self, length: int) -> Traffic:
        """Estimate the traffic of a step; a recalled chunk moves its values, and its keys are rebuilt on the device."""
        token, layout = nbytes(self.k[:, :1], self.v[:, :1]), self.layout
        stored = min(self.landmarks.means.shape[1], length // layout.size - layout.local)
        if stored <= 0 or not layout.active(length):
            return Traffic(attended=length * token)
        means = self.landmarks.means[:, :stored]
        return Traffic(
            attended=(layout.local_row + length - stored * layout.size) * token,
            scored=nbytes(means),
            scores=4 * means.shape[0] * stored,
            recalled=self.resident.numel() * self.values.block_bytes,
            rebuilt_from=self.keys.rebuilt_from(self.resident.numel()),
            rebuilding=self.keys.rebuilding(self.resident.numel()),
        )

    @property
    def covered(self) -> int:
        """Tokens that this layout covers: all but generated tokens that stay on the device."""
        return self.length if self.layout.rolling else self.divided_at

    @property
    def _held(self) -> int:
        """Rows in use."""
        if not self.active:
            return self.length
        return self.layout.local_row + self.length - self.num_chunks * self.layout.size

    def _slots(self, rows: Tensor) -> Tensor:
        """View the selected chunks of k or v as [Hk, selected, c, d]."""
        layout = self.layout
        return paged(rows[:, layout.outliers * layout.size : layout.local_row], layout.size)

    def _fill(self, row: int, k: Tensor, v: Tensor) -> None:
        """Write k, v [Hk, n, d] to the rows from `row` on."""
        self.k[:, row : row + k.shape[1]] = k
        self.v[:, row : row + k.shape[1]] = v

    def _divide(self, k: Tensor, v: Tensor) -> int:
        """Divide the context so far, k and v [Hk, s, d], among its places; return the bytes written to the host."""
        layout, size = self.layout, self.layout.size
        self.num_chunks, self.divided_at = k.shape[1] // size - layout.local, k.shape[1]
        away = self.num_chunks * size
        chunks_k, chunks_v = paged(k[:, :away], size), paged(v[:, :away], size)  # [Hk, num_chunks, c, d]
        self.keys.fit(k, self.num_chunks)
        outliers = self.landmarks.exclude_worst(self.landmarks.fill(0, chunks_k), layout.outliers)  # [Hk, o]
        self._fill(0, take(chunks_k, outliers).flatten(1, 2), take(chunks_v, outliers).flatten(1, 2))
        self._fill(layout.local_row, k[:, away:], v[:, away:])
        self.resident.fill_(EMPTY)
        return self.values.write(0, chunks_v)

    def _store_oldest(self) -> int:
        """Store landmark, low-rank keys and (on the host) values of the oldest local chunk; return bytes written."""
        start, size = self.layout.local_row, self.layout.size
        k, v = (rows[:, start : start + size] for rows in (self.k, self.v))
        self.landmarks.fill(self.num_chunks, k[:, None])
        self.keys.put(self.num_chunks, k)
        return self.values.write(self.num_chunks, v[:, None])

    def _turn_window(self) -> None:
        """Move the local rows to their places in the ring."""
        start, size, held = self.layout.local_row, self.layout.size, self._held
        positions = torch.arange(self.num_chunks * size, self.length, device=self.k.device)
        rows = slot_of_page(positions // size, self.layout.ring) * size + positions % size
        self.kv[:, :, rows] = self.kv[:, :, start:held].clone()

    def _offload_oldest(self) -> int:
        """Store the oldest local chunk and move the others up; return the bytes written."""
        start, size, held = self.layout.local_row, self.layout.size, self._held
        written = self._store_oldest()
        for rows in (self.k, self.v):
            rows[:, start : held - size] = rows[:, start + size : held].clone()
        self.num_chunks += 1
        return written

    def _refresh(self) -> None:
        """Factorise again, and rebuild the selected keys, so that all of them come from one factor."""
        self.keys.refresh(self.num_chunks)
        heads, slots = (self.resident != EMPTY).nonzero(as_tuple=True)
        self.keys.rebuild_missing(Misses(heads, slots, self.resident[heads, slots]), self._slots(self.k))


def summarise(layers: Mapping[int, ShadowCache], pages: report.Cache) -> dict[str, Any]:
    """Return plain data for the report, about the layers with factorised keys; empty where there are none.

    `key_error` is the relative error (Frobenius) of the prompt's keys as stored, the worst of all layers and per layer.
    `memory_saving` is the factor of the paper's appendix A.2 as corrected, `bytes_saved` the same in bytes, both for
    the tokens that are stored in this way. `outlier_bytes_on_host`: the values of outliers lie in host memory as well,
    where a chunk's place is its number; the paper leaves them out.
    """
    active = {layer: cache for layer, cache in layers.items() if cache.active}
    if not active:
        return {}
    errors = {layer: cache.keys.error or 0.0 for layer, cache in active.items()}
    full = kept = 0
    for cache in active.values():
        width = cache.k.shape[0] * cache.k.shape[2]
        full += 2 * cache.covered * width * cache.k.element_size()
        kept += cache.layout.elements(cache.covered, width, cache.keys.rank) * cache.k.element_size()
    return {
        "rank": max(cache.keys.rank for cache in active.values()),
        "key_error": max(errors.values()),
        "outlier_bytes_on_host": sum(
            cache.resident.shape[0] * cache.layout.outliers * cache.values.block_bytes for cache in active.values()
        ),
        "hit_rate": pages.hits / pages.pages_requested if pages.pages_requested else 0.0,
        "memory_saving": full / kept,
        "bytes_saved": full - kept,
        "layers": [{"layer": layer, "key_error": error} for layer, error in errors.items()],
    }
