"""Encode prompts into token ids through a tokenizer's chat template, a program run with limits on time and memory."""

from __future__ import annotations

import re
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.options import Sampling, Template
from kvcli.inputs.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvcli.models.loading import Checkpoint, Model

SECONDS = 10.0
"""Time limit of a template. Templates of real models take milliseconds, even around millions of tokens."""
_PART = "{'type': 'text'"  # a part of a message that was written as it is
_FIRST_WORDS = 4  # of a text, by which it is found again: a template may strip it and escape other characters
_MEMORY = 4 << 30  # bytes, besides what the texts take
_COPIES = 16  # bytes per character: a few copies of a text on its way through the template
_RESERVED = frozenset({"conversation", "tokenize", "add_generation_prompt", "return_dict", "return_tensors"})


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in tokens, with the tokens of its question alone; or the error that prevented encoding.

    `prompt` is the text it was made from, if any; `sampling` is its own, if it differs from the run's.
    """

    source: str
    ids: list[int]
    question: list[int] = field(default_factory=list)
    error: KvcliError | None = None
    prompt: Prompt | None = None
    sampling: Sampling | None = None


ALWAYS_TOGETHER = 16384
"""Total of tokens of their own up to which prompts may be read together, however little they share."""


def by_document(prompts: Sequence[EncodedPrompt]) -> list[list[EncodedPrompt]]:
    """Group consecutive prompts that begin alike and are to be read together: questions on one document.

    At least half of each prompt's tokens are shared, and the other tokens of a group are not many more than the shared
    ones.
    """
    groups: list[list[EncodedPrompt]] = []
    for prompt in prompts:
        if not (groups and _alike([*groups[-1], prompt])):
            groups.append([])
        groups[-1].append(prompt)
    return groups


def in_common(prompts: Sequence[EncodedPrompt]) -> int:
    """Count the tokens that all prompts begin with; every prompt has at least one more."""
    ids = [prompt.ids for prompt in prompts]
    shortest, longest = min(ids), max(ids)  # lists compare token by token: a prefix of these two is a prefix of all
    same = next((at for at, pair in enumerate(zip(shortest, longest, strict=False)) if pair[0] != pair[1]), None)
    return min(len(shortest) if same is None else same, min(map(len, ids)) - 1)


def _alike(prompts: Sequence[EncodedPrompt]) -> bool:
    if any(prompt.error is not None for prompt in prompts):
        return False
    common, lengths = in_common(prompts), [len(prompt.ids) for prompt in prompts]
    own = sum(lengths) - common * len(prompts)
    return 2 * common >= max(lengths) and own <= max(common, ALWAYS_TOGETHER)


def encode_all(prompts: Sequence[Prompt], template: Template, checkpoint: Checkpoint) -> list[EncodedPrompt]:
    """Tokenise every prompt; one that fails is kept with its error.

    Raises:
        KvcliError: every prompt failed; this is the first one's error.
    """
    encoded, tokenizer = [], checkpoint.tokenizer
    for prompt in prompts:
        try:
            ids = encode(prompt, template, tokenizer)
            refuse_unembedded(ids, checkpoint, prompt.source)
            encoded.append(EncodedPrompt(prompt.source, ids, encode_question(prompt, tokenizer), prompt=prompt))
        except KvcliError as error:
            encoded.append(EncodedPrompt(prompt.source, [], error=error, prompt=prompt))
    if all(prompt.error is not None for prompt in encoded):
        raise next(prompt.error for prompt in encoded if prompt.error is not None)
    return encoded


def encode(
    prompt: Prompt, template: Template, tokenizer: PreTrainedTokenizerBase, turns: Sequence[dict[str, str]] = ()
) -> list[int]:
    """Return the token ids of a prompt, through the tokenizer's chat template if it has one, unless `template.raw`.

    Without a template the text is encoded with the tokenizer's own special tokens. `turns` are messages after the
    prompt, which the template puts in their places.

    Raises:
        KvcliError: a system message or template variables that nothing would read, a template that fails, or a prompt
            of no tokens (usage).
    """
    if template.raw or tokenizer.chat_template is None:
        _refuse_unread(template)
        ids = tokenizer(prompt.content, verbose=False)["input_ids"]
    else:
        rendered = _render(prompt, template, tokenizer, turns)
        ids = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise usage_error(f"{prompt.source}: the prompt has no tokens", "this tokenizer knows none of its text")
    return list(ids)


def plain_text_notice(checkpoint: Checkpoint, template: Template) -> str | None:
    """Say that questions are no messages to a model without a chat template, unless that is what was asked for."""
    if template.raw or checkpoint.tokenizer.chat_template is not None:
        return None
    return (
        f"{checkpoint.name} has no chat template, as base models have none: a question (-p) is appended to the text as "
        "it is, and the model continues that"
    )


def refuse_unembedded(ids: Sequence[int], model: Checkpoint | Model, source: str) -> None:
    """Refuse tokens that a tokenizer has and its model has not: on a GPU they would end the process.

    Raises:
        KvcliError: names the token and both sizes (usage).
    """
    known, token = model.geometry.vocab_size, max(ids, default=0)
    if token >= known:
        text, size = model.tokenizer.convert_ids_to_tokens(token), len(model.tokenizer)
        what = f"{source}: token {token:,} ({text!r}) is beyond the {known:,} embeddings of {model.name}"
        hint = f"the tokenizer has {size:,} tokens: use the model's own with --tokenizer, or leave that text out"
        raise usage_error(what, hint)


def encode_question(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of the question, without special tokens; none if the text stands alone."""
    return bare_tokens(prompt.question, tokenizer) if prompt.question else []


