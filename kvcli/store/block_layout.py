"""How a layer whose older blocks are retrieved lays them out, and where it attends to them (InfLLM, arXiv 2402.04617).

capped     every sink and every retrieved token is `local window - 1` tokens away from every query, so that no distance
           is larger than the model was trained for; the queries are rotated accordingly, the keys are not
original   each token keeps its position
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvcli.store.pages import PageBudget

Positions = Literal["capped", "original"]


@dataclass(frozen=True)
class BlockLayout:
    """The `budget` in blocks, `slots` for retrieved blocks, and the most tokens that are appended at once (`chunk`).

    `representatives` is how many tokens of a block its key is the mean of. As many as `beside` blocks can give their
    place up to tokens that stay, see `BlockCache.keep`.
    """

    budget: PageBudget
    slots: int
    chunk: int
    representatives: int
    positions: Positions
    beside: int = 0


def rows_in_slots(held: Tensor, slots: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """View the keys and values [Hk, n, d] of all slots, held [slots, Hk, 2, p, d], where they lie.

    Returns also which rows of them the first `tokens` in `slots` [k] are: [1, tokens].
    """
    count, heads, _, size, d = held.shape
    step = 2 * heads * size  # rows from one slot to the next
    rows = (slots[:, None] * step + torch.arange(size, device=slots.device)).flatten()[:tokens]
    views = held.as_strided((2, heads, (count - 1) * step + size, d), (size * d, 2 * size * d, d, 1))
    return views[0], views[1], rows[None]
