"""Needles in a haystack: facts about names, hidden in filler, in repeating sentences, or among other facts only.

After RULER (arXiv 2404.06654, section 3.1 and appendix B). A fact is "The access code of Amber is 482913057.": nine
random digits under a name that occurs in no other fact, unless the task says so. `niah_single_1` hides one fact in five
repeating sentences; `niah_multikey_2` and `niah_multikey_3` are facts from beginning to end, one of which is asked for,
the latter with UUIDs for names and values. Chains of variables (`vt`, section 3.2) and records are hidden likewise.
"""

import random
import uuid
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.phrases import NAMES, SLOTS, sentence
from kvcli.quality.tasks.rows import Draft, RowRequest, require

NOISE: tuple[str, ...] = tuple(sentence(random.Random(f"noise/{index}")) for index in range(5))
"""The repeating sentences."""
TURNS = 4
_MOST_RECORDS = 48  # unless the caller says otherwise


def random_value(rng: random.Random) -> str:
    """Return nine digits, each group of three uniform over 000..999."""
    return f"{rng.randrange(10**9):09d}"


def single(request: RowRequest) -> Draft:
    """Hide one fact in filler."""
    return multikey(request, keys=1)


def multikey(request: RowRequest, keys: int | None = None, spacing: int = 80) -> Draft:
    """Hide facts about `keys` names, by default one fact every `spacing` tokens; one of them is asked for."""
    keys = min(max(request.length // spacing, 2), len(NAMES)) if keys is None else keys
    return _ask_first(request, named_facts(request.rng, keys))


def multiquery(request: RowRequest, queries: int = 4, spacing: int = 160) -> Draft:
    """Hide facts about many names, `queries` of which are asked for at once."""
    _require_names(queries)
    rng = request.rng
    facts = named_facts(rng, min(max(request.length // spacing, queries), len(NAMES)))
    asked = facts[:queries]
    question = phrases.NAMES_QUESTION.format(names=phrases.listing([name for name, _ in asked]))
    answer = " ".join(phrases.SEVERAL_ANSWER.format(name=name, value=value) for name, value in asked)
    depths = [request.drawn_depth(), *(rng.random() for _ in range(queries - 1))]
    return hidden_facts(request, facts, depths, question, answer)


def multivalue(request: RowRequest, values: int = 4, spacing: int = 160) -> Draft:
    """Hide several facts about one name among facts about others; all values of the name are asked for.

    The expected values are in the order of the document.
    """
    rng, others = request.rng, min(request.length // spacing, len(NAMES) - 1)
    require(values >= 1, f"{values} values cannot be asked for", "ask for at least one")
    start = request.drawn_depth()
    depths = [start, *sorted(rng.uniform(start, 1.0) for _ in range(values - 1))]
    name, *rest = rng.sample(NAMES, others + 1)
    drawn = random_values(rng, values + others)
    facts = list(zip([name] * values + rest, drawn, strict=True))
    question = phrases.VALUES_QUESTION.format(name=name)
    answer = " ".join(phrases.SEVERAL_ANSWER.format(name=name, value=value) for value in drawn[:values])
    return hidden_facts(request, facts, depths, question, answer)


def noise(request: RowRequest) -> Draft:
    """Hide one fact among repeating sentences."""
    fact = request.rng.choice(NAMES), random_value(request.rng)
    return _ask_first(request, [fact], cycle(NOISE).__next__)


def needles_only(request: RowRequest) -> Draft:
    """Make a document of facts about pairs of names only, one of which is asked for."""
    rng = request.rng
    return _among_needles(request, lambda: " ".join(rng.sample(NAMES, 2)), lambda: random_value(rng))


def uuids_only(request: RowRequest) -> Draft:
    """Make a document as `needles_only` does, with UUIDs for names and values."""

    def drawn() -> str:
        return str(uuid.UUID(int=request.rng.getrandbits(128), version=4))

    return _among_needles(request, drawn, drawn)


def _among_needles(request: RowRequest, draw_name: Callable[[], str], draw_value: Callable[[], str]) -> Draft:
    used: set[str] = set()

    def fact() -> tuple[str, str]:
        while True:
            name, value = draw_name(), draw_value()
            if not used & {name, value}:
                used.update((name, value))
                return name, value

    return _ask_first(request, [fact()], lambda: _stated(request.rng, fact()))


def _ask_first(request: RowRequest, facts: Sequence[tuple[str, str]], filler: Callable[[], str] | None = None) -> Draft:
    """Hide `facts` (name, value), the first of which is asked for."""
    name, value = facts[0]
    question = request.rng.choice(phrases.CODE_QUESTIONS).format(name=name)
    answer = phrases.CODE_ANSWER.format(name=name, value=value)
    return hidden_facts(request, facts, [request.drawn_depth()], question, answer, filler)


def hidden_facts(
    request: RowRequest,
    facts: Sequence[tuple[str, str]],
    asked_depths: Sequence[float],
    question: str,
    answer: str,
    filler: Callable[[], str] | None = None,
    extra: Sequence[str] = (),
) -> Draft:
    """Hide `facts` (name, value) and `extra` sentences; the facts asked for come first, with a depth each."""
    statements = [*(_stated(request.rng, fact) for fact in facts), *extra]
    asked = len(asked_depths)
    depths = [*asked_depths, *(request.rng.random() for _ in statements[asked:])]
    document, depth = request.hide(statements, depths, question, filler)
    return Draft(document, question, answer, tuple(value for _, value in facts[:asked]), depth)


def _stated(rng: random.Random, fact: tuple[str, str]) -> str:
    return rng.choice(phrases.CODE_FACTS).format(name=fact[0], value=fact[1])


def named_facts(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Return `count` different names, with a value each."""
    _require_names(count)
    return list(zip(rng.sample(NAMES, count), random_values(rng, count), strict=True))


def random_values(rng: random.Random, count: int) -> list[str]:
    """Return `count` different values."""
    values: dict[str, None] = {}
    while len(values) < count:
        values[random_value(rng)] = None
    return list(values)


def _require_names(count: int) -> None:
    require(1 <= count <= len(NAMES), f"{count} names are asked for", f"there are {len(NAMES)} of them")


def near_pairs(first: str, second: str, others: list[str]) -> list[str]:
    """Return pairs that share one name with "first second", the other one being replaced by one of `others`."""
    return [f"{first} {other}" if index % 2 else f"{other} {second}" for index, other in enumerate(others)]


def near_duplicates(request: RowRequest, spacing: int = 80) -> Draft:
    """Hide a fact about a pair of names every `spacing` tokens; all others share one name with the pair asked for.

    Methods that rank pages or clusters by coarse summaries find all of them alike.
    """
    require(spacing >= 1, f"a spacing of {spacing} tokens", "ask for at least one")
    count = min(max(request.length // spacing, 2), len(NAMES) - 1)
    first, second, *others = request.rng.sample(NAMES, count + 1)
    names = [f"{first} {second}", *near_pairs(first, second, others)]
    return _ask_first(request, list(zip(names, random_values(request.rng, len(names)), strict=True)))


def direct(request: RowRequest) -> Draft:
    """Hide one fact in filler; the answer is the code alone, so that its first token already needs it."""
    name, value = request.rng.choice(NAMES), random_value(request.rng)
    question, answer = phrases.DIRECT_QUESTION.format(name=name), phrases.DIRECT_ANSWER.format(value=value)
    return hidden_facts(request, [(name, value)], [request.drawn_depth()], question, answer)


def long_lookup(request: RowRequest, queries: int = 280) -> Draft:
    """Hide facts about `queries` names and no others, all of them asked for; fewer if the length does not allow it.

    With the default of 280 the answer has some 1,700 tokens, and what each needs is known only when it is due: methods
    that choose once, at the end of the prompt, cannot know it.
    """
    longest = max(NAMES, key=lambda name: request.count_tokens(f" {name}"))
    stated = phrases.CODE_FACTS[-1].format(name=longest, value="000000000")
    left = request.beside(phrases.NAMES_QUESTION)
    each = request.count_tokens(f" {stated}") + request.count_tokens(f", {longest}")
    return multiquery(request, queries=max(min(queries, left // each), 1), spacing=max(request.length, 1))


def late_needle(request: RowRequest, queries: int = 12, spacing: int = 160) -> Draft:
    """Ask for `queries` codes, and then for that of a name which only the document gives; the last one is scored.

    Neither that name nor its code occurs in the question.
    """
    require(0 < queries < len(NAMES) - 1, f"{queries} names", f"choose between 1 and {len(NAMES) - 2}")
    count = min(max(request.length // spacing, queries + 1), len(NAMES) - 1)
    facts = named_facts(request.rng, count)
    variable = request.rng.choice(sorted(set(NAMES) - {name for name, _ in facts}))
    late, *rest = facts
    asked = rest[:queries]
    link = phrases.VARIABLE_VALUE.format(name=variable, value=late[0])
    names = phrases.listing([name for name, _ in asked])
    question = phrases.LATE_QUESTION.format(names=names, variable=variable)
    told = [phrases.SEVERAL_ANSWER.format(name=name, value=value) for name, value in (*asked, late)]
    answer = " ".join([*told[:-1], link, told[-1]])
    return hidden_facts(request, facts, [request.drawn_depth()], question, answer, extra=[link])


def conversation(request: RowRequest, turns: int = TURNS, spacing: int = 160) -> Draft:
    """Hide a fact every `spacing` tokens and ask `turns` questions in turn; the depth is that of the last fact.

    Only the last answer is scored: it needs what a method dropped because the first question did not. The right answers
    in between are given, so that the turns differ only in what was read.
    """
    require(1 <= turns <= len(NAMES), f"{turns} turns", f"choose between 1 and {len(NAMES)}")
    facts = named_facts(request.rng, min(max(request.length // spacing, turns), len(NAMES)))
    asked = [request.rng.choice(phrases.CODE_QUESTIONS).format(name=name) for name, _ in facts[:turns]]
    told = [phrases.CODE_ANSWER.format(name=name, value=value) for name, value in facts[:turns]]
    longest = max(asked, key=request.count_tokens)  # the length is measured with this one, whichever comes first
    draft = hidden_facts(request, facts, [request.drawn_depth()], longest, told[0])
    earlier = tuple(zip(asked[1:], told[1:], strict=True))
    values = tuple((value,) for _, value in facts[1:turns])
    return Draft(draft.document, asked[0], told[0], (facts[0][1],), draft.depth, earlier, values)


def chain_statements(value: str, names: list[str]) -> list[str]:
    """Return the sentences that give `value` to the first of `names` and each name's value to the next."""
    pairs = [(names[0], value), *((name, source) for source, name in pairwise(names))]
    return [phrases.VARIABLE_VALUE.format(name=name, value=held) for name, held in pairs]


def variable_tracking(request: RowRequest, chains: int = 2, hops: int = 4) -> Draft:
    """Hide `chains` chains of `hops` copies each; the value of the first chain's last variable is asked for.

    "The value of Amber is 482913057." ... "The value of Bruno is Amber." ... "What is the value of Bruno?" RULER gives
    the number and asks for every variable; here the question gives the last variable, and the expected strings are the
    variables on the way and the number, as the answer reaches them. The depth is that of the first chain's number.
    """
    require(chains >= 1 and hops >= 0, f"{chains} chains of {hops} hops", "ask for at least one chain")
    needed, rng = chains * (hops + 1), request.rng
    require(needed <= len(NAMES), f"{needed} variables are asked for", f"there are {len(NAMES)} of them")
    names = rng.sample(NAMES, needed)
    values = [random_value(rng) for _ in range(chains)]
    statements: list[str] = []
    depths: list[float] = []
    for chain, value in enumerate(values):
        statements += chain_statements(value, names[chain * (hops + 1) : (chain + 1) * (hops + 1)])
        start = request.drawn_depth(0.5) if chain == 0 else rng.random() / 2
        depths += [start, *sorted(rng.uniform(start, 1.0) for _ in range(hops))]
    question = phrases.VARIABLE_QUESTION.format(name=names[hops])
    document, depth = request.hide(statements, depths, question)
    answer = " ".join(reversed(statements[: hops + 1]))
    return Draft(document, question, answer, (*reversed(names[:hops]), values[0]), depth)


def record(rng: random.Random, number: int) -> tuple[str, str]:
    """Return a record and its JSON object."""
    fields = {
        "number": f"{number:03d}",
        "name": rng.choice(NAMES),
        "person": rng.choice(SLOTS["person"]),
        "code": random_value(rng),
        "price": f"{rng.randrange(1000):03d}",
    }
    return phrases.RECORD.format(**fields), phrases.RECORD_OBJECT.format(**fields)


def records_to_json(request: RowRequest, records: int | None = None) -> Draft:
    """Hide `records` records in filler, by default as many as fill half of the length, at most 48; all are asked for.

    They are in the order of their numbers. Every fact matters, so none can be left out: such tasks are reported to
    break low-rank and landmark methods. A record counts if its whole JSON object is right.
    """
    request.refuse_depth()
    rng = request.rng
    longest = max(request.count_tokens(f" {record(random.Random(seed), 1)[0]}") for seed in range(20))
    count = min(max(request.length // (2 * longest), 1), _MOST_RECORDS) if records is None else records
    require(1 <= count <= 999, f"{count} records", "choose between 1 and 999")
    drawn = [record(rng, number) for number in range(1, count + 1)]
    depths = sorted(rng.random() for _ in drawn)
    document, _ = request.hide([stated for stated, _ in drawn], depths, phrases.RECORDS_QUESTION)
    objects = tuple(stated for _, stated in drawn)
    return Draft(document, phrases.RECORDS_QUESTION, f"[{', '.join(objects)}]", objects, None)
