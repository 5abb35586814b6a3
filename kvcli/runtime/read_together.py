"""Read a prompt once for all methods that read alike, with the repetitions that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvcli.errors import usage_error
from kvcli.methods.config import MethodConfig, PrefillPattern
from kvcli.methods.contract import AnyMethod
from kvcli.models.rope import Rope
from kvcli.runtime.attention_hook import Hook
from kvcli.runtime.prefill import (
    Branches,
    Lending,
    LentKV,
    PrefillConsumer,
    PrefillFanout,
    SparseReading,
    prefill_branches,
)
from kvcli.runtime.repetition import reach, with_repetitions


def read_together(
    hook: Hook,
    rope: Rope,
    tokenizer: PreTrainedTokenizerBase,
    branches: Branches,
    columns: Sequence[Sequence[AnyMethod]],
    advance: Callable[[int], None],
    chunk: int | None,
    watchers: Sequence[PrefillConsumer],
) -> list[list[Tensor]]:
    """Read prompts that begin alike -> logits [vocab] of each, for each of `columns`.

    A column has the methods of a profile, one for each prompt; columns that read alike share the reading
    (`MethodConfig.prefill`). Known KV of the prompts belongs to the first column's way of reading; its `watchers` also
    get the first prompt's KV.
    """
    logits = dict[str, list[Tensor]]()
    for reading in dict.fromkeys(column[0].config.prefill for column in columns):
        alike = [column for column in columns if column[0].config.prefill == reading]
        logits[reading] = _read_alike(hook, rope, tokenizer, branches, alike, advance, chunk, watchers)
        branches, watchers = replace(branches, known=None, skip=0), ()
    return [logits[column[0].config.prefill] for column in columns]


def _read_alike(
    hook: Hook,
    rope: Rope,
    tokenizer: PreTrainedTokenizerBase,
    branches: Branches,
    columns: Sequence[Sequence[AnyMethod]],
    advance: Callable[[int], None],
    chunk: int | None,
    watchers: Sequence[PrefillConsumer],
) -> list[Tensor]:
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
    sparse = SparseReading.of(PrefillPattern.of(rows[0][0].config.prefill))
    logits = list(prefill_branches(hook, branches, consumers, hook.geometry.layers, advance, chunk, sparse))
    for method in (method for row in rows for method in row):
        method.be_present()
        method.context.prefill_statistics = None if sparse is None else sparse.statistics()
    return logits[len(repetitions) :]


def check_reads_exactly(name: str, config: MethodConfig) -> None:
    """Refuse sparse prefill for readers that do not support it.

    Raises:
        KvcliError: it is asked for (usage).
    """
    if config.prefill != "exact":
        what = (
            f"prefill={config.prefill} does not work with {name}, which prefills in its own way or shares its prefill"
        )
        raise usage_error(what, "leave prefill at exact, or use another method")
