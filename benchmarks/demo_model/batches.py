"""Training sequences of the demo model: repeats over the whole vocabulary, and documents with questions behind them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizer import GENERATION_PROMPT
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.needles import random_value
from kvcli.quality.tasks.rows import RowRequest
from kvcli.quality.tasks.text import NAMES, sentences
from kvcli.quality.tasks.vt import chain_statements
from kvcli.quality.tasks.words import frequent_words

IGNORED, FILLER, ANSWER, VALUE = 0, 1, 2, 3
"""What a token is to the loss. A VALUE is copied from document or question; ANSWER is the words around it."""

FIRST_ORDINARY_ID = 3  # after unk, bos and eos


@dataclass(frozen=True)
class Batch:
    """Token ids and what each of them is to the loss, both [batch, length]."""

    ids: Tensor
    kinds: Tensor


def dense_batch(rng: random.Random, length: int, size: int, vocabulary: int) -> Batch:
    """Return sequences that repeat a random segment over the whole vocabulary: every later token is a VALUE.

    Nothing but a match with the earlier copy predicts them. These batches make the matching heads form.
    """
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    period = rng.randint(max(length // 8, 4), length // 2)
    segment = torch.randint(FIRST_ORDINARY_ID, vocabulary, (size, period), generator=generator)
    ids = segment.repeat(1, -(-length // period))[:, :length]
    kinds = torch.full_like(ids, VALUE)
    kinds[:, : period + 1] = IGNORED
    return Batch(ids, kinds)


class Writer:
    """Builds one training sequence out of text pieces that tokenise independently of each other."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._backend = tokenizer.backend_tokenizer
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._groups = set(range(FIRST_ORDINARY_ID + 256, FIRST_ORDINARY_ID + 256 + 1000))
        self.ids: list[int] = []
        self.kinds: list[int] = []

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`, without bos."""
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without bos."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def start(self, document: str) -> None:
        """Begin a new sequence with bos and the document."""
        ids = self.encode(document)
        self.ids = [self._bos, *ids]
        # A value stated in the document is random: nothing can be learnt from predicting it.
        self.kinds = [IGNORED, *(IGNORED if i in self._groups else FILLER for i in ids)]

    def ask(self, question: str, answer: str, values: Sequence[str]) -> None:
        """Append a question and its answer. Tokens of `values` inside the answer are VALUE."""
        prompt = self.encode("\n\n" + question + GENERATION_PROMPT)
        self.ids += prompt
        self.kinds += [IGNORED] * len(prompt)
        wanted = {i for value in values for i in self.encode(value)}
        ids = self.encode(" " + answer)
        self.ids += [*ids, self._eos]
        self.kinds += [*(VALUE if i in wanted else ANSWER for i in ids), ANSWER]


def _write(
    writer: Writer,
    rng: random.Random,
    length: int,
    statements: Sequence[Sequence[str]],
    asked: Sequence[tuple[str, str, Sequence[str]]],
) -> None:
    """Write filler with `statements` in it, then the questions, so that `length` tokens are filled.

    `statements` are groups of sentences whose order is kept; `asked` holds question, answer and what in it to find.
    """
    tail = sum(writer.count("\n\n" + q + GENERATION_PROMPT) + writer.count(" " + a) + 1 for q, a, _ in asked)
    stated = sum(writer.count(" " + sentence) for group in statements for sentence in group)
    filler = sentences(rng, max(length - tail - stated - 1, 0), writer.count)
    placed = [(rng.random(), text) for text in filler]
    for group in statements:
        placed += zip(sorted(rng.random() for _ in group), group, strict=True)
    writer.start(" ".join(text for _, text in sorted(placed, key=lambda item: item[0])))
    for question, answer, wanted in asked:
        writer.ask(question, answer, wanted)


def _facts(rng: random.Random, names: Sequence[str], values: Sequence[str]) -> list[list[str]]:
    pairs = zip(names, values, strict=True)
    return [[rng.choice(phrases.CODE_FACTS).format(name=name, value=value)] for name, value in pairs]


def codes(rng: random.Random, writer: Writer, length: int, facts: int, questions: int) -> None:
    """Access codes, asked for one by one."""
    names = rng.sample(NAMES, facts)
    values = {name: random_value(rng) for name in names}
    asked = [
        (
            rng.choice(phrases.CODE_QUESTIONS).format(name=name),
            phrases.CODE_ANSWER.format(name=name, value=values[name]),
            [values[name], " " + name],
        )
        for name in rng.sample(names, min(questions, facts))
    ]
    _write(writer, rng, length, _facts(rng, names, list(values.values())), asked)


def multiquery(rng: random.Random, writer: Writer, length: int, facts: int, questions: int) -> None:
    """Access codes, asked for two to four at a time."""
    names = rng.sample(NAMES, max(facts, 2))
    values = {name: random_value(rng) for name in names}
    left = rng.sample(names, min(max(questions, 4), len(names)))
    asked = []
    while len(left) >= 2:
        some, left = left[: rng.randint(2, 4)], left[4:]
        answer = " ".join(phrases.CODE_ANSWER.format(name=name, value=values[name]) for name in some)
        question = phrases.NAMES_QUESTION.format(names=phrases.listing(some))
        asked.append((question, answer, [*(values[name] for name in some), *(" " + name for name in some)]))
    _write(writer, rng, length, _facts(rng, names, list(values.values())), asked)


def multivalue(rng: random.Random, writer: Writer, length: int, facts: int, questions: int) -> None:
    """Names with two to four access codes each, asked for in the order of the document."""
    owners: list[tuple[str, list[str]]] = []
    for name in rng.sample(NAMES, max(facts // 3, 1)):
        owners.append((name, [random_value(rng) for _ in range(rng.randint(2, 4))]))
    asked = [
        (
            phrases.VALUES_QUESTION.format(name=name),
            phrases.VALUES_ANSWER.format(name=name, values=phrases.listing(values)),
            values,
        )
        for name, values in rng.sample(owners, min(max(questions // 2, 1), len(owners)))
    ]
    statements = [
        [rng.choice(phrases.CODE_FACTS).format(name=name, value=value) for value in values] for name, values in owners
    ]
    _write(writer, rng, length, statements, asked)


def chains(rng: random.Random, writer: Writer, length: int, facts: int, questions: int) -> None:
    """Chains of variables of four hops, as in the task "vt"."""
    count = max(facts // 5, 1)
    names = rng.sample(NAMES, 5 * count)
    asked, statements = [], []
    for c in range(count):
        value, members = random_value(rng), names[5 * c : 5 * c + 5]
        chain = chain_statements(value, members)
        statements.append(chain)
        wanted = [*(" " + name for name in members), value]
        asked.append((phrases.VARIABLE_QUESTION.format(name=members[-1]), " ".join(reversed(chain)), wanted))
    _write(writer, rng, length, statements, rng.sample(asked, min(max(questions // 4, 1), count)))


def frequencies(rng: random.Random, writer: Writer, length: int, facts: int, questions: int) -> None:
    """The task "fwe": one list of words, one question."""
    del facts, questions
    request = RowRequest(rng, length - 24, writer.count, depth=None)
    draft = frequent_words(request, distinct=min(max(length // 12, 5), 40))
    writer.start(draft.document)
    writer.kinds = [IGNORED] * len(writer.kinds)  # the order of the words is random
    writer.ask(draft.question, draft.answer, [" " + name for name in draft.outputs])


KINDS: dict[str, Callable[[random.Random, Writer, int, int, int], None]] = {
    "codes": codes,
    "multiquery": multiquery,
    "multivalue": multivalue,
    "vt": chains,
    "fwe": frequencies,
}


def question_batch(
    kind: str,
    rng: random.Random,
    writer: Writer,
    *,
    length: int,
    facts: int,
    questions: int,
    size: int,
    few: float = 0.0,
) -> Batch:
    """Return `size` documents of one kind with questions behind them, cut or padded (IGNORED) to `length`.

    The number of facts varies between a quarter of `facts` and `facts`, so that the filler between them does, too. Of
    the documents a share of `few` is asked one to three questions instead of `questions`.
    """
    ids = torch.zeros((size, length), dtype=torch.long)
    kinds = torch.zeros((size, length), dtype=torch.long)
    for row in range(size):
        asked = questions if rng.random() >= few else min(rng.randint(1, 3), questions)
        KINDS[kind](rng, writer, length, rng.randint(max(facts // 4, 1), facts), asked)
        n = min(len(writer.ids), length)
        ids[row, :n] = torch.tensor(writer.ids[:n])
        kinds[row, :n] = torch.tensor(writer.kinds[:n])
    return Batch(ids, kinds)
