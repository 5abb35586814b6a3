"""KV of a prompt's first tokens that is there already, so that they need not be computed."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvcli.store.cache import LayerCache
from kvcli.store.host_pool import HostPagePool


class KnownKV(Protocol):
    """KV of a prompt's first tokens, which need not be computed: a saved document's, or a conversation's so far."""

    @property
    def length(self) -> int:
        """How many tokens it is of."""

    def fill(self, layer: int, kv: Tensor) -> None:
        """Put keys and values of the first n <= `length` tokens into kv [2, Hk, n, d]; once a layer, in their order."""

    def fill_state(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Put the state of a layer that keeps one after so many tokens, as `cut` gives them, into its tensors."""

    def cut(self, limit: int) -> int:
        """After how many tokens another prompt can go on, `limit` at most: whole pages, where a state was kept."""


@runtime_checkable
class LentKV(KnownKV, Protocol):
    """KV that lies in pages of host memory, which caches of the same pages can share."""

    def pool(self) -> HostPagePool:
        """Give the pages of the layer that was filled last."""

    def keep(self, pool: HostPagePool) -> None:
        """Leave them to those who share them."""


class Lending:
    """Known KV whose pages `caches`, [consumer][layer], share where they can, instead of being given them."""

    def __init__(self, known: LentKV, caches: Sequence[Sequence[LayerCache]], tokens: int):
        self.known, self.caches, self.length = known, caches, tokens
        self.fill_state, self.cut = known.fill_state, known.cut

    def fill(self, layer: int, kv: Tensor) -> None:
        """Fill, and lend."""
        self.known.fill(layer, kv)
        pool = self.known.pool()
        taken = [caches[layer].share_pages(pool, self.length) for caches in self.caches]
        if any(taken):
            self.known.keep(pool)
