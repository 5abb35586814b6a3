"""Variable tracking: follow a chain of variables to its value (after RULER, arXiv 2404.06654, section 3.2).

"The value of Amber is 482913057." ... "The value of Bruno is Amber." ... "What is the value of Bruno?" The chain is
told in plain sentences, the number first, among other chains of the same form. Unlike RULER, which gives the number
and asks for every variable, the question gives the last variable and expects every one on the way and the number.
"""

import random
from itertools import pairwise

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.needles import random_value
from kvcli.quality.tasks.rows import SEPARATOR, CountTokens, Draft, place, require, require_depth
from kvcli.quality.tasks.text import NAMES, sentences


def chain_statements(value: str, names: list[str]) -> list[str]:
    """Return the sentences that give `value` to the first of `names` and each name's value to the next."""
    pairs = [(names[0], value), *((name, source) for source, name in pairwise(names))]
    return [phrases.VARIABLE_VALUE.format(name=name, value=held) for name, held in pairs]


def variable_tracking(
    rng: random.Random,
    *,
    length: int,
    count_tokens: CountTokens,
    depth: float | None,
    chains: int = 2,
    hops: int = 4,
) -> Draft:
    """`chains` chains of `hops` copies each; the value of the first chain's last variable is asked for.

    `depth` is where the chain's number stands. The expected strings are the variables and the number, as the answer
    reaches them.
    """
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
    question = phrases.VARIABLE_QUESTION.format(name=names[hops])
    fixed = sum(count_tokens(" " + statement) for statement in statements) + count_tokens(SEPARATOR + question)
    require(
        fixed <= length,
        f"a length of {length} tokens is too short: the chains and the question alone take {fixed}",
        "ask for a longer text, fewer chains or fewer hops",
    )
    document, got = place(statements, depths, sentences(rng, length - fixed, count_tokens), count_tokens)
    answer = " ".join(reversed(statements[: hops + 1]))
    outputs = (*reversed(names[:hops]), values[0])
    return Draft(document, question, answer, outputs, got[0])
