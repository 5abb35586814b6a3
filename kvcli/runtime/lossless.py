"""Lossless decoding: the method drafts some tokens, full attention checks all of them in one pass.

Every token is drawn from the logits of full attention, so that the text is the one full attention writes; the method
only proposes what is to be checked together. Decoding by speculation is due to Leviathan et al. (arXiv 2211.17192),
drafting by the same model with a sparse cache to TriForce (arXiv 2404.11912). Here a draft counts where it is the very
token that the sequence's sampler draws: the text is that of the seed, not only of the distribution.

Both have read the prompt, each into a cache of its own. A method cannot go back, so a copy of it goes on from each
draft, and the copy that has seen what was right stays. Full attention only forgets its newest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kv.sliding import SlidingCache
from kvcli.methods.contract import AnyMethod
from kvcli.models.rope import Rope
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.decode import BlockingStepper, Stepper
from kvcli.runtime.sampling import Sampler
from kvcli.runtime.sequence import RunningSequence
from kvcli.runtime.windowed import extend
from kvcli.telemetry.report import DraftCounts


@dataclass
class _Round:
    """What was drafted behind the newest token of a sequence, and what full attention says of it.

    Row i of `logits` [n + 1, vocab] follows the newest token and i of the n drafts. `methods` have seen the newest
    token and as many drafts as their place says; the last draft was shown to none.
    """

    drafts: list[int]
    methods: list[AnyMethod]
    logits: Tensor
    given: int = 0
    """How many rows were given out."""

    def goes_on(self, newest: int) -> bool:
        """Tell whether the token drawn from the row that was given last is the draft that the next row follows."""
        return self.given <= len(self.drafts) and self.drafts[self.given - 1] == newest

    def next_row(self) -> Tensor:
        """Give the next row of the logits."""
        self.given += 1
        return self.logits[self.given - 1]


class Verifier:
    """Full attention over a sequence: reads several tokens in one pass, and forgets those that were not to be."""

    def __init__(self, hook: Hook, method: AnyMethod):
        self.hook, self.method = hook, method
        self.windows = [cache for cache in method.plain.values() if isinstance(cache, SlidingCache)]
        self._tokens: list[int] = []
        self._windows_before: list[Tensor] = []
        self._states_before: list[dict[str, Tensor]] = []

    def read(self, tokens: list[int]) -> Tensor:
        """Read tokens -> logits [n, vocab] behind each of them."""
        self._tokens = tokens
        self._windows_before = [window.kv.clone() for window in self.windows]
        self._states_before = [{name: part.clone() for name, part in state.items()} for state in self._states]
        return extend(self.hook, tokens, self.method, keep=len(tokens))

    def keep(self, count: int) -> None:
        """Keep the first `count` of the tokens read last.

        Windows and states hold nothing of what they have dropped: they go back to before, and these are read again.
        """
        if count == len(self._tokens):
            return
        again = bool(self.windows or self._states)
        length = self.method.caches[0].length - len(self._tokens)
        for cache in self.method.caches:
            cache.rewind(length if again else length + count)
        for window, kv in zip(self.windows, self._windows_before, strict=True):
            window.kv.copy_(kv)
        for state, before in zip(self._states, self._states_before, strict=True):
            for name, part in before.items():
                state[name].copy_(part)
        if again:
            extend(self.hook, self._tokens[:count], self.method)

    @property
    def _states(self) -> list[dict[str, Tensor]]:
        return self.method.states.layers


class LosslessStepper(Stepper):
    """Steps that give logits of full attention, several tokens' of one pass as far as the drafts were right.

    Every sequence brings full attention that has read its prompt, `RunningSequence.reference`.
    """

    def __init__(self, hook: Hook, rope: Rope, sequences: Sequence[RunningSequence], drafts: int):
        self.drafts, self.drafting = drafts, BlockingStepper(hook, rope)
        self.verifiers: dict[int, Verifier] = {}
        self.rounds: dict[int, tuple[RunningSequence, _Round]] = {}
        for sequence in sequences:
            assert sequence.reference is not None
            sequence.reference.context.counters = sequence.counters
            self.verifiers[sequence.index] = Verifier(hook, sequence.reference)

    @override
    @torch.inference_mode()
    def step(self, batch: Sequence[RunningSequence]) -> Sequence[tuple[Tensor, int | None]]:
        for sequence in batch:
            _, now = self.rounds.get(sequence.index, (sequence, None))
            if now is None or not now.goes_on(sequence.token_ids[-1]):
                if now is not None:
                    self._settle(sequence, now)
                    self.verifiers[sequence.index].keep(now.given)
                self.rounds[sequence.index] = sequence, self._begin(sequence)
        return [(self.rounds[sequence.index][1].next_row(), None) for sequence in batch]

    @override
    def finish(self) -> None:
        for sequence, last in self.rounds.values():
            self._settle(sequence, last)

    def _begin(self, sequence: RunningSequence) -> _Round:
        """Draft behind the newest token, and check."""
        wanted = min(self.drafts, sequence.max_tokens - len(sequence.token_ids) - 1)
        methods, drafts = [sequence.method], list[int]()
        assert isinstance(sequence.sampler, Sampler)
        sampler = sequence.sampler.ahead()
        unseen = sequence.token_ids[sequence.method.caches[0].length - sequence.prompt_tokens :]
        while len(drafts) < wanted:
            if drafts:
                methods.append(methods[-1].fork(sequence.counters, methods[-1].context.track))
            for token in drafts[-1:] or unseen:
                logits = self.drafting.run([methods[-1]], [token], [methods[-1].caches[0].length])[0]
            drafts.append(sampler(logits))
        checked = self.verifiers[sequence.index].read([sequence.token_ids[-1], *drafts])
        return _Round(drafts, methods, checked)

    def _settle(self, sequence: RunningSequence, ended: _Round) -> None:
        """Have the sequence go on by the method that has seen what was right, and count."""
        sequence.method = ended.methods[min(ended.given, len(ended.methods)) - 1]
        counts = sequence.drafts or DraftCounts()
        sequence.drafts = DraftCounts(
            counts.passes + 1, counts.drafted + len(ended.drafts), counts.accepted + ended.given - 1
        )
