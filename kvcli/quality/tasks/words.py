"""Lists of words: which of them are the most frequent, and how often one of them occurs.

`cwe` and `fwe` are RULER's (arXiv 2404.06654, section 3.3); `counting` needs every occurrence of a name kept.

In RULER's `cwe` common words occur 30 times in the list, uncommon ones three times. Here they do so if the length
allows it; a short list has ten of each common word and one of each other, and a list longer than the vocabulary allows
has more of each. RULER's worked example before the list is left out.
"""

from itertools import count

from kvcli.quality.tasks import phrases
from kvcli.quality.tasks.phrases import NAMES, VOCABULARY
from kvcli.quality.tasks.rows import Draft, RowRequest, require

_COMMON = 10
_RATIO = 10
_USUAL = 3  # occurrences of an uncommon word
_LEAST = 20  # uncommon words
_WORDS = tuple(dict.fromkeys([*NAMES, *(word for word in VOCABULARY if word.islower() and len(word) > 2)]))
_ASKED = 3  # frequent words


def common_words(request: RowRequest) -> Draft:
    """Make a shuffled numbered list with ten common words, ten times as often as the others; all ten are asked for."""
    request.refuse_depth()
    left = request.beside(phrases.WORDS_HEADING, phrases.COMMON_QUESTION)
    entries = _entries(request, left)
    times = _USUAL if entries >= (_COMMON * _RATIO + _LEAST) * _USUAL else 1
    times = max(times, -(-entries // (_COMMON * _RATIO + len(_WORDS) - _COMMON)))
    others = entries // times - _COMMON * _RATIO
    require(
        others >= _LEAST,
        f"a length of {request.length} tokens is too short for {_COMMON} common words among {_LEAST} others",
        "ask for a longer text",
    )
    chosen = request.rng.sample(_WORDS, _COMMON + others)
    common, uncommon = chosen[:_COMMON], chosen[_COMMON:]
    words = common * (_RATIO * times) + uncommon * times
    request.rng.shuffle(words)
    numbered = " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
    answer = phrases.COMMON_ANSWER.format(words=phrases.listing(common))
    return Draft(f"{phrases.WORDS_HEADING} {numbered}", phrases.COMMON_QUESTION, answer, tuple(common), None)


def _entries(request: RowRequest, left: int) -> int:
    """Return how many numbered words surely fit into `left` tokens; numbers with equal digits take equal tokens."""
    entries = 0
    for digits in count(1):
        each = max(request.count_tokens(f" {'9' * digits}. {word}") for word in _WORDS)
        fitting = min(9 * 10 ** (digits - 1), left // each)
        entries, left = entries + fitting, left - fitting * each
        if left < each:
            break
    return entries


def frequent_words(request: RowRequest, distinct: int = 40, alpha: float = 1.5) -> Draft:
    """Make a shuffled list in which the word of rank r occurs in proportion to r**-alpha; three are asked for."""
    request.refuse_depth()
    require(_ASKED < distinct <= len(NAMES), f"{distinct} distinct words", f"choose between 4 and {len(NAMES)}")
    names = request.rng.sample(NAMES, distinct)
    each = max(request.count_tokens(" " + name) for name in names)
    left = request.beside(phrases.WORDS_HEADING, phrases.WORDS_QUESTION)
    weights = [(rank + 1) ** -alpha for rank in range(distinct)]
    counts = [max(int(left / each * weight / sum(weights)), 1) for weight in weights]
    require(
        counts[_ASKED - 1] > counts[_ASKED] and sum(counts) * each <= left,
        f"a length of {request.length} tokens is too short for {distinct} words whose frequencies differ",
        "ask for a longer text or for fewer distinct words",
    )
    words = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    request.rng.shuffle(words)
    top = names[:_ASKED]
    answer = phrases.WORDS_ANSWER.format(names=phrases.listing(top))
    return Draft(f"{phrases.WORDS_HEADING} {' '.join(words)}", phrases.WORDS_QUESTION, answer, tuple(top), None)


_MOST_TIMES = 9  # occurrences


def occurrences(request: RowRequest, count: int | None = None, distinct: int = 40) -> Draft:
    """Make a shuffled list of `distinct` names; the one asked for occurs `count` times, by default 1 to 9 at random."""
    request.refuse_depth()
    count = request.rng.randint(1, _MOST_TIMES) if count is None else count
    require(1 <= count <= _MOST_TIMES, f"{count} occurrences are asked for", f"choose between 1 and {_MOST_TIMES}")
    require(2 <= distinct <= len(NAMES), f"{distinct} distinct words", f"choose between 2 and {len(NAMES)}")
    name, *others = request.rng.sample(NAMES, distinct)
    each = max(request.count_tokens(" " + word) for word in (name, *others))
    question = phrases.COUNTING_QUESTION.format(name=name)
    left = request.beside(phrases.WORDS_HEADING, question) // each - count
    what = f"a length of {request.length} tokens is too short for {count} times the word and others"
    require(left >= 1, what, "ask for a longer text")
    words = [name] * count + [request.rng.choice(others) for _ in range(left)]
    request.rng.shuffle(words)
    document = f"{phrases.WORDS_HEADING} {' '.join(words)}"
    return Draft(
        document,
        question,
        phrases.COUNTING_ANSWER.format(name=name, count=count),
        (f"{name} occurs {count} times",),
        None,
    )
