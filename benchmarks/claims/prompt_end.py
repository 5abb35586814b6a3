"""Why methods that cut a prompt by its last queries lose the very fact it asks for: nothing there looks at it yet.

SnapKV, PyramidKV and CAKE keep what the last queries of a prompt look at; the papers' models look for the answer while
they read the question. The demo model repeats the question's words first ("The access code of Amber is") and
fetches the value at the last of them. Each document is read twice: as it is, its end being the question, and with the
answer's words up to the value behind it. Only the second lets the queries that cut see what is wanted. H2O, whose sums
run over all queries, TOVA, whose one row is a mean over all heads, and streaming, which looks at nothing, stand beside.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from claims.block_choice import up_to_the_value
from claims.scores import Scores, difference
from claims.second_turn import chosen_variants
from claims.subject import Document, Subject, table
from kvcli.variants import Variant

ENDS = ("question", "answer's words")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what is compared."""
    parser.add_argument("--cutting", nargs="+", default=["snapkv", "pyramidkv", "cake", "tova", "h2o", "streaming"])
    parser.add_argument("--cut-budget", type=int, default=512, help="tokens that are kept")


def run(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    compared = chosen_variants(args.cutting, [args.cut_budget])
    found: dict[str, dict[str, list[float]]] = {end: defaultdict(list) for end in ENDS}
    for document in subject.documents(["niah_single"], args.rows):
        for end, read in zip(ENDS, (document, up_to_the_value(subject, document)), strict=True):
            for label, score in _answers(subject, read, compared):
                found[end][label].append(score)
    rows = []
    for label in found[ENDS[0]]:
        question, words = (Scores.of(dict(enumerate(found[end][label]))) for end in ENDS)
        gain, error = difference([words], [question])
        rows.append(
            {
                "variant": label,
                "cut by the question %": question.mean,
                "by the answer's words %": words.mean,
                "gain": round(gain, 1),
                "error": round(error, 1),
            }
        )
    table(f"prompt-end: needles found, by what the queries that cut belong to ({args.rows} documents)", rows)
    return {"rows": rows}


def _answers(subject: Subject, document: Document, compared: Sequence[Variant]) -> list[tuple[str, float]]:
    methods = subject.methods(document, {each.label: each.profile for each in compared})
    logits = subject.read(document, list(methods.values()))
    return [(label, subject.answer(document, method, logits)) for label, method in methods.items()]
