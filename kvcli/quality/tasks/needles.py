"""Needles in a haystack: facts about names hidden in filler (RULER, arXiv 2404.06654, section 3.1).

A fact is "The access code of Amber is 482913057.": nine random digits under a name that occurs in no other fact,
unless the task says so.
"""

import random
from collections.abc import Callable

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.rows import SEPARATOR, CountTokens, Draft, place, require, require_depth
from kvcli.quality.tasks.text import NAMES, sentences


def random_value(rng: random.Random) -> str:
    """Return nine digits, each group of three uniform over 000..999."""
    return f"{rng.randrange(10**9):09d}"


def _distinct_values(rng: random.Random, count: int) -> list[str]:
    values: dict[str, None] = {}
    while len(values) < count:
        values[random_value(rng)] = None
    return list(values)


def hide(
    rng: random.Random,
    facts: list[tuple[str, str]],
    asked_depths: list[float],
    question: str,
    answer: str,
    *,
    length: int,
    count_tokens: CountTokens,
    filler: Callable[[int], list[str]] | None = None,
) -> Draft:
    """Hide `facts` (name, value) in filler: the asked ones stand first in the list and have a depth each.

    `filler` makes sentences of at most so many tokens together; by default they are the grammar's.
    """
    statements = [rng.choice(phrases.CODE_FACTS).format(name=name, value=value) for name, value in facts]
    asked = len(asked_depths)
    depths = asked_depths + [rng.random() for _ in facts[asked:]]
    fixed = sum(count_tokens(" " + statement) for statement in statements) + count_tokens(SEPARATOR + question)
    require(
        fixed <= length,
        f"a length of {length} tokens is too short: the facts and the question alone take {fixed}",
        "ask for a longer text or for fewer facts",
    )
    left = length - fixed
    document, got = place(
        statements, depths, filler(left) if filler is not None else sentences(rng, left, count_tokens), count_tokens
    )
    outputs = tuple(value for _, value in facts[:asked])
    return Draft(document, question, answer, outputs, got[0])


def drawn_depth(rng: random.Random, depth: float | None) -> float:
    """Return `depth`, which has to be within 0..1, or one at random."""
    require_depth(depth)
    return rng.random() if depth is None else depth


def single(rng: random.Random, *, length: int, count_tokens: CountTokens, depth: float | None) -> Draft:
    """One fact in filler."""
    return multikey(rng, length=length, count_tokens=count_tokens, depth=depth, keys=1)


def multikey(
    rng: random.Random,
    *,
    length: int,
    count_tokens: CountTokens,
    depth: float | None,
    keys: int | None = None,
    spacing: int = 80,
) -> Draft:
    """Facts about `keys` names, by default one fact every `spacing` tokens; one of them is asked for."""
    keys = min(max(length // spacing, 2), len(NAMES)) if keys is None else keys
    _require_names(keys)
    facts = list(zip(rng.sample(NAMES, keys), _distinct_values(rng, keys), strict=True))
    name, value = facts[0]
    question = rng.choice(phrases.CODE_QUESTIONS).format(name=name)
    answer = phrases.CODE_ANSWER.format(name=name, value=value)
    return hide(rng, facts, [drawn_depth(rng, depth)], question, answer, length=length, count_tokens=count_tokens)


def multiquery(
    rng: random.Random,
    *,
    length: int,
    count_tokens: CountTokens,
    depth: float | None,
    queries: int = 4,
    spacing: int = 160,
) -> Draft:
    """Facts about many names, `queries` of which are asked for at once."""
    keys = min(max(length // spacing, queries), len(NAMES))
    _require_names(queries)
    facts = list(zip(rng.sample(NAMES, keys), _distinct_values(rng, keys), strict=True))
    asked = facts[:queries]
    question = phrases.NAMES_QUESTION.format(names=phrases.listing([name for name, _ in asked]))
    answer = " ".join(phrases.CODE_ANSWER.format(name=name, value=value) for name, value in asked)
    depths = [drawn_depth(rng, depth), *(rng.random() for _ in range(queries - 1))]
    return hide(rng, facts, depths, question, answer, length=length, count_tokens=count_tokens)


def multivalue(
    rng: random.Random,
    *,
    length: int,
    count_tokens: CountTokens,
    depth: float | None,
    values: int = 4,
    spacing: int = 160,
) -> Draft:
    """Several facts about one name among facts about others; all values of the name are asked for.

    The expected values stand in the order of the document.
    """
    others = min(length // spacing, len(NAMES) - 1)
    require(values >= 1, f"{values} values cannot be asked for", "ask for at least one")
    require_depth(depth)
    start = rng.random() if depth is None else depth
    depths = [start, *sorted(rng.uniform(start, 1.0) for _ in range(values - 1))]
    name, *rest = rng.sample(NAMES, others + 1)
    drawn = _distinct_values(rng, values + others)
    facts = [(owner, drawn[i]) for i, owner in enumerate([name] * values + rest)]
    question = phrases.VALUES_QUESTION.format(name=name)
    answer = phrases.VALUES_ANSWER.format(name=name, values=phrases.listing(drawn[:values]))
    return hide(rng, facts, depths, question, answer, length=length, count_tokens=count_tokens)


def _require_names(count: int) -> None:
    require(1 <= count <= len(NAMES), f"{count} names are asked for", f"there are {len(NAMES)} of them")
