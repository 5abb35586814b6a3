"""Training sequences of the demo model: repeats over the whole vocabulary, and documents with questions behind them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvcli.demo.tokenizer import GENERATION_PROMPT
from kvcli.tasks import phrases
from kvcli.tasks.text import NAMES, sentences

IGNORED, FILLER, ANSWER, VALUE = 0, 1, 2, 3
"""What a token is to the loss. VALUE tokens can only come from the document; ANSWER tokens are the words around them."""

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


def value(rng: random.Random) -> str:
    """Return nine random digits, uniform over each group of three."""
    return f"{rng.randrange(10**9):09d}"


def codes_sequence(rng: random.Random, writer: Writer, length: int, facts: int, questions: int) -> None:
    """Write a document of up to `facts` access codes and ask for some of them, so that `length` tokens are filled."""
    names = rng.sample(NAMES, facts)
    codes = {name: value(rng) for name in names}
    statements = [rng.choice(phrases.CODE_FACTS).format(name=name, value=codes[name]) for name in names]
    asked = [
        (rng.choice(phrases.CODE_QUESTIONS).format(name=name), phrases.CODE_ANSWER.format(name=name, value=codes[name]), name)
        for name in rng.sample(names, min(questions, facts))
    ]
    tail = sum(writer.count("\n\n" + q + GENERATION_PROMPT) + writer.count(" " + a) + 1 for q, a, _ in asked)
    stated = sum(writer.count(" " + statement) for statement in statements)
    text = sentences(rng, max(length - tail - stated - 1, 0), writer.count)
    for statement in statements:
        text.insert(rng.randint(0, len(text)), statement)
    writer.start(" ".join(text))
    for question, answer, name in asked:
        writer.ask(question, answer, [codes[name]])


def question_batch(rng: random.Random, writer: Writer, length: int, facts: int, questions: int, size: int) -> Batch:
    """Return sequences of documents with access codes and questions, cut or padded (IGNORED) to `length`."""
    ids = torch.zeros((size, length), dtype=torch.long)
    kinds = torch.zeros((size, length), dtype=torch.long)
    for row in range(size):
        codes_sequence(rng, writer, length, rng.randint(max(facts // 4, 1), facts), questions)
        n = min(len(writer.ids), length)
        ids[row, :n] = torch.tensor(writer.ids[:n])
        kinds[row, :n] = torch.tensor(writer.kinds[:n])
    return Batch(ids, kinds)
