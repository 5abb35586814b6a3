"""Lossless decoding: the method drafts some tokens, full attention checks all of them in one pass.

Every token is drawn from the logits of full attention, so the text is the one that full attention writes; the method
only proposes tokens to check together. Speculative decoding is due to Leviathan et al. (arXiv 2211.17192), drafting by
the same model with a sparse cache to TriForce (arXiv 2404.11912). Here a draft is accepted only if it is the very token
that the sequence's sampler draws: not only the distribution but the text of the seed is preserved.

Both have read the prompt, each into a cache of its own. A method cannot go back, so a copy of it continues from each
draft, and the copy that has seen only accepted tokens stays (`Method.branch`; copies share the KV that only grows).
Full attention just forgets its newest tokens.
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
    """The drafts after the newest token of a sequence, and the logits of full attention for them.

    Row i of `logits` [n + 1, vocab] follows the newest token and i of the n drafts. `methods[i]` has seen the
    newest token and i drafts; no method has seen the last draft.
    """

    drafts: list[int]
    methods: list[AnyMethod]
    logits: Tensor
    given: int = 0
    """Number of rows returned so far."""

    def goes_on(self, newest: int) -> bool:
        """Tell whether the token drawn from the latest row is the draft that the next row follows."""
        return self.given <= len(self.drafts) and self.drafts[self.given - 1] == newest

    def next_row(self) -> Tensor:
        """Return the next row of the logits."""
        self.given += 1
        return self.logits[self.given - 1]


class Verifier:
    """Full attention over a sequence: reads several tokens in one pass, and forgets rejected ones."""

    def __init__(self, hook: Hook, method: AnyMethod):
        self.hook, self.method = hook, method
        self.windows = [cache for cache in method.plain.values() if isinstance(cache, SlidingCache)]
        self._tokens: list[int] = []
        self._windows_before: list[Tensor] = []
        self._states_before: list[dict[str, Tensor]] = []

    def read(self, tokens: list[int]) -> Tensor:
        """Read tokens -> logits [n, vocab] of the token after each."""
        self._tokens = tokens
        self._windows_before = [window.kv.clone() for window in self.windows]
        self._states_before = [{name: part.clone() for name, part in state.items()} for state in self._states]
        return extend(self.hook, tokens, self.method, keep=len(tokens))

    def keep(self, count: int) -> None:
        """Keep the first `count` of the tokens read last.

        Windows and states cannot drop tokens: they are reset, and the kept tokens are read again.
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
    """Steps that return logits of full attention, from one pass for as many tokens as drafts were right.

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
        """Draft after the newest token, and check the drafts."""
        wanted = min(self.drafts, sequence.max_tokens - len(sequence.token_ids) - 1)
        methods, drafts = [sequence.method], list[int]()
        assert isinstance(sequence.sampler, Sampler)
        sampler = sequence.sampler.ahead()
        unseen = sequence.token_ids[sequence.method.caches[0].length - sequence.prompt_tokens :]
        while len(drafts) < wanted:
            if drafts:
                methods.append(methods[-1].branch())
            for token in drafts[-1:] or unseen:
                logits = self.drafting.run([methods[-1]], [token], [methods[-1].caches[0].length])[0]
            drafts.append(sampler(logits))
        checked = self.verifiers[sequence.index].read([sequence.token_ids[-1], *drafts])
        return _Round(drafts, methods, checked)

    def _settle(self, sequence: RunningSequence, ended: _Round) -> None:
        """Let the sequence continue with the method that has seen only accepted tokens, and count."""
        sequence.method = ended.methods[min(ended.given, len(ended.methods)) - 1]
        counts = sequence.drafts or DraftCounts()
        sequence.drafts = DraftCounts(
            counts.passes + 1, counts.drafted + len(ended.drafts), counts.accepted + ended.given - 1
        )
