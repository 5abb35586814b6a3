"""Measure the demo model on held-out rows with plain full attention: `python research/demo_model/measure_recall.py`.

Every row is one question right after its document, in the chat format, answered greedily by transformers' own
`generate`. With `--hidden` the asked values in the document are replaced by others: a model that retrieves then fails.
`--card` measures all that the model's card says of its answers, in about forty minutes of one core.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcli.quality.eval.example import conversation
from kvcli.quality.tasks import SEPARATOR, TASKS, TaskRow, make_row, recall

MODEL = Path(__file__).parents[2] / "kvcli" / "models" / "demo"

SINGLE, ALONE = ("niah_single",), ("niah_direct", "turns", "near_duplicates", "counting")
MANY = ("niah_multikey", "niah_multiquery", "niah_multivalue", "vt", "fwe")
LONG = ("niah_single", "niah_multikey", "vt")
CARD = (  # tasks, prompt tokens, documents, whether what is asked for is hidden
    (SINGLE, 4096, 200, False),
    (MANY, 4096, 50, False),
    (ALONE, 4096, 10, False),
    (SINGLE + MANY, 8192, 50, False),
    (LONG, 16_384, 50, False),
    (("niah_single", "niah_multikey"), 4096, 10, True),
)

_FRAME = 8  # tokens the chat format puts around a row
_NEW_TOKENS = 80


@dataclass(frozen=True)
class Measured:
    """Mean recall in per cent of one task at one length, with its standard error."""

    task: str
    length: int
    rows: int
    recall: float
    standard_error: float


def load(folder: Path) -> tuple[Any, Any]:
    """Return the model in evaluation mode and its tokenizer, both as transformers loads them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.eval()
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


@torch.inference_mode()
def answer(
    model: Any, tokenizer: Any, text: str, new_tokens: int = _NEW_TOKENS, turns: Sequence[tuple[str, str]] = ()
) -> str:
    """Return the greedy answer to one user message, or to the last of `turns` behind it (answer and next question)."""
    messages = [{"role": "user", "content": text}]
    for told, asked in turns:
        messages += [{"role": "assistant", "content": told}, {"role": "user", "content": asked}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=new_tokens, do_sample=False)
    text_out: str = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text_out


def hide(row: TaskRow, other: TaskRow) -> TaskRow:
    """Return `row` with the values that it asks for replaced, in the document, by those that `other` asks for."""
    document = row.document
    for value, replacement in zip(row.outputs, other.outputs, strict=True):
        document = document.replace(value, replacement)
    return replace(row, document=document, input=document + SEPARATOR + row.question)


def measure(
    model: Any,
    tokenizer: Any,
    task: str,
    length: int,
    rows: int,
    *,
    seed: int = 0,
    hidden: bool = False,
) -> Measured:
    """Return the mean recall over `rows` held-out rows whose prompts are `length` tokens long."""

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    def row_at(index: int) -> TaskRow:
        return make_row(task, length=length - _FRAME, seed=seed, index=index, count_tokens=count_tokens)

    found: list[float] = []
    for index in range(rows):
        row = row_at(index)
        if hidden:
            row = hide(row, row_at(rows + index))
        room = max(_NEW_TOKENS, count_tokens(row.answer) * 5 // 4)
        _, turns = conversation(row.turns, row.question)
        found.append(100.0 * recall(answer(model, tokenizer, row.input, room, turns), row.outputs))
    error = statistics.stdev(found) / rows**0.5 if rows > 1 else 0.0
    return Measured(task, length, rows, round(statistics.fmean(found), 1), round(error, 1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, and print one JSON object a line."""
    parser = argparse.ArgumentParser(prog="python research/demo_model/measure_recall.py", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated")
    parser.add_argument("--lengths", default="2048,4096,8192", help="prompt tokens, comma-separated")
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", action="store_true", help="replace the asked values in the document")
    parser.add_argument("--card", action="store_true", help="measure what the card says, instead of tasks and lengths")
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.model)
    tasks, lengths = options.tasks.split(","), map(int, options.lengths.split(","))
    wanted = CARD if options.card else tuple((tasks, length, options.rows, options.hidden) for length in lengths)
    for names, length, rows, hidden in wanted:
        for task in names:
            measured = measure(model, tokenizer, task, length, rows, seed=options.seed, hidden=hidden)
            print(json.dumps({**measured.__dict__, "hidden": hidden}), flush=True)


if __name__ == "__main__":
    main()
