"""The interface of a layer's cache, and the cache that keeps every token and selects nothing.

A cache holds the keys and values of one layer of one sequence. Keys on the device are post-RoPE. Shapes: H query heads,
Hk KV heads, d head dimension, s tokens of a prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import Tokens, decode_attention
from kvcli.kernels.narrow_attention import ChainTokens
from kvcli.kernels.page_table import SlotLayout
from kvcli.kernels.prefill_attention import prefill_attention
from kvcli.kernels.quant import BlockFormat
from kvcli.kernels.recall import HostLayout
from kvcli.kernels.softmax import Softmax
from kvcli.memory.disk_blocks import DiskBlocks
from kvcli.memory.host_pool import HostPagePool
from kvcli.memory.state import Settled
from kvcli.memory.tiers import Footprint, Traffic, nbytes
from kvcli.memory.tiers import Tiers as Tiers

NEVER = 2**31 - 1
"""More tokens than a sequence can have."""


class LayerSlots(NamedTuple):
    """A cache laid out in slots (`kvcli.kernels.page_table`): keys and values kv [2, Hk, rows, d] on the device.

    - `in_place`: the rows are those of all tokens in order.
    - `on_host`: kv lies in host memory instead, token by token, and the layer comes to the device whole.
    - `tensors`: the layer's other device tensors, by name. Where pages come from host memory, `resident`
      [Hk, selected] int32 is the page in each selected slot.
    - `pieces`: the pages in host memory, quantised if there is a `format`, with `sizes` [Hk, d] of channels if needed.
    - `dropped`: how many of the tokens seen are not held. Never more than `most` are held, nor those before the last
      multiple of `period` below the newest token.
    - `active_from`: the number of tokens from which a layer chooses, by default when it has outgrown its slots.
    - `into`: the layout of the slots that pages go to, if it is not `layout`.
    """

    kv: Tensor
    layout: SlotLayout
    tensors: Mapping[str, Tensor] = MappingProxyType({})
    in_place: bool = False
    on_host: bool = False
    dropped: int = 0
    most: int | None = None
    period: int | None = None
    active_from: int | None = None
    into: SlotLayout | None = None
    pieces: list[Tensor] | None = None
    host_layout: HostLayout = "hnd"
    format: BlockFormat | None = None
    sizes: Tensor | None = None


def both(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of kv [t, ..]: one and the same tensor where tokens have one part."""
    return kv[0], kv[-1]


def token_mask(k: Tensor, length: int, *tokens: range) -> Tensor:
    """Mark consecutive tokens, the same for every KV head of keys k [Hk, ..]: bool [Hk, length]."""
    mask = torch.zeros(k.shape[0], length, dtype=torch.bool, device=k.device)
    for part in tokens:
        mask[:, part.start : part.stop] = True
    return mask


class LayerCache(ABC):
    """The KV of one layer of one sequence."""

    length: int
    """Tokens seen so far, whether still held or not."""
    lends: ClassVar[bool] = False
    """Whether the device holds a prompt's keys and values unchanged, so that they can be collected in place."""

    readers: int = 1
    """Query heads of a KV head that select on their own."""
    pool: HostPagePool | None = None
    """The pages in host memory, if the cache keeps any there."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show no rows where `append` or `attend` does more than the class that shows them knows of."""
        super().__init_subclass__(**kwargs)

        def place(name: str) -> int:
            return next(at for at, parent in enumerate(cls.__mro__) if name in vars(parent))

        does = min(place("append"), place("attend"))
        if does < place("tokens_in_chain"):
            cls.tokens_in_chain = LayerCache.tokens_in_chain  # type: ignore[method-assign]
        if does < place("pages_in_chain"):
            cls.pages_in_chain = LayerCache.pages_in_chain  # type: ignore[method-assign]

    @property
    def disk(self) -> DiskBlocks | None:
        """The blocks that lie on a disk; None without any."""
        return None if self.pool is None else self.pool.on_disk

    @abstractmethod
    def load(self, k: Tensor, v: Tensor) -> int:
        """Store copies of a prompt's k, v [Hk, s, d], s >= 1; return the bytes written to the host."""

    def take(self, k: Tensor, v: Tensor) -> int:  # noqa: ARG002
        """Store what can already leave of an unfinished prompt: k, v [Hk, m, d] are its first m tokens.

        May be called before `load`, with more tokens each time; `load` then stores the rest. Returns the bytes written
        to the host. By default everything waits for `load`.
        """
        return 0

    @property
    def first_part(self) -> int:
        """The fewest first tokens of a prompt that `take` must get at once, if it is called."""
        return 0

    def waiting(self) -> Sequence[Tensor]:
        """Return device tensors that may wait in host memory while other layers are read; see `Waits`."""
        return ()

    def lend(self, length: int) -> Tensor | None:  # noqa: ARG002
        """Lend rows [t, Hk, length, d] to collect a prompt's KV in; None for caches that never lend (`lends`)."""
        return None

    @abstractmethod
    def append(self, k: Tensor, v: Tensor) -> int:
        """Store the current token's k, v [Hk, d]; return the bytes written to the host."""

    def tokens_in_chain(self) -> ChainTokens | None:
        """Return the tokens that a step with the next one attends to, with room for it.

        None if a step attends to anything else. Whoever stores that token there calls `take_row` in place of `append`.
        """
        return None

    def pages_in_chain(self) -> tuple[Tokens, Tensor, Tensor] | None:
        """Return what a step with the next token attends to, the slots of selected pages, and all pages.

        The slots are [2, Hk, selected, p, d], the pages blocks [.., Hk, 2, p, d] of host memory. None if a step attends
        to anything else, or loops cannot bring the pages. Whoever does so calls `take_row`, as for `tokens_in_chain`.
        """
        return None

    def take_row(self) -> int:
        """Count the token that was stored as `tokens_in_chain` says; return the bytes written to the host."""
        raise RuntimeError(f"{type(self).__name__} shows no tokens")

    def rewind(self, length: int) -> None:
        """Forget the tokens from `length` on; only if all tokens are held, or the rows are restored afterwards."""
        self.length = length

    @abstractmethod
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        """Attend with q [H, d] to everything on the device; return [H, d]."""

    def attend_selected(self, q: Tensor, selected: Tensor, softmax: Softmax) -> Tensor:  # noqa: ARG002
        """Attend with q [H, d] to `selected` [Hk, k], which the device holds by now, and to sink and window.

        By default that is everything on the device.
        """
        return self.attend(q, softmax)

    @abstractmethod
    def attended(self) -> Tensor:
        """Mark the tokens that the last step attended to: bool [Hk, length]; for tests and measurements."""

    @abstractmethod
    def footprint(self) -> Footprint:
        """Count the bytes allocated; works on the meta device."""

    def share(self, other: LayerCache, tokens: int) -> None:  # noqa: B027
        """Refer to the first `tokens` tokens that another cache of this kind holds in host memory.

        By default there is nothing to share. Call it before `load`, and after the other cache is loaded.
        """

    def share_pages(self, pages: HostPagePool, tokens: int) -> bool:  # noqa: ARG002
        """Refer to pages that hold the first `tokens` tokens, as `share` does; return whether that is possible."""
        return False

    @property
    def keeps_form(self) -> bool:
        """Whether tensors keep their form for all further tokens, so that steps over slots can go on to the end."""
        return True

    @property
    def apart(self) -> Sequence[tuple[Tensor, LayerCache]]:
        """The caches of sets of KV heads, and these heads [n] int64, where they hold different tokens; usually none."""
        return ()

    def as_slots(self) -> LayerSlots | None:
        """Lay the cache out in slots and return its tensors; None if it has no such form, or its heads are `apart`.

        The caller owns the tensors from then on; only `adopt_slots` and `footprint` may be called afterwards.
        """
        return None

    def adopt_slots(self, slots: LayerSlots) -> None:  # noqa: ARG002
        """Hold these tensors, equal to those that `as_slots` returned, instead of them."""
        raise RuntimeError(f"{type(self).__name__} has no slots")

    def traffic(self, length: int) -> Traffic:  # noqa: ARG002
        """Estimate what a step moves once `length` tokens were seen; works on the meta device.

        By default a step reads everything on the device, which is right for a cache that keeps only what it attends to.
        """
        return Traffic(attended=self.footprint().device)


