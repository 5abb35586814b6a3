"""Drafts of full attention itself: what its last check attended to is what the next drafts read.

The idea is that of Vegas (arXiv 2602.07223): a check scores all tokens anyway. For each layer and KV head, the tokens
with the most attention, the newest ones and all since are copied side by side. A draft attends to this copy alone, so
that it costs hardly more than reading the weights. There is no second cache, and nothing to take back: the
check reads the drafts again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.decode_attention import decode_attention
from kvcli.kernels.prefill_attention import watched_attention
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import DenseCache, both
from kvcli.methods.contract import AnyMethod
from kvcli.models.geometry import ModelGeometry
from kvcli.runtime.windowed import WindowAttention

TOKENS = 512
"""Tokens before a check that drafts read, in each layer and KV head."""
NEWEST = 64
"""The newest of these, which are read in any case: a text continues what it said last."""


def drafts_itself(method: str, geometry: ModelGeometry, device: str) -> bool:
    """Tell whether a method is full attention that drafts itself, on a type of device: a CPU.

    No layer may read the KV of another one.
    """
    return method == "full" and device == "cpu" and not geometry.shares


class Chosen:
    """What drafts read in a layer: kv [t, Hk, rows, d], of which the first `used` rows are tokens."""

    def __init__(self, cache: DenseCache, most: int):
        """Make room for as many tokens as a check reads at `most`, and its drafts."""
        parts, heads, _, d = cache.kv.shape
        self.kv = cache.kv.new_empty(parts, heads, TOKENS + 2 * most, d)
        self.first = self.used = 0

    def choose(self, mass: Tensor, kv: Tensor) -> None:
        """Choose by the attention mass [Hk, n] that tokens received; kv [t, Hk, n + m, d] are these and m new ones."""
        n = mass.shape[1]
        self.first = min(n, TOKENS)
        if n > TOKENS:
            older = mass[:, : n - NEWEST].topk(TOKENS - NEWEST, sorted=False).indices  # [Hk, TOKENS - NEWEST]
            for mine, x in zip(self.kv, kv, strict=True):
                torch.gather(x, 1, older[..., None].expand(-1, -1, x.shape[2]), out=mine[:, : older.shape[1]])
        newest = kv[:, :, max(0, n - NEWEST) if n > TOKENS else 0 :]
        self.used = self.first + kv.shape[2] - n
        self.kv[:, :, self.used - newest.shape[2] : self.used] = newest

    def keep(self, count: int) -> None:
        """Forget all new tokens but the first `count`."""
        self.used = self.first + count

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Append a token's k, v [Hk, d] and attend with q [H, d]; return [H, d]."""
        for mine, x in zip(self.kv, (k, v), strict=False):
            mine[:, self.used] = x
        self.used += 1
        return decode_attention(q, *both(self.kv[:, :, : self.used]), softmax)


class Drafting:
    """The handler of drafts: attends to the chosen tokens, and in layers with windows as the method does."""

    def __init__(self, method: AnyMethod, chosen: Mapping[int, Chosen]):
        self.method, self.chosen = method, chosen

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Attend with one token: q [1, H, 1, d], k and v [1, Hk, 1, d] -> [1, 1, H, d]."""
        token = q[0, :, 0], k[0, :, 0], v[0, :, 0]
        if layer in self.chosen:
            return self.chosen[layer].attend(*token, softmax)[None, None]
        return self.method.attend(layer, *token, softmax)[None, None]


class Checking(WindowAttention):
    """The handler of a check that guides drafts: chooses what they read in the layers of `chosen`."""

    def __init__(self, method: AnyMethod, geometry: ModelGeometry, chosen: Mapping[int, Chosen]):
        super().__init__(method, geometry, lambda _: None)
        self.chosen = chosen

    @override
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        if layer not in self.chosen:
            return super().__call__(layer, q, k, v, softmax)
        cache = self.method.retrieval[layer]
        assert isinstance(cache, DenseCache)
        cache.append_window(k[0], v[0])
        kv = cache.kv[:, :, : cache.length]
        out, mass = watched_attention(q[0], *both(kv), softmax)
        self.chosen[layer].choose(mass, kv)
        return out.transpose(0, 1)[None]
