"""Choose the next token from logits: greedily, or drawn with transformers' own warpers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvcli.inputs.options import Sampling as Sampling

NOT_FINITE = -1
"""Stands for a token that a device could not choose, because of NaN or infinity in its logits."""


def all_finite(logits: Tensor) -> bool:
    """Tell whether tokens can be chosen from logits [vocab]: no NaN, no infinity except -inf for excluded tokens."""
    return bool(logits[logits.argmax()].isfinite())  # `max` would wake threads for so few numbers


class TeacherForcing:
    """A sampler that returns the tokens of a text in turn and adds up their negative log-likelihood, in nats."""

    def __init__(self, tokens: Iterable[int]):
        self._tokens = iter(tokens)
        self.nll = 0.0

    def __call__(self, logits: Tensor) -> int:
        """Return the text's next token, and add its negative log-likelihood by logits [vocab]."""
        token = next(self._tokens)
        self.nll -= float(logits.float().log_softmax(-1)[token])
        return token


class Prompted:
    """A sampler that returns given first tokens, then asks another sampler."""

    def __init__(self, tokens: Iterable[int], sampler: Sampler):
        self._tokens = iter(tokens)
        self._sampler = sampler

    def __call__(self, logits: Tensor) -> int:
        """Return the next of the given tokens, or choose from logits [vocab]."""
        token = next(self._tokens, None)
        if token is None:
            return self._sampler(logits)
        self._sampler.note(token)
        return token


class Sampler:
    """Draws the tokens of one sequence from a generator of its own, so that other sequences do not matter.

    `prompt` has the tokens before the output: a repetition penalty is for both.
    """

    not_state: ClassVar[tuple[str, ...]] = ("warpers",)

    seen: Tensor | None = None
    """Each token of the prompt and the output once; None without a repetition penalty."""

    def __init__(self, sampling: Sampling, sample: int, device: torch.device, prompt: Sequence[int] = ()):
        self.greedy = sampling.temperature == 0
        self.generator = torch.Generator(device).manual_seed((sampling.seed * 1_000_003 + sample) % 2**63)
        self.warpers = LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            self.warpers.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
            self.seen = torch.tensor(sorted(set(prompt)), dtype=torch.int64, device=device)
        if self.greedy:
            return
        self.warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self.warpers.append(MinPLogitsWarper(sampling.min_p))

    @property
    def likeliest(self) -> bool:
        """Tell whether the choice is always the largest of the logits as they are."""
        return self.greedy and self.seen is None

    def ahead(self) -> Sampler:
        """Return a copy that draws what this one will draw from the same logits."""
        other = copy.copy(self)
        other.generator = self.generator.clone_state()
        return other

    def __call__(self, logits: Tensor) -> int:
        """Choose from logits [vocab]."""
        if self.likeliest:
            return int(logits.argmax())
        history = torch.empty(1, 0, dtype=torch.int64) if self.seen is None else self.seen[None]
        given = cast(torch.LongTensor, history), cast(torch.FloatTensor, logits[None].float())
        scores = self.warpers(*given)[0]
        if self.greedy:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))
        self.note(token)
        return token

    def note(self, token: int) -> None:
        """Count a token among those of the output."""
        if self.seen is not None and not (self.seen == token).any():
            self.seen = torch.cat([self.seen, self.seen.new_tensor([token])])  # a copy that looks ahead keeps its own
