"""Text to calibrate on, as passages: a prompt, and what follows it token by token."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.encoding import Template, encode, encode_question
from kvcli.inputs.prompts import Prompt, read_document
from kvcli.quality.fidelity import Passage
from kvcli.quality.tasks import make_row

SPLIT = "calibration"
"""The split of the built-in rows: neither the one that the demo model learned nor the one that is evaluated on."""
BUILT_IN = ("niah_multikey", "niah_single", "vt", "niah_multivalue")


def built_in(
    tokenizer: PreTrainedTokenizerBase, length: int, steps: int, samples: int, seed: int, split: str = SPLIT
) -> list[Passage]:
    """Make documents with a question, in turn from each task of `BUILT_IN`; the continuation is the right answer.

    Prompts are of `length` tokens or a few less, answers of `steps` at most.

    Raises:
        KvcliError: `length` is too small for a document and its question (usage).
    """

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    frame = len(encode(Prompt("frame", "x"), Template(), tokenizer)) - count_tokens("x")
    passages = []
    for index in range(samples):
        task = BUILT_IN[index % len(BUILT_IN)]
        row = make_row(task, length=length, frame=frame, seed=seed, index=index, count_tokens=count_tokens, split=split)
        prompt = Prompt(f"{task} {index}", row.document, row.question)
        answer = tokenizer(" " + row.answer, add_special_tokens=False, verbose=False)["input_ids"]
        ids, question = encode(prompt, Template(), tokenizer), encode_question(prompt, tokenizer)
        passages.append(Passage(prompt.source, ids, list(answer)[:steps], question))
    return passages


def from_files(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, steps: int, samples: int
) -> list[Passage]:
    """Cut files into stretches of `length` tokens and the `steps` that follow them, at most `samples`, files in turn.

    A file shorter than one stretch gives what it has.

    Raises:
        KvcliError: a file cannot be read or is too short to continue (usage).
    """
    stretches = [_stretches(name, tokenizer, length, steps) for name in files]
    passages = []
    for turn in range(max(map(len, stretches))):
        passages += [each[turn] for each in stretches if turn < len(each)]
    return passages[:samples]


def _stretches(name: str, tokenizer: PreTrainedTokenizerBase, length: int, steps: int) -> list[Passage]:
    ids: list[int] = list(tokenizer(read_document(name), verbose=False)["input_ids"])
    if len(ids) <= 2 * steps:
        raise KvcliError(
            f"{name}: {len(ids):,} tokens are too few to continue for {steps:,}",
            f"give a longer text, or --steps {max(1, len(ids) // 4)}",
            ExitCode.USAGE,
        )
    whole = length + steps
    if len(ids) < whole:
        return [Passage(name, ids[:-steps], ids[-steps:])]
    parts = [ids[start : start + whole] for start in range(0, len(ids) - whole + 1, whole)]
    return [Passage(f"{name} {i}", part[:length], part[length:]) for i, part in enumerate(parts)]
