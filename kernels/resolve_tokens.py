"""Which selected tokens are missing, and which resident ones make room for them: `resolve_pages_device` for thousands.

A page table of a few dozen entries is compared with a selection entry by entry; of thousands, each is marked in flags
of all tokens. The j-th missing token of a KV head goes into its j-th slot whose token left the selection.
"""

import torch
from torch import Tensor

from kvcli.kernels.resolve_pages import MissList


def resolve_tokens_device(resident: Tensor, selected: Tensor, misses: MissList, heads: Tensor, tokens: int) -> None:
    """List what is missing in `misses` and make `resident` say what the slots will hold.

    Shapes: resident and selected [b, Hk, k] int32, token numbers below `tokens`, or -1; heads [b, Hk] bool: the others
    miss nothing and keep what they have. Operations of torch: may be captured in a CUDA graph.
    """
    asked = heads[..., None]
    selected = selected.masked_fill(~asked, -1)  # which no kernel has written
    kept = _members(selected, tokens).gather(2, resident.long() + 1)
    missing = asked & ~_members(resident, tokens).gather(2, selected.long() + 1) & (selected >= 0)
    free = asked & ~kept
    misses.counts.copy_(missing.sum(2))
    _in_a_row(misses.pages, selected, missing)
    slots = torch.arange(resident.shape[2], dtype=torch.int32, device=resident.device).expand_as(resident)
    rank = free.cumsum(2) - 1
    taken = free & (rank < misses.counts[..., None])
    _in_a_row(misses.slots, slots, taken)
    incoming = misses.pages.gather(2, rank.clamp_min(0)).masked_fill(~taken, -1)
    resident.copy_(incoming.where(free, resident))


def _members(tokens: Tensor, count: int) -> Tensor:
    """Mark in column t + 1 whether a row of `tokens` [b, Hk, k] holds token t: bool [b, Hk, count + 1]."""
    flags = torch.zeros(*tokens.shape[:2], count + 1, dtype=torch.bool, device=tokens.device)
    flags.scatter_(2, tokens.long() + 1, True)
    flags[..., :1] = False
    return flags


def _in_a_row(out: Tensor, values: Tensor, wanted: Tensor) -> None:
    """Write the wanted entries of each row one behind the other, and -1 behind them."""
    place = (wanted.cumsum(2) - 1).masked_fill(~wanted, out.shape[2])  # those not wanted go beyond the end
    padded = torch.full((*out.shape[:2], out.shape[2] + 1), -1, dtype=out.dtype, device=out.device)
    out.copy_(padded.scatter_(2, place, values.to(out.dtype))[..., :-1])
