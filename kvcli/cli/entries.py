"""The prompts of a command: documents, from files or as saved, and the questions on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.cli.asked import json_object
from kvcli.errors import usage_error

if TYPE_CHECKING:
    from kvcli.inputs.encoding import Template
    from kvcli.inputs.prompts import FailedPrompt, Prompt, QuestionFirst


def read_entries(
    files: list[str], prompts: list[str], questions: str | None, first: QuestionFirst, kv: Path | None
) -> list[Prompt | FailedPrompt]:
    """Read documents and questions, and ask every question on every document.

    Without files, what the directory `kv` is of is the document; without that, the questions stand alone.

    Raises:
        KvcliError: something cannot be read, or there is nothing to read (usage).
    """
    from kvcli.inputs.prompts import STDIN, Prompt, read_prompts
    from kvcli.inputs.questions import ask, read_questions

    if questions == STDIN and STDIN in files:
        raise usage_error("standard input (-) is named twice", "name it once")
    asked = read_questions(prompts, questions)
    if not files and kv is not None:
        from kvcli.runtime.saved.manifest import read_manifest

        saved = read_manifest(kv).asked
        return ask([Prompt(saved.source, saved.text)], asked, first)
    if not files and asked:
        return [Prompt("prompt", each.text, id=each.id) for each in asked]
    return ask(read_prompts(files), asked, first)


def template_of(
    system: str | None, raw: bool, chat_template_kwargs: str | None, kv: Path | None, settled: bool
) -> Template:
    """How prompts become conversations: as the options say, or as that of the directory `kv` unless it is `settled`.

    Raises:
        KvcliError: what should be JSON is none, or `kv` is no directory of saved KV (usage).
    """
    from kvcli.inputs.encoding import Template

    if kv is None or settled:
        return Template(system, raw, json_object(chat_template_kwargs))

    from kvcli.runtime.saved.manifest import read_manifest

    saved = read_manifest(kv).asked
    return Template(saved.system, saved.raw, saved.chat_template_kwargs)
