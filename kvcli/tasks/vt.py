"""Variable tracking: follow a value through a chain of variables (RULER, arXiv 2404.06654, section 3.2).

The chain is told in plain sentences ("The value of Amber is kept in Bruno."), in the order of the chain, among other
chains of the same form.
"""

import random
from itertools import pairwise

from kvcli.tasks import phrases
from kvcli.tasks.needles import random_value
from kvcli.tasks.rows import SEPARATOR, CountTokens, Draft, place, require, require_depth
from kvcli.tasks.text import NAMES, sentences


def chain_statements(value: str, names: list[str]) -> list[str]:
    """Return the sentences that put `value` into the first of `names` and copy it from each name to the next."""
    first = phrases.VARIABLE_VALUE.format(value=value, name=names[0])
    return [first] + [phrases.VARIABLE_COPY.format(source=a, name=b) for a, b in pairwise(names)]


def variable_tracking(
    rng: random.Random,
    *,
    length: int,
    count_tokens: CountTokens,
    depth: float | None,
    chains: int = 2,
    hops: int = 4,
) -> Draft:
    """`chains` chains of `hops` copies each; every variable that holds the first chain's value is asked for."""
    require(chains >= 1 and hops >= 0, f"{chains} chains of {hops} hops", "ask for at least one chain")
    needed = chains * (hops + 1)
    require(needed <= len(NAMES), f"{needed} variables are asked for", f"there are {len(NAMES)} of them")
    require_depth(depth)
    names = rng.sample(NAMES, needed)
    values = [random_value(rng) for _ in range(chains)]
    statements: list[str] = []
    depths: list[float] = []
    for c, value in enumerate(values):
        statements += chain_statements(value, names[c * (hops + 1) : (c + 1) * (hops + 1)])
        start = depth if c == 0 and depth is not None else rng.random() / 2
        depths += [start, *sorted(rng.uniform(start, 1.0) for _ in range(hops))]
    question = phrases.VARIABLE_QUESTION.format(value=values[0])
    fixed = sum(count_tokens(" " + statement) for statement in statements) + count_tokens(SEPARATOR + question)
    require(
        fixed <= length,
        f"a length of {length} tokens is too short: the chains and the question alone take {fixed}",
        "ask for a longer text, fewer chains or fewer hops",
    )
    document, got = place(statements, depths, sentences(rng, length - fixed, count_tokens), count_tokens)
    answer = " ".join(statements[: hops + 1])
    return Draft(document, question, answer, tuple(names[: hops + 1]), got[0])