def bare_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def document_tokens(ids: Sequence[int], question: Sequence[int]) -> int:
    """Count a prompt's tokens before the question that follows its document; all of them if there is no question.

    The first and last token of the question may differ from those of the question alone: up to one at each end is
    ignored.
    """
    for first, last in ((0, 0), (1, 0), (1, 1)):
        asked = list(question[first : len(question) - last])
        latest = len(ids) - last - len(asked)
        for at in range(latest, latest // 2, -1) if asked else ():  # more comes before it than after it
            if ids[at] == asked[0] and list(ids[at : at + len(asked)]) == asked:
                return at - first
    return len(ids)


def _render(
    prompt: Prompt, template: Template, tokenizer: PreTrainedTokenizerBase, turns: Sequence[dict[str, str]] = ()
) -> str:
    reserved = sorted(_RESERVED & template.kwargs.keys())
    if reserved:
        raise usage_error(f"--chat-template-kwargs cannot set {reserved[0]!r}", "kvcli sets it itself")
    conversation = [{"role": "user", "content": prompt.content}, *turns]
    if template.system is not None:
        conversation.insert(0, {"role": "system", "content": template.system})
    return render_chat_template(tokenizer, conversation, template.kwargs)


def _refuse_unread(template: Template) -> None:
    why = "--raw skips the chat template" if template.raw else "the tokenizer has no chat template"
    if template.system is not None:
        raise usage_error(f"--system has no effect: {why}", "put the instruction into the prompt")
    if template.kwargs:
        raise usage_error(f"--chat-template-kwargs has no effect: {why}", "leave it out")


def render_chat_template(
    tokenizer: PreTrainedTokenizerBase, conversation: Sequence[dict[str, str]], variables: Mapping[str, Any]
) -> str:
    """Render a conversation as the text that the model was trained on, up to where its answer begins.

    Raises:
        KvcliError: the template fails, takes too long or too much memory, or gives no text (usage).
    """
    rendered = _rendered(tokenizer, conversation, variables)
    if _has_texts(rendered, conversation):
        return rendered
    # Templates of models that see images walk over the parts of a message, and find none in a text.
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in conversation]
    rendered = _rendered(tokenizer, parts, variables)
    if _PART in rendered or not _has_texts(rendered, conversation):
        raise _refused("leaves the prompt's text out")
    return rendered


def _has_texts(rendered: str, conversation: Sequence[dict[str, str]]) -> bool:
    """Tell whether a rendered conversation holds the beginning of each text that the user gave."""
    texts = [message["content"].strip() for message in conversation if message["role"] == "user"]
    return all(word in rendered for text in texts for word in re.findall(r"\w+", text)[:_FIRST_WORDS] or [text])


def _rendered(
    tokenizer: PreTrainedTokenizerBase, conversation: Sequence[dict[str, Any]], variables: Mapping[str, Any]
) -> str:
    size = _COPIES * sum(len(str(message["content"])) for message in conversation)
    try:
        with _bounded(SECONDS, _MEMORY + size):
            rendered = tokenizer.apply_chat_template(
                list(conversation), tokenize=False, add_generation_prompt=True, **variables
            )
    except TimeoutError:
        raise _refused(f"has not ended after {SECONDS:g} seconds") from None
    except MemoryError:
        raise _refused("takes too much memory") from None
    except RecursionError:
        raise _refused("calls itself without an end") from None
    except Exception as error:  # a template may raise anything
        raise _refused(f"refuses the prompt: {' '.join(str(error).split()) or type(error).__name__}") from error
    if not isinstance(rendered, str) or not rendered:
        raise _refused("gives no text")
    return rendered


@contextmanager
def _bounded(seconds: float, memory: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread after `seconds`, and limit it to `memory` bytes more than it has.

    Other threads have no such alarm and run without limits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def time_is_up(*_: object) -> None:
        raise TimeoutError

    limits = resource.getrlimit(resource.RLIMIT_AS)
    wanted = psutil.Process().memory_info().vms + memory
    before = signal.signal(signal.SIGALRM, time_is_up)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with suppress(ValueError, OSError):  # the system may allow less already
            resource.setrlimit(resource.RLIMIT_AS, (wanted, limits[1]))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _refused(what: str) -> KvcliError:
    hint = "use --raw to skip the template, or another --system or --chat-template-kwargs"
    return usage_error(f"the chat template {what}", hint)
