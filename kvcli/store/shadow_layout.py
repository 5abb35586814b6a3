"""How many chunks of a context ShadowKV keeps where, and how many rows that takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.page_table import SlotLayout


@dataclass(frozen=True)
class ShadowLayout:
    """Sizes in chunks of `size` tokens: `outliers`, `selected` and, at least, `local` ones; and the `rank` of the keys.

    With `rolling` generated tokens leave the device as the local window moves on; else all of them stay. The keys are
    factorised again after every `refresh` generated tokens.
    """

    size: int
    outliers: int
    selected: int
    local: int
    rank: int
    rolling: bool = False
    refresh: int | None = None
    fp8: bool = False

    @property
    def total(self) -> int:
        """Chunks of the prompt on the device once the context is divided, the partly filled one not counted."""
        return self.outliers + self.selected + self.local

    @property
    def local_row(self) -> int:
        """First row of the local chunks."""
        return (self.outliers + self.selected) * self.size

    def rounded(self, x: Tensor) -> Tensor:
        """Round keys or values to what fp8 can hold, where that is asked for; they keep their dtype."""
        return x.to(torch.float8_e5m2).to(x.dtype) if self.fp8 else x

    @property
    def ring(self) -> SlotLayout:
        """The rows of a rolling window where none of them moves: a chunk takes the slot of the one that has left."""
        return SlotLayout(self.size, self.outliers + self.selected, 0, self.local + 1, early=True)

    def active(self, length: int) -> bool:
        """Tell whether a context of `length` tokens has to be divided."""
        return length // self.size > self.total

    def divides_between(self, prompt: int, capacity: int) -> bool:
        """Tell whether a prompt of `prompt` tokens is divided on its way to `capacity`, and not before."""
        return self.rolling and self.active(capacity) and not self.active(prompt)

    def stored(self, capacity: int, prompt: int) -> int:
        """The most chunks that leave the device, of a prompt of `prompt` tokens continued to `capacity`."""
        longest = capacity if self.rolling else prompt
        return longest // self.size - self.local if self.active(longest) else 0

    def elements(self, tokens: int, width: int, rank: int) -> int:
        """Count the numbers that a layer keeps on the device for S `tokens` whose keys are M = Hk*d = `width` wide.

        S*M/C + 2(K+O)*C*M + S*r + r*M: landmarks, selected and outlier chunks, A and B (ShadowKV, appendix A.2,
        corrected).
        """
        chunks = self.selected + self.outliers
        return tokens * width // self.size + 2 * chunks * self.size * width + tokens * rank + rank * width

    def rows(self, capacity: int, prompt: int) -> int:
        """The most tokens on the device, of a prompt of `prompt` tokens continued to `capacity`."""
        generated = 0 if self.rolling else capacity - prompt
        return min(capacity, (self.total + 1) * self.size + generated)
