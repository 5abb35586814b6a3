"""Variable tracking: follow a chain of variables to its value (after RULER, arXiv 2404.06654, section 3.2).

"The value of Amber is 482913057." ... "The value of Bruno is Amber." ... "What is the value of Bruno?" The chain is
told in plain sentences, the number first, among other chains of the same form. Unlike RULER, which gives the number
and asks for every variable, the question gives the last variable and expects every one on the way and the number.
"""

from itertools import pairwise

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.needles import random_value
from kvcli.quality.tasks.rows import Draft, RowRequest, require
from kvcli.quality.tasks.text import NAMES


def chain_statements(value: str, names: list[str]) -> list[str]:
    """Return the sentences that give `value` to the first of `names` and each name's value to the next."""
    pairs = [(names[0], value), *((name, source) for source, name in pairwise(names))]
    return [phrases.VARIABLE_VALUE.format(name=name, value=held) for name, held in pairs]


def variable_tracking(request: RowRequest, chains: int = 2, hops: int = 4) -> Draft:
    """`chains` chains of `hops` copies each; the value of the first chain's last variable is asked for.

    The depth is that of the first chain's number. The expected strings are the variables and the number, as the answer
    reaches them.
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
