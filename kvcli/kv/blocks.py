"""The cache of block retrieval: older blocks in host memory, retrieved for all heads alike (InfLLM, arXiv 2402.04617).

A block is a page of tokens. Once it leaves the local window it goes to the host, and one key represents it on the
device: the mean key of those of its tokens that received most attention from later ones while they were near.

The keys of near tokens are post-RoPE. Those of sinks and blocks are kept un-rotated, for one of two ways to attend to
them (`Positions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad
from typing_extensions import override

from kvcli.kernels import gemv, page_table
from kvcli.kernels._numba import compiled, prange, run, serves
from kvcli.kernels.page_table import EMPTY, place_pages
from kvcli.kernels.prefill_attention import FarTokens, far_near_attention, one_query, one_query_suits
from kvcli.kernels.softmax import Softmax
from kvcli.kernels.topk import topk_pages
from kvcli.kv.cache import LayerCache, Tiers, token_mask
from kvcli.kv.pages import PageBudget, paged
from kvcli.memory.host_pool import HostPagePool, page_pool
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Traffic, nbytes
from kvcli.models.geometry import LayerGeometry
from kvcli.sizes import slices

if TYPE_CHECKING:
    from kvcli.models.rope import Rotary


PIECE = 256  # keys per thread at once
SHORTEST = 1e-12  # lower bound of a vector's length, as in `normalize`


def dot_scores(probe: Tensor, keys: Tensor) -> Tensor:
    """Return the inner products of a probe [H, d] with block keys [n, Hk, d], one per block for all heads: [n]."""
    dtype = torch.promote_types(keys.dtype, torch.float32)
    by_kv_head = probe.to(dtype).view(keys.shape[1], -1, keys.shape[2]).sum(1)  # [Hk, d]
    rows, query = keys.to(dtype).flatten(1), by_kv_head.flatten()
    if gemv.suits(query[None], rows):
        return gemv.products(query[None, None], rows[None])[0, 0]
    scores: Tensor = rows @ query
    return scores


def cosine_scores(probe: Tensor, keys: Tensor) -> Tensor:
    """Return the cosines of a probe with block keys, shapes as in `dot_scores`; zero for a vector of zero length."""
    dtype = torch.promote_types(keys.dtype, torch.float32)
    rows = keys.flatten(1)
    if serves(rows) and rows.is_contiguous():  # reads keys once and never writes their unit vectors
        by_kv_head = normalize(probe.flatten(), dim=0).view(keys.shape[1], -1, keys.shape[2]).sum(1)  # [Hk, d]
        out = rows.new_empty(len(rows))
        run(_cosines, rows.numel(), by_kv_head.flatten(), rows, out)
        return out / sqrt(probe.shape[0] // keys.shape[1])
    unit_keys = normalize(keys.to(dtype).flatten(1), dim=1).view(keys.shape)
    groups = probe.shape[0] // keys.shape[1]
    return dot_scores(normalize(probe.to(dtype).flatten(), dim=0).view_as(probe), unit_keys) / sqrt(groups)


@compiled
def _cosines(probe: Any, keys: Any, out: Any) -> None:
    n, d = keys.shape
    for piece in prange((n + PIECE - 1) // PIECE):
        for j in range(piece * PIECE, min(piece * PIECE + PIECE, n)):
            product, square = np.float32(0), np.float32(0)
            for c in range(d):
                product += probe[c] * keys[j, c]
                square += keys[j, c] * keys[j, c]
            out[j] = product / max(np.sqrt(square), np.float32(SHORTEST))


def density(scores: Tensor) -> Tensor:
    """Return the entropy, in nats, of the softmax over blocks (ActQKV, equation 11)."""
    log_weights = scores.log_softmax(-1)
    return -(log_weights.exp() * log_weights).sum(-1)


Positions = Literal["capped", "original"]


@dataclass(frozen=True)
class BlockLayout:
    """The `budget` in blocks, `slots` for retrieved blocks, and the most tokens appended at once (`chunk`).

    The key of a block is the mean of `representatives` of its tokens. Up to `beside` slots can be given up to tokens
    that stay, see `BlockCache.keep`.
    """

    budget: PageBudget
    slots: int
    chunk: int
    representatives: int
    positions: Positions
    beside: int = 0


def rows_in_slots(held: Tensor, slots: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """View the keys and values [Hk, n, d] of all slots, held [slots, Hk, 2, p, d], in place.

    Also returns which of these rows are the first `tokens` in `slots` [k]: [1, tokens].
    """
    count, heads, _, size, d = held.shape
    step = 2 * heads * size  # rows from one slot to the next
    rows = (slots[:, None] * step + torch.arange(size, device=slots.device)).flatten()[:tokens]
    views = held.as_strided((2, heads, (count - 1) * step + size, d), (size * d, 2 * size * d, d, 1))
    return views[0], views[1], rows[None]


@dataclass
class BlockStats:
    """Statistics, as sums, of one layer's retrievals in one phase that had to leave something out.

    Blocks are the same for all heads. Summed over retrievals: `blocks` retrieved, of which `misses` were not on the
    device; `bytes_to_device`; `scores`, the mean score of the retrieved blocks; `entropies` of all scores in nats,
    where the method uses them. `fewest` and `most` are blocks of a single retrieval.
    """

    retrievals: int = 0
    blocks: int = 0
    fewest: int | None = None
    most: int = 0
    misses: int = 0
    bytes_to_device: int = 0
    scores: float = 0.0
    entropies: float | None = None

    def add(self, blocks: int, misses: int, moved: int, score: float) -> None:
        """Add one retrieval."""
        self.retrievals += 1
        self.blocks += blocks
        self.fewest = blocks if self.fewest is None else min(self.fewest, blocks)
        self.most = max(self.most, blocks)
        self.misses += misses
        self.bytes_to_device += moved
        self.scores += score

    def add_entropy(self, entropy: float) -> None:
        """Add the entropy of one retrieval's scores."""
        self.entropies = entropy + (self.entropies or 0.0)

    def summary(self) -> dict[str, Any]:
        """Return plain data for the report, with means per retrieval; empty where nothing was retrieved."""
        if not self.retrievals:
            return {}
        summary = {
            "retrievals": self.retrievals,
            "blocks_requested": self.blocks,
            "blocks_missed": self.misses,
            "bytes_to_device": self.bytes_to_device,
            "blocks_mean": self.blocks / self.retrievals,
            "blocks_min": self.fewest,
            "blocks_max": self.most,
            "score_mean": self.scores / self.retrievals,
        }
        return summary if self.entropies is None else summary | {"entropy_mean": self.entropies / self.retrievals}


