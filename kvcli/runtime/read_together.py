"""Reading prompts once for all methods that have them read exactly, with what else the model is to read for these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvcli.methods.base import AnyMethod
from kvcli.models.rope import Rope
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.known_kv import Lending, LentKV
from kvcli.runtime.prefill import Branches, PrefillConsumer, PrefillFanout, prefill_branches
from kvcli.runtime.repetition import reach, with_repetitions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_together(
    hook: Hook,
    rope: Rope,
    tokenizer: PreTrainedTokenizerBase,
    branches: Branches,
    columns: Sequence[Sequence[AnyMethod]],
    advance: Callable[[int], None],
    chunk: int | None,
    watchers: Sequence[PrefillConsumer],
) -> list[Tensor]:
    """Read prompts that begin alike -> logits [vocab] of each.

    `columns` has the methods of each profile, one for each prompt; `watchers` get the first prompt's KV as well.
    """
    rows = [list(row) for row in zip(*columns, strict=True)]
    branches, repetitions = with_repetitions(branches, rows, tokenizer)
    reach(rope, branches, rows[0][0].context.capacity)
    for first, *others in columns:
        for other in others:
            other.share(first, len(branches.common))
    if isinstance(branches.known, LentKV):
        caches = [column[0].caches for column in columns]
        branches = replace(branches, known=Lending(branches.known, caches, branches.skip))
    prompts = [PrefillFanout([*rows[0], *watchers]), *map(PrefillFanout, rows[1:])]
    consumers: list[PrefillConsumer] = [*repetitions, *prompts]
    logits = list(prefill_branches(hook, branches, consumers, hook.geometry.layers, advance, chunk))
    for method in (method for row in rows for method in row):
        method.be_present()
    return logits[len(repetitions) :]
