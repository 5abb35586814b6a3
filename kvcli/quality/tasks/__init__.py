"""Synthetic long-context tasks in RULER's row format (arXiv 2404.06654): seeded generators and their scorer.

`make_row` is the entry point; `TASKS` names the generators. Nothing here needs torch: lengths are measured with the
caller's token counter.
"""

import random
from collections.abc import Callable

from kvcli.errors import ExitCode, KvcliError
from kvcli.quality.tasks.needles import (
    conversation,
    direct,
    late_needle,
    long_lookup,
    multikey,
    multiquery,
    multivalue,
    near_duplicates,
    needles_only,
    noise,
    records_to_json,
    single,
    uuids_only,
    variable_tracking,
)
from kvcli.quality.tasks.rows import SEPARATOR, CountTokens, Draft, RowRequest, TaskRow, recall
from kvcli.quality.tasks.words import common_words, frequent_words, occurrences

TASKS: dict[str, Callable[..., Draft]] = {
    "niah_single": single,
    "niah_multikey": multikey,
    "niah_multivalue": multivalue,
    "niah_multiquery": multiquery,
    "vt": variable_tracking,
    "fwe": frequent_words,
    "cwe": common_words,
    "niah_single_1": noise,
    "niah_multikey_2": needles_only,
    "niah_multikey_3": uuids_only,
    "niah_direct": direct,
    "near_duplicates": near_duplicates,
    "records_json": records_to_json,
    "long_lookup": long_lookup,
    "late_needle": late_needle,
    "counting": occurrences,
    "turns": conversation,
}
"""The generators by name. They relate to RULER's tasks (arXiv 2404.06654, appendix B) as follows, all with sentences of
our own and values of nine digits, where RULER has seven:

- `niah_single_1`, `niah_multikey_2`, `niah_multikey_3`, `cwe`, `fwe`: RULER's of that name, made the same way;
- `niah_single`, `niah_multikey`: like `niah_single_2` and `niah_multikey_1`, but in filler from a grammar instead of
  essays, and with a fact every 80 tokens in `niah_multikey`, where RULER has four in all;
- `niah_multivalue`, `niah_multiquery`: RULER's of that name in that filler, among facts about other names;
- `vt`: RULER's in the opposite direction, see `variable_tracking`;
- those after `niah_multikey_3` are not RULER's: tasks on which methods differ. Each function says what its task is for.
"""

EVALUATION = "evaluation"
"""The split that rows belong to unless the caller says otherwise. The demo model is trained on split "train"."""


def make_row(
    task: str,
    *,
    length: int,
    seed: int,
    count_tokens: CountTokens,
    frame: int = 0,
    depth: float | None = None,
    index: int = 0,
    split: str = EVALUATION,
    **options: float,
) -> TaskRow:
    """Return row `index` of a task.

    Args:
        task: a key of `TASKS`.
        length: tokens of the prompt, at most; it is shorter by less than one sentence.
        seed: together with split, task and index it determines the row.
        count_tokens: counts the tokens of a text.
        frame: tokens of the prompt that a chat template adds around the row's `input`.
        depth: the place of the first statement asked for, 0 (start) to 1 (end); random if None.
        index: number of the row.
        split: rows of different splits come from different random streams.
        options: the task's own, such as `keys` or `hops`; see its generator.

    Raises:
        KvcliError: unknown task, or an impossible length, depth or option.
    """
    if task not in TASKS:
        raise KvcliError(f"unknown task {task!r}", f"choose from {', '.join(TASKS)}", ExitCode.USAGE)
    rng = random.Random(f"{split}/{task}/{seed}/{index}")
    try:
        draft = TASKS[task](RowRequest(rng, length - frame, count_tokens, depth), **options)
    except KvcliError as error:
        if not frame or "too short" not in error.what:
            raise
        what = f"a prompt of {length:,} tokens, {frame:,} of them the chat template's, is too short for {task}"
        raise KvcliError(what, "use a larger --length", error.exit_code) from None
    text = draft.document + SEPARATOR + (draft.turns[0][0] if draft.turns else draft.question)
    return TaskRow(index=index, input=text, length=count_tokens(text), task=task, seed=seed, **vars(draft))


__all__ = ["EVALUATION", "SEPARATOR", "TASKS", "CountTokens", "TaskRow", "make_row", "recall"]
