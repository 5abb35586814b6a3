"""How blocks of KV lie in the lines that a disk is read by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcli.store.line_cache import Ints


def blocks_per_line(block_bytes: int, unit: int, fill: int) -> int:
    """How many blocks are read together: those that fit into `fill` bytes, a divisor or a multiple of `unit`."""
    if block_bytes * unit <= fill:
        return unit * (fill // (block_bytes * unit))
    most = max(1, fill // block_bytes)
    return max(each for each in range(1, min(unit, most) + 1) if unit % each == 0)


class LineLayout:
    """Blocks of this shape, `per_line` to a line: as many as fit into `fill` bytes, at least one.

    A line is a whole number of `sector` bytes, of which `used` have KV.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, unit: int, sector: int, fill: int):
        self.shape, self.dtype, self.unit = tuple(shape), dtype, unit
        self.block_bytes = math.prod(shape) * dtype.itemsize
        self.per_line = blocks_per_line(self.block_bytes, unit, fill)
        self.used = self.per_line * self.block_bytes
        self.line_bytes = -(-self.used // sector) * sector

    def lines(self, blocks: int) -> int:
        """Lines that so many blocks take."""
        return -(-blocks // self.per_line)

    def blocks(self, lines: Tensor) -> Tensor:
        """View lines [n, line_bytes] as blocks [n, per_line, ..]."""
        return lines[:, : self.used].view(self.dtype).unflatten(1, (self.per_line, *self.shape))  # type: ignore[no-untyped-call, no-any-return]

    def take(self, memory: Tensor, slots: Ints, within: Ints, out: Tensor) -> None:
        """Copy blocks `within` lines in slots [m] of memory [n, line_bytes] to `out` [m, ..]."""
        lines = self.blocks(memory)
        if self.used == self.line_bytes or self.per_line == 1:
            flat = lines.flatten(0, 1) if self.used == self.line_bytes else lines[:, 0]
            torch.index_select(flat, 0, torch.from_numpy(slots * self.per_line + within), out=out)
        else:
            out.copy_(lines[torch.from_numpy(slots), torch.from_numpy(within)])

    def put(self, memory: Tensor, marked: Any, slots: Ints, within: Ints, out: Tensor) -> None:
        """Copy likewise those that are `marked`, bool [m], to their rows of `out`."""
        if (rows := marked.nonzero()[0]).size:
            some = out.new_empty(len(rows), *self.shape)
            self.take(memory, slots[rows], within[rows], some)
            out[torch.from_numpy(rows)] = some
