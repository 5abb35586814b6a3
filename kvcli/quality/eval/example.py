"""One example of a task, and the cells of a table, each with the examples that it averages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A prompt and the references of its answer.

    `prompt` is the whole message, `question` the part of it behind the document, for methods that look at it first.
    `metric` names a scorer of `scorers.SCORERS`; `choices` are what a classification chooses from.
    """

    prompt: str
    question: str
    references: tuple[str, ...]
    metric: str
    max_tokens: int
    choices: tuple[str, ...] = ()
    first_line: bool = False
    """Whether only the answer's first line counts."""
    raw: bool = False
    """Whether the benchmark leaves the chat template out."""
    answer_prefix: str = ""
    """How the answer begins: part of the prompt, behind the chat template."""
    continuation: str | None = None
    """A text that is fed token by token instead of generating one; its likelihood is what counts."""


@dataclass(frozen=True)
class Cell:
    """Examples that share a figure of the table: `size` of one task, of one length and depth where those are chosen.

    `length` is tokens of a prompt. Examples are made one at a time, when their turn has come, by `make`.
    """

    task: str
    length: int | None
    depth: float | None
    metric: str
    size: int
    make: Callable[[int], Example]

    @property
    def title(self) -> str:
        """The name of the cell in notes."""
        length = f" {self.length:,}" if self.length is not None else ""
        return f"{self.task}{length}" + (f" depth {self.depth:g}" if self.depth is not None else "")
