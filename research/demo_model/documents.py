"""Training sequences: documents out of statements and filler, each with as many questions behind it as have room."""

import functools
import random
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from tokenizer import GENERATION_PROMPT
from transformers import PreTrainedTokenizerFast

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.needles import chain_statements, near_pairs, random_value, record
from kvcli.quality.tasks.phrases import NAMES, SLOTS, sentence
from kvcli.quality.tasks.rows import Draft, RowRequest
from kvcli.quality.tasks.words import common_words, frequent_words, occurrences

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


T = TypeVar("T")

Asked = tuple[str, str, Sequence[str], str]
"""Question, answer, the strings in it to find, and what it counts as in the log."""

_AT_ONCE = 0.2  # share of the usual questions whose answer begins with the value; the others' begins with a sentence
_ALL_AT_ONCE = 0.15  # share of the documents about which nothing but single codes is asked, all at once
_RESTATED = 0.3  # share of the facts that the document says again shortly after
_HOPS = 4
_NEAR = 4  # pairs that share a name


class Facts:
    """What a document says: single facts, names with several values, near-duplicate pairs, and chains of variables."""

    def __init__(
        self, rng: random.Random, count: int, at_once: bool = False, any_order: bool = False, once: bool = False
    ):
        self._rng, self._at_once, self._any_order, self._once = rng, at_once, any_order, once
        self._told_of: set[str | int] = set()  # names with several values, and chains
        self._names = rng.sample(NAMES, len(NAMES))
        self.statements: list[list[str]] = []  # groups whose order is kept
        self.codes: dict[str, str] = {}
        self.several: dict[str, list[str]] = {}
        self.chains: list[list[str]] = []  # names, the one that holds the number first
        self.numbers: list[str] = []  # of the chains
        self.links: list[tuple[str, str]] = []  # a variable whose value is the name of a single fact
        makers = [self._single, self._single, self._many, *rng.sample([self._pairs, self._chain, self._link], 2)]
        weights = [rng.random() for _ in makers]
        while len(self.statements) < count and len(self._names) > 2 * _HOPS:
            rng.choices(makers, weights)[0]()
        if not self.codes:
            self._single()

    def _state(self, name: str, value: str) -> str:
        return self._rng.choice(phrases.CODE_FACTS).format(name=name, value=value)

    def _code(self, name: str) -> None:
        self.codes[name] = random_value(self._rng)
        self.statements.append([self._state(name, self.codes[name])])

    def _single(self) -> None:
        self._code(self._names.pop())

    def _many(self) -> None:
        name, values = self._names.pop(), [random_value(self._rng) for _ in range(self._rng.randint(2, 5))]
        self.several[name] = values
        self.statements.append([self._state(name, value) for value in values])

    def _pairs(self) -> None:
        first, second, *others = (self._names.pop() for _ in range(1 + _NEAR))
        for name in (f"{first} {second}", *near_pairs(first, second, others)):
            self._code(name)

    def _chain(self) -> None:
        members = [self._names.pop() for _ in range(_HOPS + 1)]
        self.chains.append(members)
        self.numbers.append(random_value(self._rng))
        self.statements.append(chain_statements(self.numbers[-1], members))

    def _link(self) -> None:
        variable, name = self._names.pop(), self._names.pop()
        self._code(name)
        self.links.append((variable, name))
        self.statements.append([phrases.VARIABLE_VALUE.format(name=variable, value=name)])

    def ask(self, most: int) -> Asked:
        """Return a question; those for several names ask for `most` of them at most."""
        rng = self._rng
        if self._at_once:
            return self._ask_code_at_once(rng.choice(list(self.codes)), phrases.DIRECT_QUESTION, "direct")
        kinds = [(self._ask_code, 1.5)]
        kinds += [(self._ask_values, 5.0)] * bool(self._left(list(self.several)))
        kinds += [(self._ask_chain, 1.0)] * bool(self._left(list(range(len(self.chains)))))
        kinds += [(self._ask_names, 2.0)] * (len(self._alone()) >= 2) + [(self._ask_late, 1.0)] * bool(self.links)
        chosen = rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
        return chosen(min(most, len(self._alone())))

    def _left(self, of: list[T]) -> list[T]:
        """Return what may still be asked for of names with several values, or of chains."""
        return [one for one in of if not (self._once and one in self._told_of)]

    def _alone(self) -> list[str]:
        return [name for name in self.codes if " " not in name]

    def _told(self, names: Sequence[str], form: str = phrases.SEVERAL_ANSWER) -> tuple[str, list[str]]:
        text = " ".join(form.format(name=name, value=self.codes[name]) for name in names)
        return text, [*(self.codes[name] for name in names), *(" " + name for name in names)]

    def _ask_code(self, most: int) -> Asked:
        del most
        name = self._rng.choice(list(self.codes))
        answer, wanted = self._told([name], phrases.CODE_ANSWER)
        question, way = self._rng.choice(phrases.CODE_QUESTIONS), self._rng.random()
        if way < _AT_ONCE:
            return self._ask_code_at_once(name, question, "mixed")
        if way < 2 * _AT_ONCE:
            return self._ask_code_at_once(name, phrases.DIRECT_QUESTION, "direct")
        return question.format(name=name), answer, wanted, "pair" if " " in name else "code"

    def _ask_code_at_once(self, name: str, question: str, tag: str) -> Asked:
        value = self.codes[name]
        return question.format(name=name), phrases.DIRECT_ANSWER.format(value=value), [value], tag

    def _ask_names(self, most: int) -> Asked:
        names = self._rng.sample(self._alone(), self._rng.randint(2, max(most, 2)))
        answer, wanted = self._told(names)
        return phrases.NAMES_QUESTION.format(names=phrases.listing(names)), answer, wanted, "names"

    def _ask_values(self, most: int) -> Asked:
        del most
        name = self._rng.choice(self._left(list(self.several)))
        self._told_of.add(name)
        values = self.several[name]
        if self._any_order:
            values = self._rng.sample(values, len(values))
        answer = " ".join(phrases.SEVERAL_ANSWER.format(name=name, value=value) for value in values)
        return phrases.VALUES_QUESTION.format(name=name), answer, values, "values"

    def _ask_chain(self, most: int) -> Asked:
        del most
        chain = self._rng.choice(self._left(list(range(len(self.chains)))))
        self._told_of.add(chain)
        names = self.chains[chain][: self._rng.randint(2, _HOPS + 1)]
        answer = " ".join(reversed(chain_statements(self.numbers[chain], names)))
        question = phrases.VARIABLE_QUESTION.format(name=names[-1])
        return question, answer, [*(" " + name for name in names), self.numbers[chain]], "chain"

    def _ask_late(self, most: int) -> Asked:
        variable, late = self._rng.choice(self.links)
        names = self._rng.sample([name for name in self._alone() if name != late] or [late], max(min(most, 12) - 1, 1))
        told, wanted = self._told(names)
        last, _ = self._told([late])
        question = phrases.LATE_QUESTION.format(names=phrases.listing(names), variable=variable)
        link = phrases.VARIABLE_VALUE.format(name=variable, value=late)
        wanted = [*wanted, " " + late, " " + variable, self.codes[late]]
        return question, f"{told} {link} {last}", wanted, "late"


