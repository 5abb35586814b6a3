"""An example in tokens: chat template, middle truncation, and texts that are fed instead of generated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.encoding import Template, encode
from kvcli.inputs.prompts import Prompt
from kvcli.quality.eval.example import Example

_SOURCE = "example"


@dataclass(frozen=True)
class Encoded:
    """A prompt and its question in tokens, the number of tokens cut out of the middle, and the continuation.

    `fed` are the tokens of a continuation, empty where the answer is to be generated; `max_tokens` bounds either.
    """

    ids: list[int]
    question: list[int]
    cut: int
    fed: list[int]
    max_tokens: int


def encode_example(
    example: Example,
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None,
    max_length: int | None,
) -> Encoded:
    """Tokenise an example; a prompt that leaves no room within `max_length` for the answer loses its middle.

    As LongBench (its pred.py) does: the first and the last tokens stay, in equal parts, before the chat template comes
    around them.

    Raises:
        KvcliError: the answer alone is too long (usage).
    """
    fed = _bare(example.continuation, tokenizer) if example.continuation is not None else []
    room = len(fed) or max_tokens or example.max_tokens
    prefix = _bare(example.answer_prefix, tokenizer)
    template = replace(template, raw=True) if example.raw else template
    ids = encode(Prompt(_SOURCE, example.prompt), template, tokenizer) + prefix
    cut = 0
    if max_length is not None and len(ids) + room > max_length:
        bare = _bare(example.prompt, tokenizer)
        kept = len(bare)
        while len(ids) + room > max_length:
            kept -= len(ids) + room - max_length
            if kept < 2:
                what = f"an answer of {room:,} tokens leaves no room for a prompt within {max_length:,}"
                raise KvcliError(what, "lower --max-tokens", ExitCode.USAGE)
            half = kept // 2
            text = _text(bare[:half], tokenizer) + _text(bare[len(bare) - half :], tokenizer)
            ids = encode(Prompt(_SOURCE, text), template, tokenizer) + prefix
        cut = len(bare) - 2 * half
    return Encoded(ids, _bare(example.question, tokenizer), cut, fed, room)


def _bare(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []


def _text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))
