"""SCBench: several queries on one long context, turn after turn or each on its own (arXiv 2412.10319, section 3).

In turns, a query stands behind the right answers to those before it. As requests, nothing but the context is read
beforehand: a method prunes or indexes it without knowing what will be asked, and every query finds it as the others
did. Each query is a task of its own, "NAME turn 2" or "NAME request 2".

Left out are the tasks that repeat functions of a repository: a parser of six programming languages scores them.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field
from typing_extensions import override

from kvcli.errors import usage_error
from kvcli.quality.eval.example import Example, conversation
from kvcli.quality.eval.row import (
    Answers,
    BenchmarkRow,
    Options,
    Text,
    example_of,
    found,
    four_options,
    named,
    table_entry,
)

_REPOSITORIES = ("scbench_repoqa", "scbench_repoqa_and_kv")

# The numbers of scbench_mf are a list.
_Context = Annotated[Text, BeforeValidator(lambda value: str(value) if isinstance(value, list) else value)]


class ScBenchQuery(BaseModel):
    """One query with its answer; in a file of mixed tasks it says which `task` it is."""

    input: Text
    answer: Answers
    options: Options = ()
    task: str | None = None


class ScBenchRow(BenchmarkRow):
    """A context and its queries."""

    context: _Context
    multi_turns: Annotated[list[ScBenchQuery], Field(min_length=1)]

    @override
    def example(self, path: Path) -> tuple[str, Example]:
        return next(self.examples(path))

    @override
    def examples(self, path: Path, requests: bool = False) -> Iterator[tuple[str, Example]]:
        """Make an example of every query.

        Raises:
            KvcliError: the file's name is none of the tasks that are scored here (usage).
        """
        task = named(path)
        if task in _REPOSITORIES:
            raise usage_error(f"{path}: {task} is scored by a parser of code, which is not here", "leave it out")
        alone = [self._asked(task, query) for query in self.multi_turns]
        said: list[tuple[str, str]] = []
        for number, (query, example) in enumerate(zip(self.multi_turns, alone, strict=True), 1):
            if requests:
                yield f"{task} request {number}", replace(example, question="", whole=True)
                continue
            _, turns = conversation(said, example.question)
            first = alone[0]
            yield (
                f"{task} turn {number}",
                replace(example, prompt=first.prompt, question=first.question, shared="", turns=turns),
            )
            said.append((example.question, " ".join(query.answer)))

    def _asked(self, task: str, query: ScBenchQuery) -> Example:
        """A query on its own."""
        entry = table_entry("scbench", query.task or task)
        values, references = {"context": self.context, "input": query.input}, query.answer
        if entry["metric"] == "choice":
            shown, references = four_options(references[0], query.options)
            values |= shown
        elif task == "scbench_mf":
            wanted = found(r"The .+ is", query.input).lower().removesuffix(" is")
            values["prefix"] = f"What is {wanted}?"
        example = example_of(entry, values, references)
        before = entry["prompt"].partition("{context}")[0].format(**values)
        later = entry.get("later", "").format(**values)
        return replace(example, question=later or example.question, shared=before + self.context)
