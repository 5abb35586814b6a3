"""Common-word extraction: name the ten words of a numbered list that stand there ten times as often as the others.

After RULER's `cwe` (arXiv 2404.06654, section 3.3): there common words stand 30 times in the list, uncommon ones three
times. Here they do so where the length allows it; a short list has ten of each common word and one of each other, and a
list longer than the vocabulary allows has more of each. RULER's worked example in front of the list is left out.
"""

import random

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.rows import SEPARATOR, CountTokens, Draft, require
from kvcli.quality.tasks.text import NAMES, VOCABULARY

QUESTION = "What are the ten most common words in the list above?"
ANSWER = "The most common words are {words}."

_COMMON = 10
_RATIO = 10
_USUAL = 3  # times an uncommon word stands there
_LEAST = 20  # uncommon words
_WORDS = tuple(dict.fromkeys([*NAMES, *(word for word in VOCABULARY if word.islower() and len(word) > 2)]))


def common_words(rng: random.Random, *, length: int, count_tokens: CountTokens, depth: float | None) -> Draft:
    """A shuffled numbered list with ten common words, all of which are asked for."""
    require(depth is None, f"depth {depth} was given, but the words stand all over the document", "leave the depth out")
    left = length - count_tokens(phrases.WORDS_HEADING) - count_tokens(SEPARATOR + QUESTION)
    widest = "9" * len(str(left // count_tokens(f" 1. {_WORDS[0]}")))  # no number of the list has more digits
    each = max(count_tokens(f" {widest}. {word}") for word in _WORDS)
    entries = left // each
    times = _USUAL if entries >= (_COMMON * _RATIO + _LEAST) * _USUAL else 1
    times = max(times, -(-entries // (_COMMON * _RATIO + len(_WORDS) - _COMMON)))
    others = entries // times - _COMMON * _RATIO
    require(
        others >= _LEAST,
        f"a length of {length} tokens is too short for {_COMMON} common words among {_LEAST} others",
        "ask for a longer text",
    )
    chosen = rng.sample(_WORDS, _COMMON + others)
    common, uncommon = chosen[:_COMMON], chosen[_COMMON:]
    words = common * (_RATIO * times) + uncommon * times
    rng.shuffle(words)
    numbered = " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
    answer = ANSWER.format(words=phrases.listing(common))
    return Draft(f"{phrases.WORDS_HEADING} {numbered}", QUESTION, answer, tuple(common), None)
