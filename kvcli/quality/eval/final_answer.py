r"""Score the final answer of a text that reasons: 1 if it is right, else 0, also without an answer.

The answer is the content of the last complete \boxed{...}, or else the rest of the line after the last "answer". If
thoughts are in tags or in another channel, only the text after them counts.
"""

import logging
import re
import threading
from collections.abc import Callable
from typing import Any

_THOUGHTS = ("</think>", "[final]\n")  # a tag, and the channel of an answer, see `StreamingDetokenizer`
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace is part of the answer
_SAID = re.compile(r"\banswer\b(?:\s+is\b)?[\s:*]*", re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<!\w)-)?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?![0-9])")
_STYLED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|boldsymbol)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,!;: ]|\\?\$|\^\s*\{?\\circ\}?|\s")
_LETTER = re.compile(r"(?<![\w-])[A-D](?!-?\w|['^])")
LETTERS = "ABCD"
NUMERIC = {"final_integer": r"-?(0|[1-9][0-9]{0,299})"}
"""Patterns of the references of the scorers that compare numbers."""
_PATIENCE = 5  # seconds to read an answer, and to compare it: models write towers of powers


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...} of a text, with inner braces; None without one.

    Of nested boxes it is the innermost.
    """
    opened: list[int | None] = []  # where the content of a box begins, None for other braces
    found, begun = None, -1
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            start = opened.pop() if opened else None
            if start is not None and start > begun:
                found, begun = text[start : brace.start()], start
        elif brace[0].endswith("{") and brace[0] != r"\{":
            opened.append(brace.end() if brace[0] != "{" else None)
    return found


def said(text: str) -> str:
    """Return the rest of the line, or the next one, after the last "answer" of a text; empty without one."""
    found = list(_SAID.finditer(text))
    return text[found[-1].end() :].partition("\n")[0].strip() if found else ""


def same_mathematics(text: str, reference: str, load: Callable[[], Any]) -> float:
    """Tell whether the answer and the reference, LaTeX, are equal for the library that `load` returns: math-verify."""
    inside = boxed(text := _after_thoughts(text))
    if not (answer := said(text) if inside is None else _as_formula(inside)):
        return 0.0
    library = load()
    logging.getLogger("math_verify").setLevel(
        logging.CRITICAL
    )  # what it cannot read is a wrong answer, not worth a message
    # It keeps time by a signal, which only the main thread receives.
    patience = _PATIENCE if threading.current_thread() is threading.main_thread() else None
    latex = [library.LatexExtractionConfig()]
    forms = latex if inside is not None else [*latex, library.ExprExtractionConfig()]
    found = library.parse(answer, forms, parsing_timeout=patience)
    wanted = library.parse(_as_formula(reference), latex, parsing_timeout=patience)
    return float(library.verify(wanted, found, timeout_seconds=patience))


def final_integer(text: str, reference: str) -> float:
    """Tell whether the answer is the right integer: the whole content of the box except units, or the last number."""
    inside = boxed(text := _after_thoughts(text))
    if inside is None:
        *_, number = ["", *_NUMBER.findall(said(text))]
    else:
        styled = _STYLED.fullmatch(inside.strip())
        plain = _STYLED.sub("", styled[1] if styled else inside).rpartition("=")[2]
        plain = _SPACING.sub("", plain).replace("{,}", ",").strip("()")
        number = plain if _NUMBER.fullmatch(plain) else ""
    whole, _, fraction = number.replace(",", "").partition(".")
    # As text: a model may write more digits than Python turns into a number.
    return float(bool(whole) and not fraction.strip("0") and (whole.lstrip("0") or "0") == reference)


def final_letter(text: str, reference: str) -> float:
    """Tell whether the first letter from A to D that stands alone in the answer is the right one."""
    inside = boxed(text := _after_thoughts(text))
    found = _LETTER.search(said(text) if inside is None else re.sub(r"\\[a-zA-Z]+|[{}]", " ", inside))
    return float(found is not None and found[0] == reference)


def _after_thoughts(text: str) -> str:
    for end in _THOUGHTS:
        text = text.rpartition(end)[2]
    return text


def _as_formula(latex: str) -> str:
    return "$" + re.sub(r"(?<!\\)\$", "", latex) + "$"
