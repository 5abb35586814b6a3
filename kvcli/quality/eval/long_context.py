"""Scorers of MRCR, LooGLE, HELMET and LOFT, as the benchmarks' repositories define them.

Arguments are those of `scorers.Scorer`, or a text and one reference.

MRCR: the card of huggingface.co/datasets/openai/mrcr. LooGLE: arXiv 2311.04939, Evaluation/automatic_metrics.py.
HELMET: arXiv 2410.02694, utils.py. LOFT: arXiv 2406.13121, evaluation/. Where LooGLE and LOFT evaluate Python, only
constants are read.
"""

import ast
import math
import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import partial
from typing import Any

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_QUOTE_IN_WORD = re.compile(r"(?<=[a-zA-Z0-9])'(?=[a-zA-Z0-9])")
RANK = 10  # documents of a ranking that count

References = Sequence[str]


def constant(text: str) -> Any:
    """Read a constant in Python's notation, which JSON without true, false and null also is; None if it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def normalized(text: str) -> str:
    """Reduce to lower-case words without punctuation and articles, accents apart from their letters."""
    text = unicodedata.normalize("NFD", text).lower().translate(_NO_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def mrcr(text: str, references: References, _: References) -> float:
    """Return how alike the text and the answer are (difflib) after the prefix, the second reference; 0 without it."""
    answer, prefix = references
    if not text.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, text.removeprefix(prefix), answer.removeprefix(prefix)).ratio()


def cloze(text: str, reference: str) -> float:
    """Return the part of the reference's masks, a mapping, that the text, a mapping too, names alike (LooGLE)."""
    wanted, found = constant(reference), constant(text)
    if not isinstance(found, dict):
        return 0.0
    return float(sum(found.get(mask) == name for mask, name in wanted.items()) / len(wanted))


def label(text: str, reference: str) -> float:
    """Tell whether the rest of the line after "label:", or else the first line, is the reference (HELMET)."""
    line = re.search(r"label:(.*)", text, re.IGNORECASE) or re.match(r"(.*)", text)
    said = line[1].strip() if line else ""
    return float(normalized(re.sub(r"^label:", "", said, flags=re.IGNORECASE)) == normalized(reference))


def ranking(text: str) -> list[str]:
    """Read the longest ranking "ID3 > ID1 > ID2" of a text: its numbers, each once (HELMET)."""
    plain = re.sub(r"[\[\]:]", "", text).lower().replace("id", "")
    longest = max((found[0] for found in re.finditer(r"\d+(?:\s*>\s*\d+)*", plain)), key=len, default="")
    return list(dict.fromkeys(re.findall(r"\d+", longest)))


def ndcg(text: str, references: References, _: References) -> float:
    """Return NDCG@10 of the ranking in a text; a reference is the number of a relevant document and its grade.

    As trec_eval has it: the sum of grade / log2(1 + rank), over that of the best ranking.
    """
    grades = {number: int(grade) for number, grade in map(str.split, references)}

    def gain(found: Sequence[int]) -> float:
        return sum(grade / math.log2(2 + place) for place, grade in enumerate(found[:RANK]))

    best = gain(sorted(grades.values(), reverse=True))
    return gain([grades.get(number, 0) for number in ranking(text)]) / best if best else 0.0


def final_list(text: str) -> list[Any]:
    """Read the list in the first line with brackets, as in "Final Answer: ['35']" (LOFT); empty without one."""
    lines = text.replace("*", "").replace("`", "").split("\n")
    line = next((line for line in lines if "[" in line and "]" in line), "[]")
    found = constant(_QUOTE_IN_WORD.sub(r"\'", line[line.find("[") : line.rfind("]") + 1].strip()))
    return list(found) if isinstance(found, list | tuple) else []


def _numbers(text: str, count: int) -> set[str]:
    return {str(each).strip() for each in final_list(text)[:count]}


def recall_1(text: str, references: References, _: References) -> float:
    """Return the part of the right documents that the first one named is: all of them if there is one."""
    return len(_numbers(text, 1) & {*references}) / len(references)


def mrecall(text: str, references: References, _: References, count: int) -> float:
    """Tell whether the first `count` documents named hold all right ones, or are all right if there are more."""
    return float(len(_numbers(text, count) & {*references}) == min(count, len(references)))


def subspan(text: str, references: References, _: References) -> float:
    """Tell whether the first entry of the final list contains a reference."""
    found = [normalized(str(each)) for each in final_list(text)[:1]]
    return float(any(normalized(reference) in each for reference in references for each in found))


def subspans(text: str, references: References, _: References) -> float:
    """Tell whether every reference has an entry of the final list of its own, one within the other."""
    found = [normalized(str(each)) for each in final_list(text)]
    owner: dict[int, int] = {}  # the reference that has an entry
    wanted = [normalized(reference) for reference in references]

    def place(reference: int, tried: set[int]) -> bool:
        """Give a reference an entry, moving others if need be."""
        for entry, said in enumerate(found):
            if entry not in tried and (wanted[reference] in said or said in wanted[reference]):
                tried.add(entry)
                if entry not in owner or place(owner[entry], tried):
                    owner[entry] = reference
                    return True
        return False

    return float(all(place(reference, set()) for reference in range(len(wanted))))


def same_rows(text: str, references: References, _: References) -> float:
    """Tell whether the final list has the rows of a table, in any order; numbers count to two decimals."""
    found = final_list(text)
    rows = [_cells(row) for row in (found if not found or isinstance(found[0], list) else [found])]
    wanted = [_cells(constant(reference)) for reference in references]
    return float(len(rows) == len(wanted) and all(row in wanted for row in rows))


def _cells(row: Any) -> set[str]:
    cells = set()
    for cell in row if isinstance(row, list) else [row]:
        try:
            cells.add(f"{float(cell):.2f}")
        except (TypeError, ValueError):
            cells.add(str(cell).strip().lower())
    return cells - {""}


def first_entry(text: str, references: References, _: References) -> float:
    """Tell whether the first entry of the final list is a reference."""
    found = [normalized(str(each)) for each in final_list(text)[:1]]
    return float(any(normalized(reference) in found for reference in references))


SCORERS: dict[str, Callable[[str, References, References], float]] = {
    "mrcr": mrcr,
    "ndcg_10": ndcg,
    "recall_1": recall_1,
    **{f"mrecall_{count}": partial(mrecall, count=count) for count in (2, 3, 5)},
    "subspan": subspan,
    "subspans": subspans,
    "same_rows": same_rows,
    "first_entry": first_entry,
}
