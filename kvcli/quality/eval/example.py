"""One example of a task, as text and in tokens, and the cells of a table, each with the examples that it averages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.encoding import bare_tokens, encode
from kvcli.inputs.options import Template
from kvcli.inputs.prompts import Prompt
from kvcli.quality.tasks import SEPARATOR

_SOURCE = "example"


@dataclass(frozen=True)
class Example:
    """A prompt and the references of its answer.

    `prompt` is the whole message, `question` the part after the document, for methods that look at it first. `metric`
    names a scorer of `scorers.SCORERS`; `choices` are the classes of a classification.
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
    """The beginning of the answer: part of the prompt, after the chat template."""
    whole: bool = False
    """Whether the prompt is never cut: the answer gets the room that is left, unless its length is given."""
    turns: tuple[tuple[str, str], ...] = ()
    """Text given after the prompt and before the answer that counts: the prompt's right answer and the next
    question, that one's answer, and so on.
    """
    turns_read: bool = False
    """Whether `turns` are read with the prompt, not fed token by token."""
    shared: str = ""
    """The beginning of the prompt that is read before its question is known; the rest is fed token by token."""
    continuation: str | None = None
    """A text that is fed token by token instead of generating one; its likelihood, or its closeness, counts."""


def conversation(said: Sequence[tuple[str, str]], last: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the first of several questions, and the `turns` of an `Example` that lead from there to the last one.

    `said` are the questions before the last one, each with its answer.
    """
    questions = [*(question for question, _ in said), last]
    return questions[0], tuple(zip((answer for _, answer in said), questions[1:], strict=True))


@dataclass(frozen=True)
class Cell:
    """Examples that share a figure of the table: `size` of one task, of one length and depth if those are chosen.

    `length` is tokens of a prompt. `make` makes an example when its turn comes. Examples of the same number in cells of
    one `series` may share their prompts.
    """

    task: str
    length: int | None
    depth: float | None
    metric: str
    size: int
    make: Callable[[int], Example]
    series: str = ""

    @property
    def title(self) -> str:
        """The name of the cell in notes."""
        length = f" {self.length:,}" if self.length is not None else ""
        return f"{self.task}{length}" + (f" depth {self.depth:g}" if self.depth is not None else "")


@dataclass(frozen=True)
class Encoded:
    """A prompt and its question in tokens, the number of tokens cut out of the middle, and the tokens that follow.

    `turns` are the tokens of turns that are given before the answer. `fed` are those of a continuation, empty if the
    answer is to be generated; `max_tokens` bounds either.
    """

    ids: list[int]
    question: list[int]
    cut: int
    fed: list[int]
    max_tokens: int
    turns: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        """The most tokens after the prompt."""
        return len(self.turns) + self.max_tokens


def encode_example(
    example: Example,
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None,
    max_length: int | None,
) -> Encoded:
    """Tokenise an example; a prompt that leaves no room within `max_length` for the answer loses its middle.

    As in LongBench (its pred.py), the first and the last tokens stay, in equal parts, before the chat template is added
    around them.

    Raises:
        KvcliError: the answer alone is too long, or together with a prompt that is not to be cut (usage).
    """
    fed = _bare(example.continuation, tokenizer) if example.continuation is not None else []
    room = len(fed) or max_tokens or example.max_tokens
    prefix = _bare(example.answer_prefix, tokenizer)
    template = Template(raw=True) if example.raw else template
    ids = _encoded(example, template, tokenizer) + prefix
    cut = 0
    if example.whole and max_length is not None:
        room = room if max_tokens else min(room, max_length - len(ids))
        if room < 1 or len(ids) + room > max_length:
            what = f"an answer of {max(room, 1):,} tokens leaves no room for a prompt of {len(ids):,}"
            hint = "lower --max-tokens" if len(ids) < max_length else "leave that row out: its prompt is never cut"
            raise KvcliError(f"{what} within {max_length:,}", hint, ExitCode.USAGE)
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
    turns = _turns(example, template, tokenizer, ids) if example.turns and not example.turns_read else []
    if example.shared:
        begun = encode(Prompt(_SOURCE, example.shared), template, tokenizer)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(begun, ids, strict=False))))
        ids, turns = ids[:same], ids[same:] + turns
    return Encoded(ids, _bare(example.question, tokenizer), cut, fed, room, turns)


def _encoded(example: Example, template: Template, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a prompt, with its turns if they are read with it."""
    if not example.turns_read:
        return encode(Prompt(_SOURCE, example.prompt), template, tokenizer)
    if template.raw or tokenizer.chat_template is None:
        return encode(Prompt(_SOURCE, example.prompt + _in_words(example)), template, tokenizer)
    return encode(Prompt(_SOURCE, example.prompt), template, tokenizer, _messages(example))


def _messages(example: Example) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text}
        for pair in example.turns
        for role, text in zip(("assistant", "user"), pair, strict=True)
    ]


def _in_words(example: Example) -> str:
    return "".join(f" {answer}{SEPARATOR}{question}" for answer, question in example.turns)


def _turns(example: Example, template: Template, tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return the token ids of the turns after a prompt's `ids`, up to where the answer begins."""
    if template.raw or tokenizer.chat_template is None:
        return _bare(_in_words(example), tokenizer)
    whole = encode(Prompt(_SOURCE, example.prompt), template, tokenizer, _messages(example))
    if whole[: len(ids)] != ids:
        what = "the chat template changes the beginning of a conversation when it continues"
        raise KvcliError(what, "leave out tasks of several turns, or use --raw", ExitCode.USAGE)
    return whole[len(ids) :]


def _bare(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return bare_tokens(text, tokenizer) if text else []


def _text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))
