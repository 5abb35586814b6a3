"""Which selected tokens are missing, and which slots are free for them, in time and memory linear in the context.

Shapes: resident [Hk, S] and selected [Hk, k], k <= S, hold token numbers below `length`; -1 in `resident` is an empty
slot. A selection has no duplicates and no -1. Returns also leaving [Hk, S] bool, the slots whose token left the
selection: every head has at least as many as it misses tokens, and the first of them take these.
"""

import torch
from torch import Tensor

from kvcli.kernels.resolve_pages import Misses


def resolve_tokens(resident: Tensor, selected: Tensor, length: int) -> tuple[Misses, Tensor]:
    """Pair the j-th missing token of a head with its j-th slot that is free."""
    leaving = ~_members(selected, length).gather(1, resident + 1)
    missing = ~_members(resident, length).gather(1, selected + 1)
    wanted = leaving & (leaving.cumsum(1) <= missing.sum(1, keepdim=True))
    heads, slots = wanted.nonzero(as_tuple=True)
    return Misses(heads, slots, selected[missing]), leaving


def _members(tokens: Tensor, length: int) -> Tensor:
    """Flag what is in each row of `tokens` [Hk, n], -1 first: [Hk, length + 1]; nothing is ever in it as -1."""
    flags = torch.zeros(tokens.shape[0], length + 1, dtype=torch.bool, device=tokens.device)
    flags.scatter_(1, tokens + 1, True)
    flags[:, 0] = False
    return flags
