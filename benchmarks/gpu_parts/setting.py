"""How large everything is: as the targets say, or so small that a CPU does it in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

SMALL = {"sink": 8, "window": 8, "page_size": 8, "chunk": 4, "rank": 12, "outliers": 2, "local": 1, "group": 8}


@dataclass(frozen=True)
class Setting:
    """Models, contexts in tokens, budgets, and how often things are timed."""

    smoke: bool
    device: torch.device
    dtype: torch.dtype
    shape: str
    other_shape: str
    short: int
    middle: int
    long: int
    budget: int
    sink: int  # and the window
    page: int
    few: int  # sequences of a small batch
    many: int
    calls: int  # decode steps timed together: whole pages, so that each timing has its share of filled ones
    repeats: int
    buffer: int  # bytes of plain copies
    pool: int  # bytes of host memory that made-up pages lie in, far beyond caches of memory and of its addresses
    sizes: dict[str, Any] = field(default_factory=dict)  # settings of methods that have them, where budgets are tiny
    deadline: float = math.inf  # by time.monotonic, after which no further round begins

    @property
    def ran(self) -> str:
        """Say what does the work of kernels."""
        return "kernels" if self.device.type == "cuda" else "references"

    @property
    def spare(self) -> int:
        """Tokens of room after a context: all steps that are ever timed, tried out or traced."""
        return self.calls * (2 * self.repeats + 8)


def full() -> Setting:
    """Give what the targets say."""
    return Setting(
        smoke=False,
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        shape="llama-3.1-8b",
        other_shape="qwen2.5-7b",
        short=32 << 10,
        middle=128 << 10,
        long=1 << 20,
        budget=2048,
        sink=512,
        page=32,
        few=4,
        many=8,
        calls=32,
        repeats=7,
        buffer=1 << 30,
        pool=8 << 30,
    )


def smoke() -> Setting:
    """Give sizes at which a CPU goes through everything."""
    return Setting(
        smoke=True,
        device=torch.device("cpu"),
        dtype=torch.float32,
        shape="tiny",
        other_shape="tiny",
        short=160,
        middle=192,
        long=256,
        budget=64,
        sink=16,
        page=8,
        few=2,
        many=3,
        calls=2,
        repeats=2,
        buffer=1 << 20,
        pool=1 << 20,
        sizes=SMALL,
    )
