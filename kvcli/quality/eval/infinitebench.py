"""InfiniteBench's own scorers (arXiv 2402.13718; compute_scores.py of its repository): 1 for right, 0 for wrong.

Arguments are those of `scorers.Scorer`. The references of a choice are the right option's text and its letter.
"""

import re
from collections.abc import Callable, Sequence

from kvcli.quality.eval.final_answer import LETTERS


def first_integer(text: str, references: Sequence[str], _: Sequence[str]) -> float:
    """Tell whether the first run of digits is the reference (passkey, number_string)."""
    found = re.search(r"[0-9]+", text)
    return float(found is not None and found[0] == references[0])


def word(text: str, references: Sequence[str], _: Sequence[str]) -> float:
    """Tell whether the reference is a word of the text (kv_retrieval)."""
    return float(references[0] in _spaced(text, "\n:\"'.,?!{}").split())


def name(text: str, references: Sequence[str], _: Sequence[str]) -> float:
    """Tell whether the reference, in capitals, is a word of the text in capitals (longdialogue_qa_eng)."""
    return float(references[0] in _spaced(text, "\n:\"'.,?!{}").upper().split())


def last_integer(text: str, references: Sequence[str], _: Sequence[str]) -> float:
    """Tell whether the last word is the right number (code_run)."""
    parts = _spaced(text, "\n.`'\":").split()
    try:
        return float(bool(parts) and int(parts[-1]) == int(references[0]))
    except ValueError:
        return 0.0


def first_number(text: str, references: Sequence[str], _: Sequence[str]) -> float:
    """Tell whether the first number is the right one; a fraction is wrong if the reference is whole (math_find)."""
    found = re.search(r"\d+\.\d+|\d+", text)
    if found is None or ("." in found[0] and "." not in references[0]):
        return 0.0
    return float(float(found[0]) == float(references[0]))


def leading_integers(text: str, references: Sequence[str], _: Sequence[str]) -> float:
    """Return the share of the right numbers that come before the first wrong one (math_calc)."""
    # As text without leading zeros: a model may write more digits than Python turns into a number.
    found = [digits.lstrip("0") or "0" for digits in re.findall(r"[0-9]+", text)]
    right = 0
    for number, wanted in zip(found, references, strict=False):
        if number != str(int(wanted)):
            break
        right += 1
    return right / len(references)


def choice(text: str, references: Sequence[str], _: Sequence[str]) -> float:
    """Tell whether the letter that begins the text, or else the one it announces or first names, is right."""
    text = text.strip()
    if not text:
        return 0.0
    if text[0] in LETTERS:
        return float(text[0] in references)
    if text in references:
        return 1.0
    text = _single_spaced(_spaced(text, "\n\"'.,?!{}"))
    announced = _after(text, ("answer is:", "answer:", "answer is", "option is"))
    if announced is not None:
        return float(announced.startswith(tuple(references)))
    letters = [part for part in text.split() if part in LETTERS]
    return float(bool(letters) and letters[0] in references)


def function_choice(text: str, references: Sequence[str], _: Sequence[str]) -> float:
    """Tell whether the text begins with the right letter, or announces it or the function's name (code_debug)."""
    function, letter = references
    text = text.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    for piece in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        text = text.replace(piece, " ")
    text = _single_spaced(text)
    announced = _after(text, ("answer is:", "is:", "answer:", "correct option is:"))
    return float(announced is not None and announced.startswith((letter, function)))


def _spaced(text: str, characters: str) -> str:
    return text.translate(str.maketrans(characters, " " * len(characters)))


def _single_spaced(text: str) -> str:
    return re.sub(" +", " ", text)


def _after(text: str, prefixes: Sequence[str]) -> str | None:
    """Return the text after the first of `prefixes` that it has, and after the next character."""
    for prefix in prefixes:
        at = text.find(prefix)
        if at >= 0:
            return text[at + len(prefix) + 1 :]
    return None


SCORERS: dict[str, Callable[[str, Sequence[str], Sequence[str]], float]] = {
    "first_integer": first_integer,
    "word": word,
    "name": name,
    "last_integer": last_integer,
    "first_number": first_number,
    "leading_integers": leading_integers,
    "choice": choice,
    "function_choice": function_choice,
}

_WHOLE = r"-?[0-9]{1,300}"
NUMERIC: dict[str, str] = {
    "last_integer": _WHOLE,
    "leading_integers": _WHOLE,
    "first_number": _WHOLE + r"(\.[0-9]{1,300})?",
}
"""Patterns of the references of the scorers that compare numbers."""
