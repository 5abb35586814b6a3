"""Counting: how often does a name stand in a list of words?

A method has to keep every occurrence; the list is otherwise made of names that occur about equally often.
"""

import re

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.rows import Draft, RowRequest, require
from kvcli.quality.tasks.text import NAMES

QUESTION = "How many times does {name} occur in the list above?"
ANSWER = "{name} occurs {count} times."

_MOST = 9  # occurrences


def occurrences(request: RowRequest, count: int | None = None, distinct: int = 40) -> Draft:
    """A shuffled list of `distinct` names; the one that is asked for stands there `count` times, 1 to 9 at random."""
    request.refuse_depth()
    count = request.rng.randint(1, _MOST) if count is None else count
    require(1 <= count <= _MOST, f"{count} occurrences are asked for", f"choose between 1 and {_MOST}")
    require(2 <= distinct <= len(NAMES), f"{distinct} distinct words", f"choose between 2 and {len(NAMES)}")
    name, *others = request.rng.sample(NAMES, distinct)
    each = max(request.count_tokens(" " + word) for word in (name, *others))
    question = QUESTION.format(name=name)
    left = request.beside(phrases.WORDS_HEADING, question) // each - count
    what = f"a length of {request.length} tokens is too short for {count} times the word and others"
    require(left >= 1, what, "ask for a longer text")
    words = [name] * count + [request.rng.choice(others) for _ in range(left)]
    request.rng.shuffle(words)
    document = f"{phrases.WORDS_HEADING} {' '.join(words)}"
    return Draft(document, question, ANSWER.format(name=name, count=count), (f"{name} occurs {count} times",), None)


WORDS: tuple[str, ...] = tuple(re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", "", f"{QUESTION} {ANSWER}")))
"""Every word of question and answer."""
