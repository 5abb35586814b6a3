"""Questions on documents: from -p, or from a file with one a line, as text or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, ValidationError

from kvcli.errors import usage_error
from kvcli.inputs.prompts import FailedPrompt, Prompt, QuestionFirst, read_document
from kvcli.inputs.validation import first_problem


@dataclass(frozen=True)
class Question:
    """A question, and what it is called in the report, where it was given a name."""

    text: str
    id: str | None = None


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    question: str
    id: str | int | None = None


def read_questions(prompts: Sequence[str], file: str | None = None) -> list[Question]:
    """Put the questions of -p before those of a file ("-" is standard input), a line each; blank lines are skipped.

    A file whose first line begins with "{" is JSONL: objects with `question` and, if they like, `id`.

    Raises:
        KvcliError: an empty question, a file without one, or a line that is none, with its number (usage).
    """
    for prompt in prompts:
        if not prompt.strip():
            raise usage_error(f"the prompt {prompt!r} is empty", "give -p some text, or leave it out")
    found = [Question(prompt) for prompt in prompts]
    if file is not None:
        lines = read_document(file).split("\n")
        as_json = next(line for line in lines if line.strip()).lstrip().startswith("{")
        numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        found += [_parse(file, number, line) if as_json else Question(line.strip()) for number, line in numbered]
    return found


def ask(
    entries: Sequence[Prompt | FailedPrompt], questions: Sequence[Question], first: QuestionFirst = "no"
) -> list[Prompt | FailedPrompt]:
    """Ask every question on every document, one document after another; without questions the texts stand alone."""
    asked: list[Prompt | FailedPrompt] = []
    for entry in entries:
        if isinstance(entry, FailedPrompt) or not questions:
            asked.append(entry)
        else:
            asked += [replace(entry, question=each.text, id=each.id, question_first=first) for each in questions]
    return asked


def _parse(file: str, number: int, line: str) -> Question:
    hint = 'every line is an object such as {"id": "q1", "question": "Who signed?"}'
    try:
        found = _Line.model_validate_json(line)
    except ValidationError as error:
        raise usage_error(f"{file}, line {number}: {first_problem(error)}", hint) from None
    if not found.question.strip():
        raise usage_error(f"{file}, line {number}: the question is empty", hint)
    return Question(found.question, None if found.id is None else str(found.id))
