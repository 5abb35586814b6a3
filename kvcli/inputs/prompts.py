"""From files, standard input and -p to token ids: reading, chat template, tokenising."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.errors import ExitCode, KvcliError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STDIN = "-"
_RESERVED = frozenset({"conversation", "tokenize", "add_generation_prompt", "return_dict", "return_tensors"})


@dataclass(frozen=True)
class Prompt:
    """One prompt before the chat template: a document and the question after it (empty: the text stands alone)."""

    source: str
    text: str
    question: str = ""

    @property
    def content(self) -> str:
        """Document, blank line, question."""
        return f"{self.text.rstrip()}\n\n{self.question}" if self.question else self.text


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt of several that could not be read; the others go on without it."""

    source: str
    error: KvcliError


@dataclass(frozen=True)
class Template:
    """How a prompt becomes a conversation: system message, chat template or not, extra template variables."""

    system: str | None = None
    raw: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)


def read_prompts(files: Sequence[str], question: str | None = None) -> list[Prompt | FailedPrompt]:
    """Read every document ("-" is standard input) and pair it with `question`; without documents the question is it.

    Returns one entry a document, in order. Raises `KvcliError` (usage) for nothing to read, for an empty question,
    for standard input named twice, and for a bad document that is the only one.
    """
    if question is not None and not question.strip():
        raise _usage(f"the prompt {question!r} is empty", "give -p some text, or leave it out")
    if not files:
        if question is None:
            raise _usage("no document and no prompt", 'try: kvcli generate notes.txt -p "What was decided?"')
        return [Prompt("prompt", question)]
    if list(files).count(STDIN) > 1:
        raise _usage("standard input (-) is named twice", "name it once")
    prompts: list[Prompt | FailedPrompt] = []
    for name in files:
        try:
            prompts.append(Prompt(_source(name), read_document(name), question or ""))
        except KvcliError as error:
            if len(files) == 1:
                raise
            prompts.append(FailedPrompt(_source(name), error))
    return prompts


def read_document(name: str) -> str:
    """Read one text file, or standard input for "-": UTF-8, a byte-order mark dropped, line ends made plain.

    Raises `KvcliError` (usage) for what is missing, unreadable, not text, or blank.
    """
    source = _source(name)
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except FileNotFoundError:
        raise _usage(f"{source}: no such file", "check the path, or use - for standard input") from None
    except IsADirectoryError:
        raise _usage(f"{source}: is a directory", "name the text files in it") from None
    except PermissionError:
        raise _usage(f"{source}: permission denied", "make the file readable for you") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _usage(f"{source}: cannot be read: {reason}", "check the path") from None
    if b"\0" in data:
        raise _usage(f"{source}: binary file (NUL byte at {data.index(0)})", "give plain UTF-8 text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at {error.start}"
        raise _usage(f"{source}: not UTF-8 text ({found})", "convert it, for example with iconv -t UTF-8") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise _usage(f"{source}: {'holds only blanks' if text else 'is empty'}", "a document needs some text")
    return text


def encode(prompt: Prompt, template: Template, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt: through the tokenizer's chat template where it has one, unless `template.raw`.

    Without a template the text is encoded with the tokenizer's own special tokens. Raises `KvcliError` (usage) for
    a system message or template variables that nothing would read, for a template that refuses the conversation,
    and for a prompt of no tokens.
    """
    if template.raw or tokenizer.chat_template is None:
        _refuse_unread(template)
        ids = tokenizer(prompt.content, verbose=False)["input_ids"]
    else:
        ids = _apply_template(prompt, template, tokenizer)
    if not ids:
        raise _usage(f"{prompt.source}: the prompt has no tokens", "this tokenizer knows none of its text")
    return list(ids)


def encode_question(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the question after the document, without special tokens; none where the text stands alone."""
    if not prompt.question:
        return []
    return list(tokenizer(prompt.question, add_special_tokens=False, verbose=False)["input_ids"])


def _apply_template(prompt: Prompt, template: Template, tokenizer: PreTrainedTokenizerBase) -> Any:
    from jinja2 import TemplateError

    reserved = sorted(_RESERVED & template.kwargs.keys())
    if reserved:
        raise _usage(f"--chat-template-kwargs cannot set {reserved[0]!r}", "kvcli sets it itself")
    conversation = [{"role": "user", "content": prompt.content}]
    if template.system is not None:
        conversation.insert(0, {"role": "system", "content": template.system})
    try:
        encoded = tokenizer.apply_chat_template(
            conversation, tokenize=True, add_generation_prompt=True, return_dict=True, **template.kwargs
        )
    except (TemplateError, TypeError, ValueError) as error:
        hint = "leave --system out, " if template.system is not None else ""
        raise _usage(f"the chat template refuses the prompt: {error}", f"{hint}or use --raw") from error
    return encoded["input_ids"]  # type: ignore[index, call-overload]


def _refuse_unread(template: Template) -> None:
    why = "--raw leaves the chat template out" if template.raw else "the tokenizer has no chat template"
    if template.system is not None:
        raise _usage(f"--system has no place: {why}", "put the instruction into the prompt")
    if template.kwargs:
        raise _usage(f"--chat-template-kwargs has no effect: {why}", "leave it out")


def _source(name: str) -> str:
    return "stdin" if name == STDIN else name


def _usage(what: str, hint: str) -> KvcliError:
    return KvcliError(what, hint, ExitCode.USAGE)
