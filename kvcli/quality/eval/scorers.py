"""Scorers by name: how right an answer is, 0 to 1, as RULER and LongBench define it.

RULER: arXiv 2404.06654. LongBench: arXiv 2308.14508, metrics.py and eval.py of its repository, whose choices are kept
even where they are surprising; v2: arXiv 2412.15204. The scorers of InfiniteBench, of final
answers, and of MRCR, LooGLE, HELMET and LOFT have modules of their own.

lm-evaluation-harness scores LongBench and InfiniteBench as well. Its functions are not used here: they come with tasks
that load data from the hub, those of LongBench need fuzzywuzzy, which is under the GPL, and those of InfiniteBench stem
the words of summaries, which the benchmark does not, and read a choice by its last letter instead of its first.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from kvcli.errors import ExitCode, KvcliError
from kvcli.quality.eval import final_answer, infinitebench, long_context
from kvcli.quality.tasks import recall

Scorer = Callable[[str, Sequence[str], Sequence[str]], float]
"""Text, references, and the classes to choose from, if any."""

_PUNCTUATION_ZH = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_PUNCTUATION_ZH = str.maketrans("", "", string.punctuation + _PUNCTUATION_ZH)
_NO_CODE = ("`", "#", "//")


def score(metric: str, text: str, references: Sequence[str], choices: Sequence[str] = ()) -> float:
    """Score an answer, 0 to 1.

    Raises:
        KvcliError: a library that the metric needs is not installed (usage).
    """
    return SCORERS[metric](text, references, choices)


def best(one: Callable[[str, str], float]) -> Scorer:
    """Score against each reference and take the best."""
    return lambda text, references, _: max((one(text, reference) for reference in references), default=0.0)


def words(text: str) -> list[str]:
    """Split into lower-case words without punctuation and articles, as for SQuAD."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split()


def characters_zh(text: str) -> str:
    """Reduce to lower-case characters, without blanks and punctuation, including Chinese."""
    return "".join(text.lower().translate(_NO_PUNCTUATION_ZH).split())


def f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of tokens, counting repetitions."""
    same = sum((Counter(found) & Counter(wanted)).values())
    return 2 * same / (len(found) + len(wanted)) if same else 0.0


def contains(text: str, reference: str) -> float:
    """Tell whether the text contains the reference, ignoring case: RULER's `string_match_part`."""
    return float(reference.lower() in text.lower())


def qa_f1(text: str, reference: str) -> float:
    """Return the F1 of words."""
    return f1(words(text), words(reference))


def qa_f1_zh(text: str, reference: str) -> float:
    """Return the F1 of Chinese words as jieba cuts them."""
    return f1(*([word for word in map(characters_zh, _cut_zh(each)) if word] for each in (text, reference)))


def character_f1(text: str, reference: str) -> float:
    """Return the F1 of characters: InfiniteBench's for Chinese."""
    return f1(characters_zh(text), characters_zh(reference))


def rouge_l(text: str, reference: str, part: str = "f") -> float:
    """Return the F1 "f" of ROUGE-L by the package rouge (LongBench), or its recall "r" (LooGLE); 0 if one is empty."""
    try:
        scores = _library("rouge").Rouge(metrics=["rouge-l"]).get_scores([text], [reference])
    except (ValueError, RecursionError):  # the benchmark counts what the package cannot score as 0
        return 0.0
    return float(scores[0]["rouge-l"][part])


def rouge_l_zh(text: str, reference: str) -> float:
    """Return the F1 of ROUGE-L over Chinese words as jieba cuts them."""
    return rouge_l(" ".join(_cut_zh(text)), " ".join(_cut_zh(reference)))


def rouge_lsum(text: str, reference: str) -> float:
    """Return the F1 of ROUGE-Lsum by the package rouge-score: InfiniteBench's choice, without stemming."""
    scorer = _library("rouge_score.rouge_scorer").RougeScorer(["rougeLsum"])
    return float(scorer.score(reference, text)["rougeLsum"].fmeasure)


def code_similarity(text: str, reference: str) -> float:
    """Return the edit similarity of the first line of code with the reference, in whole per cent as fuzzywuzzy does."""
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")
    return float(round(_library("rapidfuzz.fuzz").ratio(line, reference))) / 100


def share_of_numbers(text: str, reference: str) -> float:
    """Return the share of the numbers in the text that equal the reference's first."""
    wanted = re.search(r"\d+", reference)
    numbers = re.findall(r"\d+", text)
    return numbers.count(wanted[0]) / len(numbers) if wanted and numbers else 0.0


