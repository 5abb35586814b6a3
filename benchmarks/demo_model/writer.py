"""Writes training sequences: documents out of statements and filler, with questions and answers behind them."""

import functools
import random
import re
from collections.abc import Sequence

from tokenizer import GENERATION_PROMPT
from transformers import PreTrainedTokenizerFast

from kvcli.quality.tasks.phrases import NAMES, SLOTS, sentence

IGNORED, FILLER, ANSWER, VALUE = 0, 1, 2, 3
"""What a token is to the loss. A VALUE is copied from document or question; ANSWER is the words around it."""

FIRST_ORDINARY_ID = 3  # after unk, bos and eos

_POOL = 2000  # sentences of plain filler, and half as many passages, drawn once
_ABOUT_NAMES = (
    "{name} {verb} the {place} in the {time}.",
    "{name} the {person} {motion} {adverb} to the {place}.",
    "The {person} from the {place} was {name}.",
    "In {season} {name} {trade} {goods} near the {place}.",
    "{name} lost a {adjective} {thing} on the road to the {place}.",
)


def passage(rng: random.Random) -> list[str]:
    """Return a few sentences with local structure: they are about the same people, places and things.

    What a sentence says can be predicted from those shortly before it, so reading it teaches to attend to the words
    nearby that carry information.
    """
    slots = {name: rng.sample(words, min(2, len(words))) for name, words in SLOTS.items()}
    names = rng.sample(NAMES, 2)
    found = []
    for _ in range(rng.randint(3, 7)):
        if rng.random() < 0.6:
            template = rng.choice(_ABOUT_NAMES).replace("{name}", rng.choice(names))
            found.append(re.sub(r"\{(\w+)\}", lambda slot: rng.choice(slots[slot.group(1)]), template))
        else:
            found.append(sentence(rng, slots))
    return found


class Writer:
    """Builds one training sequence after another out of pieces of text that tokenise independently of each other."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._backend = tokenizer.backend_tokenizer
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._groups = set(range(FIRST_ORDINARY_ID + 256, FIRST_ORDINARY_ID + 256 + 1000))
        self._cached = functools.lru_cache(200_000)(self._encode)
        rng = random.Random("pool:0")
        self._plain = [[sentence(rng)] for _ in range(_POOL)]
        self._passages = [passage(rng) for _ in range(_POOL // 2)]
        self.ids: list[int] = []
        self.kinds: list[int] = []
        self.tags: list[str] = []  # of every VALUE, in order: what it belongs to

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text`, without bos."""
        return self._cached(text)

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`, without bos."""
        return len(self._cached(text))

    def filler(self, rng: random.Random, tokens: int) -> list[list[str]]:
        """Return groups of sentences of at most `tokens` tokens together: plain ones, or passages of several."""
        found: list[list[str]] = []
        share = rng.choice((0.0, 0.5, 1.0))  # of what is drawn, passages
        while True:
            group = rng.choice(self._passages if rng.random() < share else self._plain)
            tokens -= sum(self.count(" " + text) for text in group)
            if tokens < 0:
                return found
            found.append(group)

    def start(self, sentences: Sequence[str], restated: frozenset[int] = frozenset(), kind: int = FILLER) -> None:
        """Begin a new sequence with bos and the document; its numbers are of `kind` IGNORED, being random.

        Args:
            sentences: of the document, in order.
            restated: indices of sentences whose numbers stood in an earlier one; they are VALUEs.
            kind: of all other tokens.
        """
        self.ids, self.kinds, self.tags = [self._bos], [IGNORED], []
        for index, text in enumerate(sentences):
            ids = self.encode(text if index == 0 else " " + text)
            number = VALUE if index in restated else IGNORED
            self.tags += ["restated"] * (sum(i in self._groups for i in ids) if index in restated else 0)
            self.ids += ids
            self.kinds += [number if i in self._groups else kind for i in ids]

    def ask(self, question: str, answer: str, values: Sequence[str], tag: str) -> None:
        """Append a question and its answer. Of the answer, tokens of `values` are VALUE, the others ANSWER."""
        prompt = self.encode("\n\n" + question + GENERATION_PROMPT)
        self.ids += prompt
        self.kinds += [IGNORED] * len(prompt)
        wanted = {i for value in values for i in self.encode(value)}
        ids = self.encode(" " + answer)
        self.ids += [*ids, self._eos]
        kinds = [*(VALUE if i in wanted else ANSWER for i in ids), ANSWER]
        self.tags += [tag] * kinds.count(VALUE)
        self.kinds += kinds

    def cost(self, question: str, answer: str) -> int:
        """Return the tokens that `ask` would append."""
        return self.count("\n\n" + question + GENERATION_PROMPT) + self.count(" " + answer) + 1
