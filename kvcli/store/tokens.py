"""Layers whose tokens are selected one by one, by an index of their keys on the device.

Tokens are indexed a full group at a time; a group may be a single token. The newest tokens, those of the unfilled group
among them, are always attended to, so that every token is either indexed or attended to. The KV is on the device
(`ResidentTokenCache`), or in host memory with the selected tokens on the device (`OffloadedTokenCache`).
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import attend_chosen, attend_chosen_suits, decode_attention
from kvcli.kernels.slot_layout import SlotLayout, distinct
from kvcli.kernels.softmax import Softmax
from kvcli.store.cache import DenseCache, Footprint, LayerCache, Tiers, Traffic, nbytes, token_mask
from kvcli.store.layer_slots import LayerSlots
from kvcli.store.pages import kv_heads, take


@dataclass(frozen=True)
class TokenBudget:
    """How a budget of `total` tokens splits: `sink` first, at least `window` (>= 1) recent, the rest selected.

    The recent tokens are the last `window` or those that do not fill a group of `group`, whichever are more. Their
    number goes up and down with the length, and that of the selected tokens down and up: the sum is always `total`.
    """

    total: int
    sink: int
    window: int
    group: int

    @property
    def max_selected(self) -> int:
        """Tokens selected where a group has just filled."""
        return self.total - self.sink - self.window

    @property
    def min_selected(self) -> int:
        """Tokens selected just before a group fills."""
        return self.total - self.sink - max(self.window, self.group - 1)

    def full(self, length: int) -> int:
        """Tokens in full groups."""
        return length // self.group * self.group

    def candidates(self, length: int) -> range:
        """Tokens that can be selected, neither sink nor recent; none in a short context."""
        sink = min(self.sink, length)
        return range(sink, max(sink, min(length - self.window, self.full(length))))

    @property
    def slots(self) -> SlotLayout:
        """Lay the tokens attended to out in slots."""
        return SlotLayout(1, self.sink, self.max_selected, self.window, self.group)

    def selected(self, length: int) -> int:
        """Tokens to select in a context that has outgrown the budget."""
        candidates = self.candidates(length)
        return self.total - candidates.start - (length - candidates.stop)


class TokenIndex(Protocol):
    """What tokens are scored by, on the device. Each index has a `scores` of its own for the methods that use it."""

    def fill(self, first: int, keys: Tensor) -> None:
        """Index whole groups of consecutive tokens from token `first` on: keys [Hk, n, d]."""

    def traffic(self, budget: TokenBudget, length: int) -> Traffic:
        """Count what the selection of tokens moves once `length` were seen."""

    def nbytes(self) -> int:
        """Bytes on the device."""

    def tensors(self) -> dict[str, Tensor]:
        """What a batch of such indexes puts side by side, by name."""

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold these tensors, equal to those of `tensors`, in their place."""


IndexT = TypeVar("IndexT", bound=TokenIndex)


class TokenCache(LayerCache, Generic[IndexT]):
    """What resident and offloaded tokens have in common: the candidates, and attention to those selected."""

    budget: TokenBudget
    index: IndexT
    k: Tensor
    v: Tensor
    chosen: Tensor | None = None
    """[Hk, k] tokens last attended to beside sink and recent ones, [H, k] where query heads choose, None for all."""
    token_on_host = 0
    """Bytes of a token in host memory, of all KV heads."""

    @property
    def active(self) -> bool:
        """Tell whether the context has outgrown the budget."""
        return self.length > self.budget.total

    @property
    def candidates(self) -> range:
        """Tokens that can be selected."""
        return self.budget.candidates(self.length)

    @property
    def selected(self) -> int:
        """How many tokens to select, once the context has outgrown the budget."""
        return self.budget.selected(self.length)

    @override
    def traffic(self, length: int) -> Traffic:
        token = nbytes(*(rows[:, :1] for rows in distinct(self.k, self.v)))
        if length <= self.budget.total:
            return Traffic(attended=length * token)
        recalled = self.budget.selected(length) * self.token_on_host
        moved = self.index.traffic(self.budget, length)
        attended = min(length, self.readers * self.budget.total) * token  # the most
        return replace(moved, attended=attended, recalled=recalled, scores=self.readers * moved.scores)

    @abstractmethod
    def recall(self, selected: Tensor) -> tuple[list[int], int]:
        """Bring the missing tokens of `selected` [Hk, k] to the device, in place of those no longer selected.

        Returns the misses of each KV head and the bytes moved.
        """

    def _attend_rows(self, q: Tensor, chosen: Tensor, recent: Tensor | slice, softmax: Softmax) -> Tensor:
        """Attend to the rows of the sinks, to rows `chosen` of each KV head or query head, and to rows `recent`."""
        numbers = torch.arange(self.k.shape[1], device=chosen.device)
        before, after = (numbers[part].expand(len(chosen), -1) for part in (slice(self.candidates.start), recent))
        rows = torch.cat((before, chosen, after), 1)
        if attend_chosen_suits(q, self.k, self.v, rows):
            return attend_chosen(q, self.k, self.v, rows, softmax)
        return decode_attention(q, take(self.k, rows), take(self.v, rows), softmax)

    @abstractmethod
    def attend_selected(self, q: Tensor, selected: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to sink, recent and `selected` [Hk, k] tokens, which `recall` has brought -> [H, d]."""

    @override
    def attended(self) -> Tensor:
        candidates = self.candidates
        if self.chosen is None:
            return token_mask(self.k, self.length, range(self.length))
        always = token_mask(self.k, self.length, range(candidates.start), range(candidates.stop, self.length))
        always[kv_heads(self.chosen, len(always))[:, None], self.chosen] = True
        return always


class ResidentTokenCache(TokenCache[IndexT], DenseCache):
    """On the device: k, v [Hk, capacity, d] of every token, and the index."""

    lends = True

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        budget: TokenBudget,
        index: IndexT,
        tiers: Tiers,
        readers: int = 1,
    ):
        super().__init__(num_kv_heads, head_dim, capacity, tiers)
        self.budget = budget
        self.index = index
        self.readers = readers

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        super().load(k, v)
        self.index.fill(0, k[:, : self.budget.full(self.length)])
        return 0

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        super().append(k, v)
        first = self.length - self.budget.group
        if self.length % self.budget.group == 0:
            self.index.fill(first, self.k[:, first : self.length])
        return 0

    @override
    def recall(self, selected: Tensor) -> tuple[list[int], int]:
        """Return no misses."""
        return [0] * len(self.k), 0

    @override
    def attend_selected(self, q: Tensor, selected: Tensor, softmax: Softmax) -> Tensor:
        self.chosen = selected
        return self._attend_rows(q, selected, slice(self.candidates.stop, self.length), softmax)

    @override
    def as_slots(self) -> LayerSlots:
        return LayerSlots(self.kv, self.budget.slots, self.index.tensors(), in_place=True)

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        super().adopt_slots(slots)
        self.index.adopt(slots.tensors)

    @override
    def footprint(self) -> Footprint:
        return super().footprint() + Footprint(device=self.index.nbytes())