@dataclass
class PhaseStats:
    """The statistics of one layer, separately for prefill and decode."""

    prefill: BlockStats = field(default_factory=BlockStats)
    decode: BlockStats = field(default_factory=BlockStats)


def total(layers: Iterable[BlockStats]) -> BlockStats:
    """Sum the statistics of layers."""
    used = [layer for layer in layers if layer.retrievals]
    entropies = [layer.entropies for layer in used if layer.entropies is not None]
    return BlockStats(
        retrievals=sum(layer.retrievals for layer in used),
        blocks=sum(layer.blocks for layer in used),
        fewest=min((layer.fewest for layer in used if layer.fewest is not None), default=None),
        most=max((layer.most for layer in used), default=0),
        misses=sum(layer.misses for layer in used),
        bytes_to_device=sum(layer.bytes_to_device for layer in used),
        scores=sum(layer.scores for layer in used),
        entropies=sum(entropies) if entropies else None,
    )


def summarise(layers: Mapping[int, PhaseStats]) -> dict[str, Any]:
    """Return plain data for the report: what was retrieved in prefill and in decode, in total and by layer.

    Means of decode come first: blocks per layer and step, the score of these blocks, the entropy of all scores.
    """
    prefill, decode = (
        total(getattr(phases, phase) for phases in layers.values()).summary() for phase in ("prefill", "decode")
    )
    shown = {"blocks_mean": "blocks_per_layer", "score_mean": "block_score", "entropy_mean": "score_entropy"}
    by_layer = [
        {"layer": layer, "prefill": phases.prefill.summary(), "decode": phases.decode.summary()}
        for layer, phases in layers.items()
    ]
    return {
        **{name: decode[key] for key, name in shown.items() if key in decode},
        "prefill": prefill,
        "decode": decode,
        "layers": by_layer,
    }