class ResidentCache(LayerCache):
    """Rows of KV on the device, contiguous per head: k, v [Hk, rows, d], which are views of kv [t, Hk, rows, d]."""

    def __init__(self, num_kv_heads: int, head_dim: int, rows: int, tiers: Tiers):
        self.length = 0
        self.kv = tiers.on_device(tiers.parts, num_kv_heads, rows, head_dim)
        self.k, self.v = both(self.kv)

    @override
    def adopt_slots(self, slots: LayerSlots) -> None:
        self.kv = slots.kv
        self.k, self.v = both(self.kv)

    @override
    def footprint(self) -> Footprint:
        return Footprint(device=nbytes(self.kv))


class DenseCache(ResidentCache):
    """Every token, in order, with one row for each."""

    lends: ClassVar[bool] = True
    lent = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lend no rows where `load` is overridden, unless the class says so: it may read what it overwrites."""
        super().__init_subclass__(**kwargs)
        if "load" in vars(cls) and "lends" not in vars(cls):
            cls.lends = False

    @override
    def waiting(self) -> Sequence[Tensor]:
        return (self.kv,)

    @override
    def lend(self, length: int) -> Tensor | None:
        self.lent = self.lends
        return self.kv[:, :, :length] if self.lends else None

    @override
    def load(self, k: Tensor, v: Tensor) -> int:
        self.length = k.shape[1]
        if not self.lent:
            self.k[:, : self.length], self.v[:, : self.length] = k, v
        self.lent = False
        return 0

    @override
    def append(self, k: Tensor, v: Tensor) -> int:
        self.k.select(1, self.length).copy_(k)
        self.v.select(1, self.length).copy_(v)
        return self.take_row()

    @override
    def tokens_in_chain(self) -> ChainTokens | None:
        return Tokens(self.kv, self.length + 1) if self.length < self.kv.shape[2] else None

    @override
    def take_row(self) -> int:
        self.length += 1
        return 0

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        return decode_attention(q, self.k[:, : self.length], self.v[:, : self.length], softmax)

    def attend_window(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Append tokens k, v [Hk, n, d] and attend with their queries q [H, n, d] causally; return [H, n, d]."""
        start, self.length = self.length, self.length + k.shape[1]
        self.k[:, start : self.length], self.v[:, start : self.length] = k, v
        return prefill_attention(q, self.k[:, : self.length], self.v[:, : self.length], softmax)

    def settled(self) -> list[Settled]:
        """Return the tokens, which do not change."""
        return [Settled(self.kv, 2, self.length)]

    @override
    def attended(self) -> Tensor:
        return token_mask(self.k, self.length, range(self.length))

    @override
    def as_slots(self) -> LayerSlots:
        return LayerSlots(self.kv, SlotLayout.everything(self.k.shape[1]))

    @override
    def traffic(self, length: int) -> Traffic:
        return Traffic(attended=length * nbytes(self.kv[:, :, :1]))
