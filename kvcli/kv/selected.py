"""Tokens of layers that select by themselves, with the keys of the model's own index.

A token's index key travels with its keys and values: a share of it in the first channels of every head and part. So
whatever takes, saves or shares keys and values takes the index with them.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from kvcli.kernels.selected_attention import selected_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import DenseCache, LayerCache, Tiers
from kvcli.memory.tiers import Traffic
from kvcli.models.geometry import LayerGeometry


def with_index(index: Tensor, k: Tensor, v: Tensor, layer: LayerGeometry) -> tuple[Tensor, Tensor]:
    """Put index keys [b, n, c] in front of k and v [b, Hk, n, d]; return both, now [.., head_dim] wide."""
    first, *second = _shares(index, layer)
    with_keys = torch.cat((first, k), -1)
    return with_keys, torch.cat((second[0], v), -1) if second else with_keys


def _shares(index: Tensor, layer: LayerGeometry) -> Tensor:
    """Cut index keys [b, n, c] into shares [t, b, Hk, n, width]."""
    (b, n, c), heads, width = index.shape, layer.num_kv_heads, layer.index_channels
    return pad(index, (0, layer.parts * heads * width - c)).view(b, n, layer.parts, heads, width).permute(2, 0, 3, 1, 4)


def index_keys(kv: Tensor, layer: LayerGeometry) -> Tensor:
    """Return the index keys [n, c] of tokens with kv [t, Hk, n, at least the index channels]; a view if it can be."""
    assert layer.selects is not None
    shares = kv[..., : layer.index_channels].permute(2, 0, 1, 3)  # [n, t, Hk, width]
    return shares.flatten(1)[:, : layer.selects.channels]


def with_new_keys(kv: Tensor, length: int, new: Tensor, layer: LayerGeometry) -> Tensor:
    """Return the index keys [length + m, c] of the first tokens of kv and of `new` ones [m, c], written behind them."""
    end = length + len(new)
    kv[:, :, length:end, : layer.index_channels] = _shares(new[None], layer)[:, 0]
    return index_keys(kv[:, :, :end], layer)


def with_new_key(kv: Tensor, at: Tensor, new: Tensor, layer: LayerGeometry) -> Tensor:
    """Write the index key of a `new` token [1, c] to row `at` [1] of kv; return those of all rows [rows, c].

    The host knows no numbers for it.
    """
    kv[..., : layer.index_channels].index_copy_(2, at, _shares(new[None], layer)[:, 0])
    return index_keys(kv, layer)


class SelectingCache(LayerCache):
    """The KV of a layer that selects by itself."""

    layer: LayerGeometry
    kv: Tensor
    """Tokens on the device [t, Hk, n, d], or more than d channels of which these are the last."""
    selected: Tensor | None = None
    """[1 or Hk, k] tokens of the last step, EMPTY for none."""

    @property
    @abstractmethod
    def index_rows(self) -> Tensor:
        """The rows that begin with shares of the tokens' index keys: [t, Hk, capacity, at least the index channels]."""

    def index(self, new: Tensor) -> Tensor:
        """Return the index keys of all tokens so far and of `new` ones [n, c], which come next: [length + n, c]."""
        return with_new_keys(self.index_rows, self.length, new, self.layer)

    def index_at(self, at: Tensor, new: Tensor) -> Tensor:
        """Do the same for the `new` token [1, c] at position `at` [1] -> [capacity, c], whatever the number there."""
        return with_new_key(self.index_rows, at, new, self.layer)

    @override
    def attended(self) -> Tensor:
        heads = self.layer.num_kv_heads
        mask = torch.zeros(heads, self.length + 1, dtype=torch.bool)  # EMPTY is the last one
        if self.selected is not None:
            mask.scatter_(1, self.selected.expand(heads, -1).cpu() % (self.length + 1), True)
        return mask[:, :-1]


class ResidentSelectingCache(SelectingCache, DenseCache):
    """Everything on the device, [t, Hk, capacity, d], where a step attends to what the model selects."""

    lends = True

    def __init__(self, layer: LayerGeometry, capacity: int, tiers: Tiers):
        super().__init__(layer.num_kv_heads, layer.head_dim, capacity, tiers)
        self.layer = layer

    @property
    @override
    def index_rows(self) -> Tensor:
        return self.kv

    @override
    def attend(self, q: Tensor, softmax: Softmax) -> Tensor:
        assert softmax.selected is not None
        self.selected, first = softmax.selected[:, 0], self.layer.index_channels
        k, v = (rows[:, : self.length, first:] for rows in (self.k, self.v))
        return selected_attention(q[:, None], k, v, softmax)[:, 0]

    @override
    def traffic(self, length: int) -> Traffic:
        return selection_traffic(self.layer, length, self.kv.element_size())


def selection_traffic(layer: LayerGeometry, length: int, itemsize: int) -> Traffic:
    """Estimate what a step reads on the device of a layer that selects by itself, once it has seen `length` tokens."""
    assert layer.selects is not None
    rows, index = layer.parts * layer.num_kv_heads * itemsize, layer.index_channels
    scored = length * rows * index
    return Traffic(min(length, layer.selects.tokens) * rows * (layer.head_dim - index), scored=scored)
