"""Why methods that cut a prompt by its last queries lose the very fact it asks for: nothing there looks at it yet.

SnapKV, PyramidKV and CAKE keep what the last queries of a prompt look at; the papers' models look for the answer while
they read the question. The demo model repeats the question's words first ("The access code of Amber is") and
fetches the value at the last of them. Each document is read twice: as it is, its end being the question, and with the
answer's words up to the value behind it. Only the second lets the queries that cut see what is wanted. H2O, whose sums
run over all queries, TOVA, whose one row is a mean over all heads, and streaming, which looks at nothing, stand beside.

`first token kept` and `rest kept` say what is left of the value after the second cut, in the KV head of all layers that
keeps most of it: the last query looks at the value's first token alone, and a rule that keeps no neighbours loses the
rest.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from block_choice import up_to_the_value, value_tokens
from second_turn import chosen_variants
from subject import Document, Scores, Subject, difference, percent, table

from kvcli.inputs.variants import Variant
from kvcli.methods.contract import AnyMethod

ENDS = ("question", "answer's words")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what is compared."""
    parser.add_argument("--cutting", nargs="+", default=["snapkv", "pyramidkv", "cake", "tova", "h2o", "streaming"])
    parser.add_argument("--cut-budget", type=int, default=512, help="tokens that are kept")


def run(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print."""
    compared = chosen_variants(args.cutting, [args.cut_budget])
    found: dict[str, dict[str, list[float]]] = {end: defaultdict(list) for end in ENDS}
    values: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for document in subject.documents(["niah_single"], args.rows):
        for end, read in zip(ENDS, (document, up_to_the_value(subject, document)), strict=True):
            for label, score, held in _answers(subject, read, compared):
                found[end][label].append(score)
                if end == ENDS[1]:
                    values[label].append(held)
    kept = {label: [percent(parts) for parts in zip(*held, strict=True)] for label, held in values.items()}
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
                "first token kept %": kept[label][0],
                "rest kept %": kept[label][1],
            }
        )
    table(f"prompt-end: needles found, by what the queries that cut belong to ({args.rows} documents)", rows)
    return {"rows": rows}


def _answers(
    subject: Subject, document: Document, compared: Sequence[Variant]
) -> list[tuple[str, float, tuple[float, float]]]:
    methods = subject.methods(document, {each.label: each.profile for each in compared})
    logits = subject.read(document, list(methods.values()))
    value = value_tokens(subject, document)
    held = [_held(method, value) for method in methods.values()]  # before an answer drops more
    scores = [subject.answer(document, method, logits) for method in methods.values()]
    return list(zip(methods, scores, held, strict=True))


def _held(method: AnyMethod, value: range) -> tuple[float, float]:
    """Part kept of the value's first token and of the others, in the KV head that keeps most of it."""
    caches = list(method.retrieval.values()) or method.caches
    masks = torch.stack([cache.attended()[:, value.start : value.stop] for cache in caches]).float()  # [layers, Hk, n]
    return float(masks[..., 0].max()), float(masks[..., 1:].mean(-1).max())
