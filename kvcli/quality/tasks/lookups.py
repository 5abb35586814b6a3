"""Answers that look something up every few tokens, and answers whose end needs what nothing named before.

`long_lookup` asks for the codes of hundreds of names: with the default of 280 the answer has some 1,700 tokens, and
what it needs next is known only when it is due. `late_needle` first asks for some codes and then for the code of a name
that only the document says: neither that name nor its code occurs in the question, and only that code is scored.
Methods that choose once, at the end of the prompt, cannot know what will be needed. `direct` is the opposite: the
answer is the code alone, and the prompt's last token needs it.
"""

import re

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.needles import hidden_facts, multiquery, named_facts, random_value
from kvcli.quality.tasks.rows import Draft, RowRequest, require
from kvcli.quality.tasks.text import NAMES

DIRECT_QUESTION = "Give only the access code of {name}."
DIRECT_ANSWER = "{value}."

LATE_QUESTION = "What are the access codes of {names}, and then that of the value of {variable}?"


def direct(request: RowRequest) -> Draft:
    """One fact in filler; the answer is the code alone, so that its first token already needs it."""
    name, value = request.rng.choice(NAMES), random_value(request.rng)
    question, answer = DIRECT_QUESTION.format(name=name), DIRECT_ANSWER.format(value=value)
    return hidden_facts(request, [(name, value)], [request.drawn_depth()], question, answer)


def long_lookup(request: RowRequest, queries: int = 280) -> Draft:
    """Facts about `queries` names and no others, all of them asked for; fewer where the length does not allow it."""
    longest = max(NAMES, key=lambda name: request.count_tokens(f" {name}"))
    stated = phrases.CODE_FACTS[-1].format(name=longest, value="000000000")
    left = request.beside(phrases.NAMES_QUESTION)
    each = request.count_tokens(f" {stated}") + request.count_tokens(f", {longest}")
    return multiquery(request, queries=max(min(queries, left // each), 1), spacing=max(request.length, 1))


def late_needle(request: RowRequest, queries: int = 12, spacing: int = 160) -> Draft:
    """`queries` codes, and then that of a name which only the document names; the last is what is scored."""
    require(0 < queries < len(NAMES) - 1, f"{queries} names", f"choose between 1 and {len(NAMES) - 2}")
    count = min(max(request.length // spacing, queries + 1), len(NAMES) - 1)
    facts = named_facts(request.rng, count)
    variable = request.rng.choice(sorted(set(NAMES) - {name for name, _ in facts}))
    late, *rest = facts
    asked = rest[:queries]
    link = phrases.VARIABLE_VALUE.format(name=variable, value=late[0])
    names = phrases.listing([name for name, _ in asked])
    question = LATE_QUESTION.format(names=names, variable=variable)
    told = [phrases.SEVERAL_ANSWER.format(name=name, value=value) for name, value in (*asked, late)]
    answer = " ".join([*told[:-1], link, told[-1]])
    return hidden_facts(request, facts, [request.drawn_depth()], question, answer, extra=[link])


WORDS: tuple[str, ...] = tuple(re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", "", f"{DIRECT_QUESTION} {LATE_QUESTION}")))
"""Every word of the questions."""
