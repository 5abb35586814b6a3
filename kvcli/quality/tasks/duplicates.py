"""Near-duplicates: facts about pairs of names that differ from the asked pair in one of its two names.

What ranks pages or clusters by coarse summaries finds all of them alike.
"""

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.needles import hidden_facts, random_values
from kvcli.quality.tasks.rows import Draft, RowRequest, require
from kvcli.quality.tasks.text import NAMES


def near_pairs(first: str, second: str, others: list[str]) -> list[str]:
    """Return pairs that share one name with "first second", the other one being replaced by one of `others`."""
    return [f"{first} {other}" if index % 2 else f"{other} {second}" for index, other in enumerate(others)]


def near_duplicates(request: RowRequest, spacing: int = 80) -> Draft:
    """A fact about a pair of names every `spacing` tokens; each other pair shares one name with the pair asked for."""
    require(spacing >= 1, f"a spacing of {spacing} tokens", "ask for at least one")
    count = min(max(request.length // spacing, 2), len(NAMES) - 1)
    first, second, *others = request.rng.sample(NAMES, count + 1)
    names = [f"{first} {second}", *near_pairs(first, second, others)]
    facts = list(zip(names, random_values(request.rng, len(names)), strict=True))
    question = request.rng.choice(phrases.CODE_QUESTIONS).format(name=names[0])
    answer = phrases.CODE_ANSWER.format(name=names[0], value=facts[0][1])
    return hidden_facts(request, facts, [request.drawn_depth()], question, answer)
