"""Needles in other hay than filler: the same sentences again and again, or nothing but needles.

After three of RULER's tasks (arXiv 2404.06654, appendix B): `niah_single_1` hides one fact in five sentences that
repeat; `niah_multikey_2` and `niah_multikey_3` are facts from beginning to end, one of which is asked for, the latter
with UUIDs for names and values. The sentences are those of `phrases`.
"""

import random
import uuid
from collections.abc import Callable
from itertools import count

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.needles import drawn_depth, hide, random_value
from kvcli.quality.tasks.rows import CountTokens, Draft
from kvcli.quality.tasks.text import NAMES, sentence

NOISE: tuple[str, ...] = tuple(sentence(random.Random(f"noise/{index}")) for index in range(5))
"""The sentences that repeat."""


def noise(rng: random.Random, *, length: int, count_tokens: CountTokens, depth: float | None) -> Draft:
    """One fact among sentences that repeat."""
    name, value = rng.choice(NAMES), random_value(rng)

    def repeated(tokens: int) -> list[str]:
        sizes = [count_tokens(" " + text) for text in NOISE]
        found: list[str] = []
        for index in count():
            tokens -= sizes[index % len(NOISE)]
            if tokens < 0:
                break
            found.append(NOISE[index % len(NOISE)])
        return found

    question = rng.choice(phrases.CODE_QUESTIONS).format(name=name)
    answer = phrases.CODE_ANSWER.format(name=name, value=value)
    return hide(
        rng,
        [(name, value)],
        [drawn_depth(rng, depth)],
        question,
        answer,
        length=length,
        count_tokens=count_tokens,
        filler=repeated,
    )


def needles_only(rng: random.Random, *, length: int, count_tokens: CountTokens, depth: float | None) -> Draft:
    """Facts about pairs of names from beginning to end, one of which is asked for."""
    return _among_needles(
        rng, lambda: " ".join(rng.sample(NAMES, 2)), lambda: random_value(rng), length, count_tokens, depth
    )


def uuids_only(rng: random.Random, *, length: int, count_tokens: CountTokens, depth: float | None) -> Draft:
    """The same with a random UUID for every name and every value."""

    def drawn() -> str:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    return _among_needles(rng, drawn, drawn, length, count_tokens, depth)


def _among_needles(
    rng: random.Random,
    draw_name: Callable[[], str],
    draw_value: Callable[[], str],
    length: int,
    count_tokens: CountTokens,
    depth: float | None,
) -> Draft:
    used: set[str] = set()

    def fact() -> tuple[str, str]:
        while True:
            name, value = draw_name(), draw_value()
            if not used & {name, value}:
                used.update((name, value))
                return name, value

    def others(tokens: int) -> list[str]:
        found: list[str] = []
        while True:
            name, value = fact()
            statement = rng.choice(phrases.CODE_FACTS).format(name=name, value=value)
            tokens -= count_tokens(" " + statement)
            if tokens < 0:
                return found
            found.append(statement)

    name, value = fact()
    question = rng.choice(phrases.CODE_QUESTIONS).format(name=name)
    answer = phrases.CODE_ANSWER.format(name=name, value=value)
    depths = [drawn_depth(rng, depth)]
    return hide(rng, [(name, value)], depths, question, answer, length=length, count_tokens=count_tokens, filler=others)