def _fitting(rng: random.Random, writer: Writer, room: int, *, at_once: bool, any_order: bool, once: bool) -> Facts:
    """Return facts that fill between a tenth and all of `room` tokens, some of them being said again."""
    count = max(int(room / (14 * 12 ** rng.random())), 1)
    while True:
        said = Facts(rng, count, at_once, any_order, once)
        if count == 1 or 1.2 * sum(writer.count(" " + text) for group in said.statements for text in group) < room:
            return said
        count = max(count * 3 // 4, 1)


def facts(rng: random.Random, writer: Writer, length: int, *, any_order: bool = False, once: bool = False) -> None:
    """Facts of all kinds in filler, with questions of all kinds.

    Several values of a name are answered in the order of the document, or in any: which one comes next is then left to
    chance, and what can be learnt is to say each of them once. With `once`, no earlier answer tells them either.
    """
    share = rng.uniform(0.3, 0.6) if length <= 1024 else rng.uniform(0.1, 0.35)
    room = int(length * (1 - share))
    said = _fitting(rng, writer, room, at_once=rng.random() < _ALL_AT_ONCE, any_order=any_order, once=once)
    placed: list[tuple[float, str, bool]] = []
    for group in said.statements:
        for place, text in zip(sorted(rng.random() for _ in group), group, strict=True):
            placed.append((place, text, False))
            if "access code" in text and rng.random() < _RESTATED:
                placed.append((place + 40 * rng.random() / length, text, True))
    left = room - sum(writer.count(" " + text) for _, text, _ in placed)
    for sentences in writer.filler(rng, left):
        place = rng.random()
        placed += [(place + index * 1e-6, text, False) for index, text in enumerate(sentences)]
    placed.sort(key=lambda item: item[0])
    writer.start([text for _, text, _ in placed], frozenset(i for i, item in enumerate(placed) if item[2]))
    most = max(int(length * share / 12), 2)  # names whose question and answer fit
    if rng.random() < 0.8:
        most = min(rng.choice((2, 4, 6, 6)), most)
    while len(writer.ids) < length:
        writer.ask(*said.ask(most))


def _ask_draft(writer: Writer, draft: Draft, wanted: Sequence[str], tag: str, kind: int) -> None:
    writer.start([draft.document], kind=kind)
    writer.ask(draft.question, draft.answer, wanted, tag)


def lists(rng: random.Random, writer: Writer, length: int) -> None:
    """Lists of words: frequent ones, common ones, and how often one of them occurs."""
    task = rng.choices((frequent_words, common_words, occurrences), (0.6, 0.15 * (length > 700), 0.25))[0]
    if task is frequent_words:
        _frequent(rng, writer, length)
    elif task is common_words:
        draft = common_words(RowRequest(rng, length - 40, writer.count, depth=None))
        _ask_draft(writer, draft, [" " + word for word in draft.outputs], "common", IGNORED)
    else:
        _count(rng, writer, length)


def _frequent(rng: random.Random, writer: Writer, length: int) -> None:
    """A list whose three most frequent words are asked for."""
    request = RowRequest(rng, length - 24, writer.count, depth=None)
    draft = frequent_words(request, distinct=min(max(length // 12, 5), 40))
    writer.start([draft.document])
    writer.ask(draft.question, draft.answer, [" " + name for name in draft.outputs], "frequent")


def _count(rng: random.Random, writer: Writer, length: int) -> None:
    """A list in which every word's number of occurrences is asked for."""
    names = rng.sample(NAMES, min(max(length // 10, 6), 40))
    counts = {name: rng.randint(1, 9) for name in names[: min(max(length // 40, 3), 12)]}
    asked = [
        (phrases.COUNTING_QUESTION.format(name=n), phrases.COUNTING_ANSWER.format(name=n, count=c))
        for n, c in counts.items()
    ]
    words = [name for name, count in counts.items() for _ in range(count)]
    left = length - sum(writer.cost(*item) for item in asked) - len(words) - 8
    words += [rng.choice(names[len(counts) :]) for _ in range(max(left, 0))]
    rng.shuffle(words)
    writer.start([f"{phrases.WORDS_HEADING} {' '.join(words)}"], kind=IGNORED)
    for (question, answer), (name, count) in zip(asked, counts.items(), strict=True):
        writer.ask(question, answer, [f" occurs {count}"[-1], " " + name], "count")


def json_records(rng: random.Random, writer: Writer, length: int) -> None:
    """Records in filler, to be turned into JSON."""
    most = min(max((length - 40) // 24, 1), 48)
    drawn = [record(rng, number) for number in range(1, rng.randint(max(most // 3, 1), most) + 1)]
    answer = f"[{', '.join(text for _, text in drawn)}]"
    left = (
        length - 1 - writer.cost(phrases.RECORDS_QUESTION, answer) - sum(writer.count(" " + text) for text, _ in drawn)
    )
    placed = [(rng.random(), sentence) for group in writer.filler(rng, max(left, 0)) for sentence in group]
    placed += zip(sorted(rng.random() for _ in drawn), (text for text, _ in drawn), strict=True)
    writer.start([text for _, text in sorted(placed)])
    numbers = [part for _, text in drawn for part in text.split('"') if part.isdigit()]
    writer.ask(phrases.RECORDS_QUESTION, answer, numbers, "json")


KINDS: dict[str, Callable[[random.Random, Writer, int], None]] = {
    "facts": facts,
    "facts in any order": functools.partial(facts, any_order=True),
    "facts asked once": functools.partial(facts, any_order=True, once=True),
    "frequent words": _frequent,
    "lists": lists,
    "records": json_records,
}
