"""From logits to the next token: greedy, or drawn after transformers' own warpers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvcli.errors import ExitCode, KvcliError

NOT_FINITE = -1
"""Stands for a token that a device could not choose, because of NaN or infinity in its logits."""


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens and when to stop. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    Raises:
        KvcliError: a value is outside its range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_samples: int = 1

    def __post_init__(self) -> None:
        bounds = [
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("seed", 0 <= self.seed < 2**63, "between 0 and 2**63 - 1"),
            ("num_samples", self.num_samples >= 1, "at least 1"),
            ("stop", all(self.stop), "no empty string"),
        ]
        for name, holds, wanted in bounds:
            if not holds:
                option = "--" + name.replace("_", "-")
                raise KvcliError(f"{option} {getattr(self, name)!r} is out of range", f"give {wanted}", ExitCode.USAGE)


def all_finite(logits: Tensor) -> bool:
    """Tell whether tokens can be chosen from logits [vocab]: no NaN, no infinity but the minus of what is excluded."""
    return bool(logits.max().isfinite())


class TeacherForcing:
    """Takes the place of a sampler: gives the tokens of a text in turn, and adds up how unlikely they were, in nats."""

    def __init__(self, tokens: Iterable[int]):
        self._tokens = iter(tokens)
        self.nll = 0.0

    def __call__(self, logits: Tensor) -> int:
        """Take the text's next token, and its likelihood from logits [vocab]."""
        token = next(self._tokens)
        self.nll -= float(logits.float().log_softmax(-1)[token])
        return token


class Sampler:
    """Draws the tokens of one sequence from a generator of its own, so that its company does not matter."""

    def __init__(self, sampling: Sampling, sample: int, device: torch.device):
        self.greedy = sampling.temperature == 0
        self.generator = torch.Generator(device).manual_seed((sampling.seed * 1_000_003 + sample) % 2**63)
        self.warpers = LogitsProcessorList()
        if self.greedy:
            return
        self.warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self.warpers.append(MinPLogitsWarper(sampling.min_p))

    def __call__(self, logits: Tensor) -> int:
        """Choose from logits [vocab]."""
        if self.greedy:
            return int(logits.argmax())
        history = cast(torch.LongTensor, torch.empty(1, 0, dtype=torch.int64))  # no warper here reads it
        scores = self.warpers(history, cast(torch.FloatTensor, logits[None].float()))
        return int(torch.multinomial(scores[0].softmax(-1), 1, generator=self.generator))
