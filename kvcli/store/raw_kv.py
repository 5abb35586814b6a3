"""The KV of a conversation so far in host memory: all layers, as the model made it, by whole pages.

Whatever method answers is given it instead of reading these tokens again.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import ModelGeometry
from kvcli.store.cache import Footprint, Tiers
from kvcli.store.host_pool import HostPagePool
from kvcli.store.pages import paged
from kvcli.store.recurrent import PAGE as PAGE
from kvcli.store.recurrent import KeptStates


class RawKV:
    """Takes down what a prompt's exact reading gives (a `PrefillConsumer`), and has it for the next one (a `KnownKV`).

    There is room for `tokens`. The first `pages` pages are those of `before`, whose memory it shares, and so are the
    states after them.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        tiers: Tiers,
        tokens: int,
        before: RawKV | None = None,
        pages: int = 0,
    ):
        self._filled = 0  # the layer that was filled last
        self.known = pages if before is not None else 0  # pages
        self.states: KeptStates = KeptStates(
            geometry.states, tokens, None if before is None else before.states, PAGE * self.known
        )
        self.pools = [
            HostPagePool(each.num_kv_heads, each.head_dim, PAGE, tokens // PAGE, tiers, tensors=each.parts)
            for each in geometry.layers
        ]
        for pool, other in zip(self.pools, before.pools if before is not None else (), strict=False):
            if self.known:
                pool.share(other, self.known)

    @property
    def length(self) -> int:
        """Tokens whose KV is there in all layers."""
        return PAGE * min(pool.written for pool in self.pools)

    @property
    def query_rows(self) -> int:
        """None of the prompt's queries are wanted."""
        return 0

    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        """Look at nothing."""

    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None:  # noqa: ARG002
        """Take down the pages of k, v [Hk, s, d] that are not there yet."""
        stop = k.shape[1] // PAGE * PAGE
        start = min(self.known * PAGE, stop)
        self.pools[layer].write(start // PAGE, *(paged(each[:, start:stop], PAGE) for each in (k, v)))

    def fill(self, layer: int, kv: Tensor) -> None:
        """Put keys and values of the first n tokens, n a multiple of `PAGE`, into kv [t, Hk, n, d]."""
        self._filled = layer
        at, pages = 0, kv.shape[2] // PAGE
        for piece in self.pools[layer].pieces:
            here = piece[: max(0, pages - at)].to(kv.device)  # [n, Hk, t, p, d]
            for part, rows in enumerate(kv):
                paged(rows, PAGE)[:, at : at + len(here)].copy_(here[:, :, part].transpose(0, 1))
            at += len(here)

    def fill_state(self, layer: int, tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Put a layer's state after so many tokens into its tensors."""
        self.states.fill(layer, tokens, tensors)

    def cut(self, limit: int) -> int:
        """After how many tokens, `limit` at most, another prompt can go on."""
        return self.states.cut(limit)

    def pool(self) -> HostPagePool:
        """The pages of the layer that was filled last, which caches of the same pages can share."""
        return self.pools[self._filled]

    def keep(self, pool: HostPagePool) -> None:
        """Do nothing: who shares pages holds them."""

    def footprint(self) -> Footprint:
        """Count the bytes of all that is held, also of what others hold as well."""
        held = sum((pool.footprint() for pool in self.pools), self.states.footprint())
        return Footprint(host=held.host + held.shared)
