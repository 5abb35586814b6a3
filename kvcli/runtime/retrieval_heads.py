"""Find a model's retrieval heads on a text of random tokens that repeats (RazorAttention, arXiv 2407.15891, 3.2).

Random tokens mean nothing, so a head that attends to the surroundings of a token's former occurrences is looking
something up. Each KV head gets two scores, the better of each over its query heads:

    echo       attention from a token to its former occurrences, mean over the tokens of all repetitions
    induction  attention from a token to what followed its former occurrences, likewise
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.kernels.block_attention import SCORES_AT_ONCE
from kvcli.kernels.prefill_attention import last_rows
from kvcli.kernels.softmax import Softmax
from kvcli.models.geometry import LayerGeometry
from kvcli.models.loading import Model
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.prefill import PrefillConsumer, prefill

# Attention to former occurrences, and to what followed them, in a text that repeats itself (arXiv 2407.15891, 3.2).


def repeat_attention(q: Tensor, k: Tensor, softmax: Softmax, period: int, first: int) -> tuple[Tensor, Tensor]:
    """Sum over the newest tokens, a bounded number of attention rows at a time."""
    (num_heads, n, _), length = q.shape, k.shape[1]
    echo, induction = (torch.zeros(num_heads, device=q.device) for _ in range(2))
    rows_at_once = max(1, SCORES_AT_ONCE // (num_heads * length))
    for start in range(max(0, first + period - (length - n)), n, rows_at_once):
        part = q[:, start : start + rows_at_once]
        seen = length - n + start + part.shape[1]
        weights = last_rows(part, k[:, :seen], softmax)  # [H, r, seen]
        position = torch.arange(seen - part.shape[1], seen, device=q.device)  # [r]
        row = torch.arange(part.shape[1], device=q.device)
        for back in range(period, seen - first, period):
            former = position - back
            old = former >= first
            echo += weights[:, row[old], former[old]].sum(-1)
            induction += weights[:, row[old], former[old] + 1].sum(-1)
    return echo, induction


PERIOD, REPEATS = 2500, 4  # section 3.2


class HeadScores(NamedTuple):
    """Echo and induction score of every KV head, [layers, Hk] in fp32 on the host; -inf in sliding-window layers."""

    echo: Tensor
    induction: Tensor


@dataclass(frozen=True)
class RepeatedTokens:
    """Token ids of the probe: a first one, and then `period` random ones `REPEATS` times."""

    ids: list[int]
    period: int

    @classmethod
    def of(cls, model: Model, period: int = PERIOD) -> RepeatedTokens:
        """Make the probe of a model, always the same; shorter if the model has fewer positions."""
        limit = model.geometry.max_positions
        if limit is not None:
            period = max(1, min(period, (limit - 1) // REPEATS))
        tokenizer = model.tokenizer
        special = set(tokenizer.all_special_ids)
        size = min(len(tokenizer), model.geometry.vocab_size)
        vocabulary = torch.tensor([token for token in range(size) if token not in special])
        chosen = torch.randint(len(vocabulary), (period,), generator=torch.Generator().manual_seed(0))
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else int(vocabulary[0])
        return cls([first, *vocabulary[chosen].tolist() * REPEATS], period)


def head_scores(model: Model, hook: Hook, probe: RepeatedTokens) -> HeadScores:
    """Read the probe once, with exact attention; keep only the scores."""
    listener = _Listener(model.geometry.layers, probe.period)
    prefill(hook, probe.ids, listener, model.geometry.layers, lambda _: None)
    tokens = (REPEATS - 1) * probe.period  # that have a former occurrence
    return HeadScores(listener.echo / tokens, listener.induction / tokens)


class _Listener(PrefillConsumer):
    """Observe a prompt's keys and queries, layer by layer, and sum the attention to former occurrences."""

    query_rows = 0

    def __init__(self, layers: tuple[LayerGeometry, ...], period: int):
        self.period = period
        most = max(layer.num_kv_heads for layer in layers)
        self.echo, self.induction = (torch.full((len(layers), most), -torch.inf) for _ in range(2))
        self.sums = {layer.index: torch.zeros(2, layer.num_heads) for layer in layers if layer.window is None}

    @override
    def observe(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> None:
        if layer not in self.sums:
            return
        for total, part in zip(self.sums[layer], repeat_attention(q, k, softmax, self.period, first=1), strict=True):
            total += part.cpu()
        for scores, total in zip((self.echo, self.induction), self.sums[layer], strict=True):
            scores[layer, : k.shape[0]] = total.view(k.shape[0], -1).amax(1)

    @override
    def prefill(self, layer: int, k: Tensor, v: Tensor, q: Tensor, softmax: Softmax) -> None: ...