class BlockCache(LayerCache):
    """All blocks in host memory, counted from the first one after the sinks; everything else on the device.

    - Near tokens, the local window and new tokens: k, v [Hk, near, d], and `mass` [near], the attention that they
      received from later ones.
    - Sinks [Hk, sinks, d].
    - The key of each block, `keys` [blocks, Hk, d].
    - Retrieved blocks, `slots` [slots, Hk, 2, p, d] and `resident` [slots], the block in each slot, or EMPTY.

    The order of calls is: `extend` by new tokens, `advance` the local window (before attention in decode, after it in
    prefill), `recall` blocks, `attend_newest`.
    """

    pool: HostPagePool

    def __init__(
        self, layer: LayerGeometry, capacity: int, layout: BlockLayout, rotary: Rotary | None, tiers: Tiers
    ) -> None:
        budget, size, heads, d = layout.budget, layout.budget.size, layer.num_kv_heads, layer.head_dim
        num_blocks = max(0, budget.count(capacity) - budget.window - budget.sink)
        self.layout, self.budget, self.rotary = layout, budget, rotary
        self.length = 0
        self.first = 0  # position of the first near token, a block boundary
        near = self.most_near()
        self.k, self.v = (tiers.on_device(heads, near, d) for _ in range(2))
        self.mass = tiers.on_device(near, dtype=torch.float32).zero_()
        self.sink_k, self.sink_v = (tiers.on_device(heads, budget.sink * size, d) for _ in range(2))
        self.pool = page_pool(heads, d, size, num_blocks, tiers, kept=0 if budget.sink else 1)
        self.keys = tiers.on_device(self.most_blocks(num_blocks), heads, d)
        self.slots = tiers.on_device(min(layout.slots, num_blocks + layout.beside), heads, 2, size, d)
        self.resident = tiers.on_device(len(self.slots), dtype=torch.int64).fill_(EMPTY)
        self.chosen = self.resident[:0]  # [k] slots last attended to
        self.kept = 0  # tokens of `keep`, in the last slots
        self.cap = min(budget.window * size, capacity) - 1  # distance of far tokens with capped positions

    def most_blocks(self, pages: int) -> int:
        """Return the most blocks that `pages` pages can hold."""
        return pages

    def most_near(self) -> int:
        """Return the most near tokens."""
        return self.budget.window * self.budget.size + self.layout.chunk

    @property
    def num_blocks(self) -> int:
        """Number of blocks that have left the local window and can be retrieved."""
        return max(0, self.first // self.budget.size - self.budget.sink)

    @property
    def kept_blocks(self) -> int:
        """Number of blocks whose place the tokens of `keep` have taken."""
        return -(-self.kept // self.budget.size)

    @property
    def selected(self) -> int:
        """Number of blocks that the budget leaves to retrieve."""
        return self.budget.selected - self.kept_blocks

    @property
    def block_keys(self) -> Tensor:
        """The keys that represent these blocks: [num_blocks, Hk, d]."""
        return self.keys[: self.num_blocks]

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        """Store a prompt without its queries, so that each block is represented by its first tokens."""
        written = 0
        for part in slices(k.shape[1], self.layout.chunk):
            self.extend(k[:, part], v[:, part])
            written += self.advance()
        return written

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        self.extend(k[:, None], v[:, None])
        return self.advance()

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        return self.attend_newest(q[:, None], softmax)[:, 0]

    def extend(self, k: Tensor, v: Tensor) -> None:
        """Append tokens k, v [Hk, n, d] to the near ones, n <= `layout.chunk`."""
        start = self.length - self.first
        self.k[:, start : start + k.shape[1]] = k
        self.v[:, start : start + k.shape[1]] = v
        self.length += k.shape[1]

    def advance(self) -> int:
        """Offload the blocks that left the local window; return the bytes written to the host."""
        size, sink = self.budget.size, self.budget.sink
        first = max(0, self.budget.count(self.length) - self.budget.window) * size
        return self._leave(first, range(self.num_blocks, max(0, first // size - sink)))

    def recall(self, blocks: Tensor) -> tuple[list[int], int]:
        """Bring `blocks` [k], k <= slots, to the device; attention reads them from now on.

        Returns the misses of each KV head, the same for all, and the bytes moved.
        """
        missing = self.bring(blocks).shape[0]
        return [missing] * self.slots.shape[1], missing * self.pool.page_bytes

    def bring(self, blocks: Tensor) -> Tensor:
        """Bring blocks to the device, like `recall`; return the indices of the missing ones: [m]."""
        resident = self.resident[: self._open]
        if serves(resident, blocks, dtype=torch.int64, numbers=self.slots.numel()):
            self.chosen, absent = page_table.place(resident, blocks, self.pool.num_pages)
        else:
            self.chosen, absent = place_pages(resident, blocks)
        missing, slots = blocks[absent], self.chosen[absent]
        self.pool.bring_pages(missing, self.slots, slots)
        self._fill_slots(slots, missing)
        return absent

    def keep(self, k: Tensor, v: Tensor, first: int) -> None:
        """Attend to further tokens from now on: k and v [Hk, n, d] at positions from `first` on.

        They take up to `layout.beside` of the last slots, before any block is there. If they do not fit, the last
        tokens are kept.
        """
        size = self.budget.size
        n = self.kept = min(k.shape[1], min(self.layout.beside, len(self.slots)) * size)
        if not n:
            return
        positions = torch.arange(first + k.shape[1] - n, first + k.shape[1], device=k.device)
        for part, x in enumerate((self._rotate_to(self.unrotate(k, first)[:, -n:], positions), v[:, -n:])):
            whole = pad(x, (0, 0, 0, -n % size))  # padded to whole slots
            self.slots[self._open :, :, part] = paged(whole, size).transpose(0, 1)

    def unrotate(self, x: Tensor, first: int) -> Tensor:
        """Undo the rotation of queries or keys [.., n, d] of consecutive tokens from position `first` on."""
        if self.rotary is None:
            return x
        return self.rotary.unrotate(x, torch.arange(first, first + x.shape[1], device=x.device))

    def attend_newest(self, q: Tensor, softmax: Softmax, plain: Tensor | None = None) -> Tensor:
        """Attend with the newest m tokens q [H, m, d] to sinks, recalled blocks and near tokens; return [H, m, d].

        The weights that near tokens receive are added to their mass. `plain` are the queries without rotation, if
        known.
        """
        near, sinks = self.length - self.first, min(self.first, self.sink_k.shape[1])
        slots, tokens = self.chosen, len(self.chosen) * self.budget.size + self.kept
        if self.kept:
            slots = torch.cat((slots, torch.arange(self._open, len(self.slots), device=slots.device)))
        far_q = self._far_queries(q, plain) if sinks or tokens else q
        sink_k, sink_v = self.sink_k[:, :sinks], self.sink_v[:, :sinks]
        if one_query_suits(q, self.k[:, :near], self.v[:, :near]):
            parts = [FarTokens(far_q, sink_k, sink_v)] if sinks else []
            parts += [FarTokens(far_q, *rows_in_slots(self.slots, slots, tokens))] if tokens else []
            out, mass = one_query(q, self.k[:, :near], self.v[:, :near], parts, softmax)
        else:
            chosen = self.slots[slots].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :tokens]  # [2, Hk, k * p + kept, d]
            far = FarTokens(far_q, torch.cat((sink_k, chosen[0]), 1), torch.cat((sink_v, chosen[1]), 1))
            out, mass = far_near_attention(q, self.k[:, :near], self.v[:, :near], far, softmax)
        self.mass[:near] += mass
        return out

    def settled(self) -> list[Settled]:
        """Return the keys of blocks, which do not change."""
        return [Settled(self.keys, 0, self.num_blocks)]

    @override
    def attended(self) -> Tensor:
        sinks, size = min(self.first, self.sink_k.shape[1]), self.budget.size
        first = (self.resident[self.chosen] + self.budget.sink) * size  # [k] first tokens of the blocks
        blocks = (range(start, start + size) for start in first.tolist())
        return token_mask(self.k, self.length, range(sinks), *blocks, range(self.first, self.length))

    @override
    def footprint(self) -> Footprint:
        near = nbytes(self.k, self.v, self.mass, self.sink_k, self.sink_v)
        return Footprint(near + nbytes(self.keys, self.slots, self.resident)) + self.pool.footprint()

    @override
    def traffic(self, length: int) -> Traffic:
        token, budget = nbytes(self.k[:, :1], self.v[:, :1]), self.budget
        attended, blocks = budget.tokens(length) * token, self.most_blocks(len(budget.candidates(length)))
        if not budget.active(length):
            return Traffic(attended)
        recalled = budget.selected * self.pool.page_bytes
        return Traffic(attended, nbytes(self.keys[:blocks]), 4 * blocks, recalled)

    @property
    def _open(self) -> int:
        """Number of slots, from the first on, that are for blocks."""
        return len(self.slots) - self.kept_blocks

    def _leave(self, first: int, blocks: range) -> int:
        """Move the tokens before `first`, including `blocks`, away from the near ones; return the bytes written."""
        leaving = first - self.first
        if leaving <= 0:
            return 0
        k = self.unrotate(self.k[:, :leaving], self.first)
        sinks = min(max(0, self.sink_k.shape[1] - self.first), leaving)
        self.sink_k[:, self.first : self.first + sinks] = self._rotate_to(
            k[:, :sinks], torch.arange(self.first, self.first + sinks, device=k.device)
        )
        self.sink_v[:, self.first : self.first + sinks] = self.v[:, :sinks]
        start = self.first + sinks
        written = 0
        if blocks:
            self._represent(blocks, start, k[:, sinks:], self.mass[sinks:leaving])
            page = start // self.budget.size - self.budget.sink
            written = self._offload(page, k[:, sinks:], self.v[:, sinks:leaving])
        left = self.length - first
        for near in (self.k, self.v):
            near[:, :left] = near[:, leaving : leaving + left].clone()
        self.mass[:left] = self.mass[leaving : leaving + left].clone()
        self.mass[left:] = 0
        self.first = first
        return written

    def _represent(self, blocks: range, first: int, k: Tensor, mass: Tensor) -> None:  # noqa: ARG002
        """Compute the keys of `blocks`, whose tokens from position `first` on have un-rotated k [Hk, n, d].

        `mass` [n] is the attention that these tokens received.
        """
        size = self.budget.size
        by_token = paged(k, size).permute(1, 2, 0, 3)  # [blocks, p, Hk, d]
        tokens = topk_pages(mass.view(-1, size), self.layout.representatives)  # [blocks, r]
        rows = torch.arange(len(blocks), device=k.device)[:, None]
        self.keys[blocks.start : blocks.stop] = by_token[rows, tokens].mean(1)

    def _offload(self, page: int, k: Tensor, v: Tensor) -> int:
        """Write consecutive pages from `page` on to the host, k (un-rotated) and v [Hk, n * p, d]; return the bytes."""
        size, stop = self.budget.size, page + k.shape[1] // self.budget.size
        paged_k, paged_v = paged(k, size).to(self.keys.dtype), paged(v, size)  # [Hk, n, p, d]
        written = self.pool.write(page, paged_k, paged_v)
        fitting = torch.arange(page, stop, device=k.device)[: max(0, self._open - page)]  # while there is room
        parts, form = [x[:, : len(fitting)] for x in (paged_k, paged_v)], self.pool.format
        if form is not None:  # as they would be recalled
            parts = [form.rounded(x, part) for part, x in enumerate(parts)]
        self.slots[fitting] = torch.stack(parts, 2).transpose(0, 1)  # [n, Hk, 2, p, d]
        self._fill_slots(fitting, fitting)
        return written

    def _fill_slots(self, slots: Tensor, blocks: Tensor) -> None:
        """Register blocks [m], keys un-rotated, in slots [m], and rotate their keys unless positions are capped."""
        size = self.budget.size
        self.resident[slots] = blocks
        if self.layout.positions == "original" and len(slots):
            positions = ((blocks + self.budget.sink) * size)[:, None] + torch.arange(
                size, device=slots.device
            )  # [m, p]
            keys = self.slots[slots, :, 0].transpose(0, 1).flatten(1, 2)  # [Hk, m * p, d]
            flat = self._rotate_to(keys, positions.flatten())
            self.slots[slots, :, 0] = paged(flat, size).transpose(0, 1).to(self.slots.dtype)

    def _rotate_to(self, k: Tensor, positions: Tensor) -> Tensor:
        """Rotate un-rotated keys [Hk, n, d] to their positions [n], unless the positions are capped."""
        if self.rotary is None or self.layout.positions == "capped":
            return k
        return self.rotary.rotate(k, positions)

    def _far_queries(self, q: Tensor, plain: Tensor | None) -> Tensor:
        """Rotate the newest queries [H, m, d] for attention to sinks and blocks."""
        if self.rotary is None or self.layout.positions == "original":
            return q
        if plain is None:
            plain = self.unrotate(q, self.length - q.shape[1])
        distance = torch.full((q.shape[1],), self.cap, device=q.device)
        if self.rotary.attention_scaling != 1:  # un-rotated keys lack theirs: the queries get it
            plain = self.rotary.rotate(plain, torch.zeros_like(distance))
        return self.rotary.rotate(plain, distance).to(q.dtype)
