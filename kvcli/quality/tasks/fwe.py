"""Frequent-word extraction: name the most frequent words of a list (RULER, arXiv 2404.06654, section 3.3)."""

import random

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.rows import SEPARATOR, CountTokens, Draft, require
from kvcli.quality.tasks.text import NAMES

_ASKED = 3


def frequent_words(
    rng: random.Random,
    *,
    length: int,
    count_tokens: CountTokens,
    depth: float | None,
    distinct: int = 40,
    alpha: float = 1.5,
) -> Draft:
    """A shuffled list in which the word of rank r occurs in proportion to r**-alpha; the first three are asked for."""
    require(depth is None, f"depth {depth} was given, but the words stand all over the document", "leave the depth out")
    require(_ASKED < distinct <= len(NAMES), f"{distinct} distinct words", f"choose between 4 and {len(NAMES)}")
    names = rng.sample(NAMES, distinct)
    question = phrases.WORDS_QUESTION
    each = max(count_tokens(" " + name) for name in names)
    left = length - count_tokens(phrases.WORDS_HEADING) - count_tokens(SEPARATOR + question)
    weights = [(rank + 1) ** -alpha for rank in range(distinct)]
    counts = [max(int(left / each * weight / sum(weights)), 1) for weight in weights]
    require(
        counts[_ASKED - 1] > counts[_ASKED] and sum(counts) * each <= left,
        f"a length of {length} tokens is too short for {distinct} words whose frequencies differ",
        "ask for a longer text or for fewer distinct words",
    )
    words = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    rng.shuffle(words)
    top = names[:_ASKED]
    document = phrases.WORDS_HEADING + " " + " ".join(words)
    return Draft(document, question, phrases.WORDS_ANSWER.format(names=phrases.listing(top)), tuple(top), None)
