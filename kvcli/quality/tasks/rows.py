"""What every task hands out: a draft of the parts, and the row in RULER's format (arXiv 2404.06654)."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcli.errors import ExitCode, KvcliError

CountTokens = Callable[[str], int]
"""Number of tokens of a text, special tokens left out."""

SEPARATOR = "\n\n"
"""Between the document and the question."""


@dataclass(frozen=True)
class Draft:
    """A document and a question about it, before lengths are measured.

    `answer` is a complete, right answer in plain words; `outputs` are the strings that a right answer contains.
    `depth` is where the first asked statement stands: 0 the start of the document, 1 its end.
    """

    document: str
    question: str
    answer: str
    outputs: tuple[str, ...]
    depth: float | None


@dataclass(frozen=True)
class TaskRow:
    """One example in RULER's row format: `index`, `input`, `outputs` and `length` are RULER's own fields.

    `length` is the number of tokens of `input`, which is the document, a blank line and the question.
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

    def as_dict(self) -> dict[str, Any]:
        """Return the row as it stands in a JSONL file."""
        return {**asdict(self), "outputs": list(self.outputs)}


def place(
    statements: Sequence[str], depths: Sequence[float], filler: Sequence[str], count_tokens: CountTokens
) -> tuple[str, list[float]]:
    """Put each statement between the sentences of `filler` at its depth, 0..1 of the document in tokens.

    Statements of the same depth keep their order. Returns the document and the depth each statement got.
    """
    order = sorted(range(len(statements)), key=lambda i: depths[i])
    sizes = [count_tokens(" " + text) for text in filler]
    stated = [count_tokens(" " + text) for text in statements]
    total = sum(sizes) + sum(stated)
    parts: list[str] = []
    got = [0.0] * len(statements)
    position = 0
    following = 0
    for i in order:
        # The last sentence ends at the depth asked for, or begins there, whichever is nearer.
        while following < len(filler) and position + sizes[following] / 2 <= depths[i] * (total - stated[i]):
            parts.append(filler[following])
            position += sizes[following]
            following += 1
        got[i] = position / max(total - stated[i], 1)
        parts.append(statements[i])
        position += stated[i]
    parts.extend(filler[following:])
    return " ".join(parts), got


def require_depth(depth: float | None) -> None:
    """Check a depth.

    Raises:
        KvcliError: `depth` is neither None nor within 0..1 (usage).
    """
    require(depth is None or 0.0 <= depth <= 1.0, f"depth {depth} is outside 0..1", "0 is the start, 1 the end")


def require(condition: bool, what: str, hint: str) -> None:
    """Check a condition on what was asked for.

    Raises:
        KvcliError: `condition` does not hold (usage); it says `what` and `hint`.
    """
    if not condition:
        raise KvcliError(what, hint, ExitCode.USAGE)