def classification(text: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """Return one over the number of classes that the text names, if the right one is among them.

    A class whose name is part of the right one's does not count in addition to it.
    """

    def one(reference: str) -> float:
        named = [name for name in choices if name in text]
        for name in named:  # the benchmark removes while it iterates: of two in a row the second one stays
            if name in reference and name != reference:
                named.remove(name)
        return 1.0 / len(named) if reference in named else 0.0

    return max(map(one, references), default=0.0)


def choice_in_sentence(text: str, reference: str) -> float:
    """Tell whether "The correct answer is (B)" names the right letter, ignoring stars, with or without brackets."""
    found = re.search(r"The correct answer is \(([A-D])\)", text.replace("*", ""))
    found = found or re.search(r"The correct answer is ([A-D])", text.replace("*", ""))
    return float(found is not None and found[1] == reference)


def math_verify(text: str, reference: str) -> float:
    """Tell whether the final answer is mathematically equal to the reference."""
    return final_answer.same_mathematics(text, reference, partial(_library, "math_verify"))


def why_unscorable(metric: str, references: Sequence[str], choices: Sequence[str]) -> str | None:
    """Return why a metric cannot score answers against `references`; None if it can."""
    if metric == "classification" and not choices:
        return "metric 'classification' needs all_classes, which only a row of LongBench has"
    if metric == "function_choice" and len(references) != 2:
        return "metric 'function_choice' needs two answers, the function's name and its letter"
    if metric == "mrcr" and len(references) != 2:
        return "metric 'mrcr' needs two answers, the text and its prefix"
    forms = {"cloze": (dict, "mappings"), "same_rows": (list, "lists")}
    if metric in forms:
        form, named = forms[metric]
        found = [long_context.constant(each) for each in references]
        if not all(isinstance(each, form) and each for each in found):
            return f"metric {metric!r} needs {named} for answers"
    if metric == "ndcg_10" and not all(re.fullmatch(r"\d+ [1-9]\d{0,8}", each) for each in references):
        return "metric 'ndcg_10' needs numbers of documents with their grades, as in '17 3'"
    if metric == "final_letter" and not set(references) <= set(final_answer.LETTERS):
        return "metric 'final_letter' needs a letter from A to D for an answer"
    pattern = (infinitebench.NUMERIC | final_answer.NUMERIC).get(metric)
    if pattern is not None and not all(re.fullmatch(pattern, reference) for reference in references):
        return f"metric {metric!r} needs numbers for answers"
    return None


def _cut_zh(text: str) -> list[str]:
    jieba = _library("jieba")
    jieba.setLogLevel("WARNING")  # it would tell how long its dictionary took
    return list(jieba.cut(text, cut_all=False))


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        what = f"this score needs {name.partition('.')[0].replace('_', '-')}, which is not installed"
        raise KvcliError(what, "pip install 'kvcli[eval]'", ExitCode.USAGE) from None


SCORERS: dict[str, Scorer] = {
    "recall": lambda text, references, _: recall(text, references),
    "contains": best(contains),
    "qa_f1": best(qa_f1),
    "qa_f1_zh": best(qa_f1_zh),
    "character_f1": best(character_f1),
    "rouge_l": best(rouge_l),
    "rouge_l_recall": best(partial(rouge_l, part="r")),
    "rouge_l_zh": best(rouge_l_zh),
    "rouge_lsum": best(rouge_lsum),
    "code_similarity": best(code_similarity),
    "count": best(share_of_numbers),
    "retrieval": best(share_of_numbers),
    "classification": classification,
    "choice_in_sentence": best(choice_in_sentence),
    "math_verify": best(math_verify),
    "final_integer": best(final_answer.final_integer),
    "final_letter": best(final_answer.final_letter),
    "cloze": best(long_context.cloze),
    "label": best(long_context.label),
    **infinitebench.SCORERS,
    **long_context.SCORERS,
}
"""By the names that the tables of prompts, and a row's own field `metric`, use."""

OVERLAP = (
    *("qa_f1", "qa_f1_zh", "character_f1", "rouge_l", "rouge_l_recall", "rouge_l_zh", "rouge_lsum"),
    *("code_similarity", "mixed"),
)
"""Metrics by which good answers, too, score far below 1: they share only a part of a reference's words."""

NEEDS: dict[str, str] = {
    "qa_f1_zh": "jieba",
    "rouge_l": "rouge",
    "rouge_l_recall": "rouge",
    "rouge_l_zh": "jieba",
    "rouge_lsum": "rouge_score",
    "code_similarity": "rapidfuzz",
    "math_verify": "math_verify",
}
"""Libraries that a metric needs in addition to those of kvcli."""


def check_installed(metric: str) -> None:
    """Check before the work is done that the library of a metric is installed.

    Raises:
        KvcliError: it is not installed (usage).
    """
    if metric in NEEDS:
        _library(NEEDS[metric])
