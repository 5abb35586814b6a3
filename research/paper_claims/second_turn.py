"""Facts asked in a second turn: what a method still knows once it has answered another question about the document.

A prompt ends with a question about one of its facts. The method answers, then a user's second turn asks about another
fact of the same document, token by token through decode steps, and the method answers again. What was dropped because
the first question did not look at it is gone by then (arXiv 2410.21465, section 5 and figure 7; arXiv 2407.15891,
figure 2). All methods read each document together, once; their answers are their own. Full attention is the ceiling.

With `--begin-answer` the prompt ends with the first answer's words up to its value. The demo model fetches a value only
there, so that what is cut by a prompt's last queries is cut for the first question only then (see `prompt-end`).

`turn's cost` is the second answer's score less the first one's, paired over the documents: what a method loses by the
turn, apart from what its budget loses anyway.
"""

import argparse
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from block_choice import up_to_the_value
from subject import MAX_TOKENS, Document, Scores, Subject, difference, table
from torch import Tensor

from kvcli.inputs.variants import Variant, variants
from kvcli.methods.contract import AnyMethod
from kvcli.quality.tasks import phrases, recall
from kvcli.runtime.sampling import Sampling

TASK = "niah_multikey"
FACT = re.compile(r"access code of (\w+) is (\d{9})")
TURN = 64  # tokens that a user's second turn may take

RETRIEVING = ("freekv", "quest", "arkvale", "shadowkv", "infinigen", "fier", "loki", "tokenselect", "twilight")
DROPPING = ("streaming", "h2o", "snapkv", "pyramidkv", "tova", "cake")
OTHERS = ("refreekv", "raas", "razor")  # these keep as much as they see fit, or the whole prompt

# As in the table of all methods: sizes for a small model and short documents, the same for every method that has them.
SETTINGS = {
    "sink": "64",
    "window": "64",
    "page_size": "32",
    "dense_layers": "1",
    "tau": "0.8",
    "rank": "32",
    "outliers": "4",
    "window_part": "0",
}


class SecondTurn:
    """Takes the place of a sampler: says a user's turn, then the likeliest tokens."""

    def __init__(self, turn: Sequence[int]):
        self._said = iter(turn)

    def __call__(self, logits: Tensor) -> int:
        """Choose from logits [vocab]."""
        token = next(self._said, None)
        return int(logits.argmax()) if token is None else token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what is compared."""
    parser.add_argument("--methods", nargs="+", default=[*RETRIEVING, *DROPPING, *OTHERS], help="beside full attention")
    parser.add_argument("--begin-answer", action="store_true", help="put the first answer's words into the prompt")
    parser.add_argument("--turn-budgets", type=int, nargs="+", default=[512, 2048], help="tokens, for each method")


def run(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    compared = chosen_variants(args.methods, args.turn_budgets)
    subject.engine.rope.cover(capacity(subject))
    turns: tuple[dict[str, list[float]], ...] = (defaultdict(list), defaultdict(list))
    behind: tuple[list[int], ...] = ([], [])
    for row in subject.documents([TASK], args.rows):
        document = up_to_the_value(subject, row) if args.begin_answer else row
        name, value = other_fact(document)
        for turn, asked in zip(behind, (document.row.outputs[0], value), strict=True):
            turn.append(len(document.ids) - subject.count_tokens(document.row.document.partition(asked)[0]))
        for label, scores in answers(subject, document, compared, name, value):
            for turn, score in zip(turns, scores, strict=True):
                turn[label].append(score)
    print_table(turns, args.rows)
    first, second = turns
    return {
        "settings": SETTINGS,
        "begin answer": args.begin_answer,
        "variants": {each.label: each.profile.as_dict()["settings"] for each in compared},
        "tokens_behind": {"first turn": behind[0], "second turn": behind[1]},
        "scores": {"first turn": first, "second turn": second},
    }


def chosen_variants(methods: Sequence[str], budgets: Sequence[int]) -> list[Variant]:
    """Full attention, and every method with every budget; settings go to the methods that have them."""
    return variants(["full", *methods], [], budgets, shared_settings(methods))


def shared_settings(methods: Sequence[str]) -> dict[str, str]:
    """Those of `SETTINGS` that some of the methods have."""
    known = {key for method in methods for key in variants([method], [], [], {})[0].profile.settings.model_dump()}
    return {key: value for key, value in SETTINGS.items() if key in known}


def other_fact(document: Document) -> tuple[str, str]:
    """Name and value of a fact of the document that its question does not ask for; the same for every method."""
    row = document.row
    facts = [fact for fact in FACT.findall(row.document) if fact[1] not in row.outputs]
    return random.Random(f"second turn/{row.seed}/{row.index}").choice(facts)


def second_turn(subject: Subject, question: str) -> list[int]:
    """Token ids from the end of an answer to the beginning of the next one."""
    tokenizer = subject.model.tokenizer
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    before = tokenizer.apply_chat_template(talk, tokenize=False)
    talk.append({"role": "user", "content": question})
    after = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(str(after).removeprefix(str(before)), add_special_tokens=False))


def print_table(turns: Sequence[dict[str, list[float]]], rows: int) -> None:
    """Print what each variant answered right in each turn."""
    lines = []
    for label in turns[0]:
        first, second = (Scores.of(dict(enumerate(turn[label]))) for turn in turns)
        cost, error = difference([second], [first])
        lines.append(
            {
                "variant": label,
                "first turn %": first.mean,
                "error": first.error,
                "second turn %": second.mean,
                "error ": second.error,
                "turn's cost": cost,
                "error  ": error,
            }
        )
    table(f"second-turn: a fact asked first, and another one asked then ({rows} documents)", lines)


def capacity(subject: Subject) -> int:
    """Tokens of a document, two answers and a turn, at most."""
    return subject.length + 2 * MAX_TOKENS + TURN


def answers(
    subject: Subject, document: Document, compared: Sequence[Variant], name: str, value: str
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Score of both answers of each variant; its memory is given back once it has answered."""
    question = phrases.CODE_QUESTIONS[document.row.index % len(phrases.CODE_QUESTIONS)].format(name=name)
    turn = second_turn(subject, question)
    assert len(turn) <= TURN
    prompt = len(document.ids)
    methods: list[AnyMethod] = [
        subject.engine.method(
            each.profile, subject.engine.context(prompt, capacity(subject) - prompt, document.question)
        )
        for each in compared
    ]
    logits = subject.engine.prefill(document.ids, methods)
    for each in compared:
        method = methods.pop(0)
        answered = subject.first_answer(document, method, logits.pop(0))
        # An answer that was cut off ends here; one that ended did so with the same token, which has no KV yet.
        sampling = Sampling(max_tokens=1 + len(turn) + MAX_TOKENS)
        end = subject.model.tokenizer.eos_token_id
        asked = subject.engine.sequence(method, sampling, sampler=SecondTurn(turn), first_token=end)
        asked.prompt_tokens = answered.length  # of the conversation so far
        subject.run(asked)
        yield (
            each.label,
            (recall(answered.detokenizer.text, document.row.outputs), recall(asked.detokenizer.text, [value])),
        )
