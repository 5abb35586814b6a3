"""The interface of tasks: a request, a draft of the parts, and the row in RULER's format.

RULER: arXiv 2404.06654.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcli.errors import ExitCode, KvcliError
from kvcli.quality.tasks.phrases import sentence, sentences_of

CountTokens = Callable[[str], int]
"""Counts the tokens of a text, without special tokens."""

SEPARATOR = "\n\n"
"""Between the document and the question."""


@dataclass(frozen=True)
class Draft:
    """A document and a question about it, before lengths are measured.

    `answer` is a complete, right answer in plain words; `outputs` are the strings that a right answer contains. `depth`
    is the place of the first statement asked for: 0 the start of the document, 1 its end.
    """

    document: str
    question: str
    answer: str
    outputs: tuple[str, ...]
    depth: float | None
    turns: tuple[tuple[str, str], ...] = ()
    """Questions and their right answers before `question`: of a conversation about one document."""
    turn_outputs: tuple[tuple[str, ...], ...] = ()
    """The strings that a right answer to each of these contains."""


@dataclass(frozen=True)
class RowRequest:
    """The inputs of a row: its random stream, its most tokens, their counter, and the first statement's depth."""

    rng: random.Random
    length: int
    count_tokens: CountTokens
    depth: float | None

    def beside(self, *texts: str) -> int:
        """Return the tokens that `texts` and the separator before the last of them leave of the length."""
        *stated, question = texts
        return self.length - sum(self.count_tokens(text) for text in stated) - self.count_tokens(SEPARATOR + question)

    def drawn_depth(self, most: float = 1.0) -> float:
        """Return the depth that was asked for, or a random one up to `most`.

        Raises:
            KvcliError: it is not within 0..1 (usage).
        """
        if self.depth is None:
            return self.rng.random() * most
        require(0.0 <= self.depth <= 1.0, f"depth {self.depth} is outside 0..1", "0 is the start, 1 the end")
        return self.depth

    def refuse_depth(self) -> None:
        """Refuse a depth if the answer is spread over the whole document.

        Raises:
            KvcliError: one was asked for (usage).
        """
        what = f"depth {self.depth} was given, but the answer is spread over the whole document"
        require(self.depth is None, what, "leave the depth out")

    def hide(
        self, statements: Sequence[str], depths: Sequence[float], question: str, filler: Callable[[], str] | None = None
    ) -> tuple[str, float]:
        """Put each statement at its depth, 0..1 of the document in tokens, between sentences of filler.

        `filler` makes one sentence after another, by default the grammar's. Statements of the same depth keep their
        order. Returns the document and the actual depth of the first statement.

        Raises:
            KvcliError: statements and question alone are too long (usage).
        """
        left = self.beside(*(" " + statement for statement in statements), question)
        what = f"a length of {self.length} tokens is too short: the facts and the question alone take"
        require(left >= 0, f"{what} {self.length - left}", "ask for a longer text or for fewer facts")
        others = sentences_of(filler or (lambda: sentence(self.rng)), left, self.count_tokens)
        sizes = {text: self.count_tokens(" " + text) for text in (*statements, *others)}
        total = sum(sizes[text] for text in (*statements, *others))
        parts: list[str] = []
        got = {}
        position = following = 0
        for index in sorted(range(len(statements)), key=lambda index: depths[index]):
            room = total - sizes[statements[index]]
            # The last sentence ends or begins at the depth asked for, whichever is nearer.
            while following < len(others) and position + sizes[others[following]] / 2 <= depths[index] * room:
                parts.append(others[following])
                position += sizes[others[following]]
                following += 1
            got[index] = position / max(room, 1)
            parts.append(statements[index])
            position += sizes[statements[index]]
        return " ".join([*parts, *others[following:]]), got[0]


@dataclass(frozen=True)
class TaskRow:
    """One example in RULER's row format: `index`, `input`, `outputs` and `length` are RULER's own fields.

    `length` is the number of tokens of `input`, which is the document, a blank line and the question, or the first
    question of several `turns`.
    """

    index: int
    input: str
    outputs: tuple[str, ...]
    length: int
    task: str
    seed: int
    depth: float | None
    document: str
    question: str
    answer: str
    turns: tuple[tuple[str, str], ...] = ()
    turn_outputs: tuple[tuple[str, ...], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the row as it is written to a JSONL file."""
        return {**asdict(self), "outputs": list(self.outputs)}


def recall(text: str, outputs: Sequence[str]) -> float:
    """Score as RULER does: the share (0..1) of `outputs` that occur in `text`, ignoring case.

    Raises:
        ValueError: `outputs` is empty.
    """
    if not outputs:
        raise ValueError("a row without outputs cannot be scored")
    return sum(output.lower() in text.lower() for output in outputs) / len(outputs)


def require(condition: bool, what: str, hint: str) -> None:
    """Check a condition on a request.

    Raises:
        KvcliError: `condition` does not hold (usage); it says `what` and `hint`.
    """
    if not condition:
        raise KvcliError(what, hint, ExitCode.USAGE)
