"""Rows of reasoning benchmarks in the forms in which they are distributed: a problem, and the final answer to it.

MATH500: the 500 problems of MATH (arXiv 2103.03874) that arXiv 2305.20050 tests on. AIME: the competition's problems of
a year, as several data sets have them. GPQA: arXiv 2311.12022. What is asked stands in `reasoning.toml`: these
benchmarks come without prompts.
"""

import random
import re
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BeforeValidator, Field
from typing_extensions import override

from kvcli.quality.eval.example import Example
from kvcli.quality.eval.row import BenchmarkRow, Text, example_of, named, table_entry

_LETTERS = "ABCD"


def _integer(value: object) -> str:
    """An AIME answer, a number or its digits, perhaps of an angle: the number without leading zeros."""
    found = re.fullmatch(r"\$?0*([0-9]{1,3})(?:\^\{?\\circ\}?)?\$?", str(value).strip())
    if found is None or not isinstance(value, int | str) or isinstance(value, bool):
        raise ValueError("is no integer from 0 to 999, as AIME's answers are")
    return found[1]


class MathRow(BenchmarkRow):
    """MATH500: an answer in LaTeX, and what no problem of AIME has: a subject, or the place in MATH."""

    problem: Text
    answer: Text
    place: Annotated[str, Field(validation_alias=AliasChoices("unique_id", "subject"))]

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        return "math500", example_of(table_entry("reasoning", "math500"), {"problem": self.problem}, (self.answer,))


class AimeRow(BenchmarkRow):
    """AIME: an answer from 0 to 999; the file's name is that of the task."""

    problem: Annotated[Text, Field(validation_alias=AliasChoices("problem", "Problem", "question"))]
    answer: Annotated[str, BeforeValidator(_integer), Field(validation_alias=AliasChoices("answer", "Answer"))]

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        return named(path), example_of(table_entry("reasoning", "aime"), {"problem": self.problem}, (self.answer,))


class GpqaRow(BenchmarkRow):
    """GPQA: four choices, in an order that the question's text alone decides, so that a row is always asked alike."""

    question: Annotated[Text, Field(alias="Question")]
    right: Annotated[Text, Field(alias="Correct Answer")]
    wrong_1: Annotated[Text, Field(alias="Incorrect Answer 1")]
    wrong_2: Annotated[Text, Field(alias="Incorrect Answer 2")]
    wrong_3: Annotated[Text, Field(alias="Incorrect Answer 3")]

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        right, *others = (each.strip() for each in (self.right, self.wrong_1, self.wrong_2, self.wrong_3))
        choices = [right, *others]
        random.Random(self.question.strip()).shuffle(choices)
        values = {"question": self.question.strip()}
        values |= {f"choice_{letter}": choice for letter, choice in zip(_LETTERS, choices, strict=True)}
        letters = tuple(letter for letter, choice in zip(_LETTERS, choices, strict=True) if choice == right)
        return named(path), example_of(table_entry("reasoning", "gpqa"), values, letters)
