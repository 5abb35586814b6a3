"""Several turns on one document: each question is about another fact. The task scores the last answer alone.

What a method dropped because the first question did not need it is missed by the last one. The answers in between are
given, right ones, so that the turns differ in nothing but what was read.
"""

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.needles import hidden_facts, named_facts
from kvcli.quality.tasks.rows import Draft, RowRequest, require
from kvcli.quality.tasks.text import NAMES

TURNS = 4


def conversation(request: RowRequest, turns: int = TURNS, spacing: int = 160) -> Draft:
    """A fact every `spacing` tokens and `turns` questions, one after another; the depth is that of the last fact."""
    require(1 <= turns <= len(NAMES), f"{turns} turns", f"choose between 1 and {len(NAMES)}")
    facts = named_facts(request.rng, min(max(request.length // spacing, turns), len(NAMES)))
    asked = [request.rng.choice(phrases.CODE_QUESTIONS).format(name=name) for name, _ in facts[:turns]]
    told = [phrases.CODE_ANSWER.format(name=name, value=value) for name, value in facts[:turns]]
    longest = max(asked, key=request.count_tokens)  # the one that the length is measured with, whichever comes first
    draft = hidden_facts(request, facts, [request.drawn_depth()], longest, told[0])
    earlier = tuple(zip(asked[1:], told[1:], strict=True))
    values = tuple((value,) for _, value in facts[1:turns])
    return Draft(draft.document, asked[0], told[0], (facts[0][1],), draft.depth, earlier, values)
