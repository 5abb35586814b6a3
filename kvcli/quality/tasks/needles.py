"""Needles in a haystack: facts about names, hidden in filler, in sentences that repeat, or among nothing but facts.

After RULER (arXiv 2404.06654, section 3.1 and appendix B). A fact is "The access code of Amber is 482913057.": nine
random digits under a name that occurs in no other fact, unless the task says so. `niah_single_1` hides one fact in five
sentences that repeat; `niah_multikey_2` and `niah_multikey_3` are facts from beginning to end, one of which is asked
for, the latter with UUIDs for names and values.
"""

import random
import uuid
from collections.abc import Callable, Sequence
from itertools import cycle

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.rows import Draft, RowRequest, require
from kvcli.quality.tasks.text import NAMES, sentence

NOISE: tuple[str, ...] = tuple(sentence(random.Random(f"noise/{index}")) for index in range(5))
"""The sentences that repeat."""


def random_value(rng: random.Random) -> str:
    """Return nine digits, each group of three uniform over 000..999."""
    return f"{rng.randrange(10**9):09d}"


def single(request: RowRequest) -> Draft:
    """One fact in filler."""
    return multikey(request, keys=1)


def multikey(request: RowRequest, keys: int | None = None, spacing: int = 80) -> Draft:
    """Facts about `keys` names, by default one fact every `spacing` tokens; one of them is asked for."""
    keys = min(max(request.length // spacing, 2), len(NAMES)) if keys is None else keys
    return _ask_first(request, named_facts(request.rng, keys))


def multiquery(request: RowRequest, queries: int = 4, spacing: int = 160) -> Draft:
    """Facts about many names, `queries` of which are asked for at once."""
    _require_names(queries)
    rng = request.rng
    facts = named_facts(rng, min(max(request.length // spacing, queries), len(NAMES)))
    asked = facts[:queries]
    question = phrases.NAMES_QUESTION.format(names=phrases.listing([name for name, _ in asked]))
    answer = " ".join(phrases.SEVERAL_ANSWER.format(name=name, value=value) for name, value in asked)
    depths = [request.drawn_depth(), *(rng.random() for _ in range(queries - 1))]
    return hidden_facts(request, facts, depths, question, answer)


def multivalue(request: RowRequest, values: int = 4, spacing: int = 160) -> Draft:
    """Several facts about one name among facts about others; all values of the name are asked for.

    The expected values stand in the order of the document.
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
    """One fact among sentences that repeat."""
    fact = request.rng.choice(NAMES), random_value(request.rng)
    return _ask_first(request, [fact], cycle(NOISE).__next__)


def needles_only(request: RowRequest) -> Draft:
    """Facts about pairs of names from beginning to end, one of which is asked for."""
    rng = request.rng
    return _among_needles(request, lambda: " ".join(rng.sample(NAMES, 2)), lambda: random_value(rng))


def uuids_only(request: RowRequest) -> Draft:
    """The same with a random UUID for every name and every value."""

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
    """Hide `facts` (name, value) and `extra` sentences; the asked facts stand first in the list, with a depth each."""
    statements = [*(_stated(request.rng, fact) for fact in facts), *extra]
    asked = len(asked_depths)
    depths = [*asked_depths, *(request.rng.random() for _ in statements[asked:])]
    document, depth = request.hide(statements, depths, question, filler)
    return Draft(document, question, answer, tuple(value for _, value in facts[:asked]), depth)


def _stated(rng: random.Random, fact: tuple[str, str]) -> str:
    return rng.choice(phrases.CODE_FACTS).format(name=fact[0], value=fact[1])


def named_facts(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Return `count` names, all different, with a value each."""
    _require_names(count)
    return list(zip(rng.sample(NAMES, count), random_values(rng, count), strict=True))


def random_values(rng: random.Random, count: int) -> list[str]:
    """Return `count` values, all different."""
    values: dict[str, None] = {}
    while len(values) < count:
        values[random_value(rng)] = None
    return list(values)


def _require_names(count: int) -> None:
    require(1 <= count <= len(NAMES), f"{count} names are asked for", f"there are {len(NAMES)} of them")
