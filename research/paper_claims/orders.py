"""Which method stands above which: the orders that the papers report, one by one, at equal budgets.

The second turn (`second-turn`) is measured, or read from its results; its first turn is one needle among many. Files of
`kvcli eval` add tasks. Of every claim and budget:

    difference   mean score of the methods on the left less that of those on the right, and its standard error,
                 paired over the documents (with --json of kvcli eval, which has means alone, as if independent);
                 the mean over the tasks
    verdict      "above": confirmed beyond two standard errors, contradicted beyond as many the other way.
                 "close": confirmed where every pair is within `MARGIN` points, contradicted where one is farther apart
                 and by more than two errors. Else it is open.
    pairs        how many single pairs of methods would be confirmed alone, and the one that speaks most against it

Tasks that full attention itself answers below `CEILING` are left out: nothing can be ordered there. Of a claim about
what lies outside a window, documents count whose fact stands farther from the end than the budget. "turn's cost" is the
first turn's score less the second's.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import second_turn
from second_turn import DROPPING, RETRIEVING
from subject import Scores, Subject, difference, table

Table = dict[str, dict[str, Scores]]
"""Task -> variant -> scores."""

MARGIN, CEILING = 5.0, 50.0  # points; per cent

FIRST, SECOND, COST = "first turn", "second turn", "turn's cost"
CUTTING = ("h2o", "snapkv", "pyramidkv", "cake")  # by what the prompt's queries look at
NEEDLES = (FIRST, "niah")
MANY_NEEDLES = (FIRST, "niah_multi")
EVERYTHING = (FIRST, SECOND, "niah", "vt")


@dataclass(frozen=True)
class Claim:
    """Methods on the left stand above those on the right, or close to them, in tasks that begin with one of `tasks`."""

    name: str
    source: str
    left: Sequence[str]
    right: Sequence[str]
    tasks: Sequence[str] = EVERYTHING
    relation: Literal["above", "close"] = "above"
    outside: bool = False


CLAIMS = (
    Claim("retrieval above dropping, many needles", "arXiv 2505.13109, section 2", RETRIEVING, DROPPING, MANY_NEEDLES),
    Claim("retrieval above dropping, second turn", "arXiv 2410.21465, figure 7", RETRIEVING, DROPPING, (SECOND,)),
    Claim("what was cut for one question misses another", "arXiv 2410.21465, figure 7", CUTTING, ["full"], (COST,)),
    Claim("retrieval misses nothing", "arXiv 2410.21465, figure 7", RETRIEVING, ["full"], (COST,), "close"),
    Claim("ArkVale close to FreeKV", "arXiv 2505.13109, tables 2 and 3", ["arkvale"], ["freekv"], relation="close"),
    Claim("Quest close to FreeKV", "arXiv 2505.13109, tables 2 and 3", ["quest"], ["freekv"], relation="close"),
    Claim("ArkVale close to Quest", "arXiv 2505.13109, tables 2 and 3", ["arkvale"], ["quest"], relation="close"),
    Claim("streaming loses what lies outside", "arXiv 2410.21465", ["full"], ["streaming"], NEEDLES, outside=True),
    Claim("H2O loses what lies outside", "NeurIPS 2024 (ArkVale)", ["full"], ["h2o"], NEEDLES, outside=True),
    Claim("SnapKV loses what lies outside", "arXiv 2410.21465", ["full"], ["snapkv"], NEEDLES, outside=True),
    Claim("ArkVale above what evicts", "NeurIPS 2024, section 6.3", ["arkvale"], ["streaming", "h2o", "tova"]),
    Claim("RazorAttention above H2O, streaming", "arXiv 2407.15891, section 4", ["razor"], ["h2o", "streaming"]),
    Claim("ShadowKV above Quest, InfiniGen, Loki", "arXiv 2410.21465", ["shadowkv"], ["quest", "infinigen", "loki"]),
    Claim("FIER above Quest", "arXiv 2508.08256, section 4.3", ["fier"], ["quest"]),
    Claim("InfiniGen above H2O", "arXiv 2406.19707, section 5", ["infinigen"], ["h2o"]),
    Claim("TOVA above H2O, streaming", "arXiv 2401.06104", ["tova"], ["h2o", "streaming"]),
    Claim("PyramidKV above SnapKV, H2O", "arXiv 2406.02069, section 5", ["pyramidkv"], ["snapkv", "h2o"]),
    Claim("CAKE above SnapKV, PyramidKV", "arXiv 2503.12491, section 5", ["cake"], ["snapkv", "pyramidkv"]),
    Claim("RaaS close to Quest", "arXiv 2502.11147, section 4", ["raas"], ["quest"], relation="close"),
    Claim("Twilight close to Quest", "arXiv 2502.02770, section 5", ["twilight"], ["quest"], relation="close"),
    Claim("ReFreeKV close to full", "arXiv 2502.16886, section 4", ["refreekv"], ["full"], relation="close"),
    Claim("ActQKV above InfLLM", "arXiv 2502.13542, section 5", ["actqkv"], ["infllm"]),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say where scores come from."""
    second_turn.add_arguments(parser)
    parser.add_argument("--second-turn", metavar="FILE", help="results of `second-turn`: not measured anew")
    parser.add_argument("--eval", nargs="+", default=[], metavar="FILE", help="--predictions or --json of kvcli eval")


def run(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    """Measure, judge and print."""
    if args.second_turn:
        turns = json.loads(Path(args.second_turn).read_text())["second-turn"]
    else:
        turns = second_turn.run(subject, args)
    scores: Table = {
        turn: {variant: Scores.of(dict(enumerate(each))) for variant, each in by_variant.items()}
        for turn, by_variant in turns["scores"].items()
    }
    scores[COST] = {
        variant: Scores.of({index: score - later[index] for index, score in enumerate(first)})
        for variant, first in turns["scores"][FIRST].items()
        for later in [turns["scores"][SECOND][variant]]
    }
    for path in args.eval:
        for task, by_variant in read_scores(Path(path)).items():
            scores.setdefault(task, {}).update(by_variant)
    rows = [row for claim in CLAIMS for row in judge(claim, scores, args.turn_budgets, turns["tokens_behind"])]
    table("orders: what the papers report", rows)
    low = {task: each["full"].mean for task, each in scores.items() if "full" in each and not _answered(task, each)}
    note = ", ".join(f"{task} ({mean:.0f} %)" for task, mean in low.items()) or "none"
    print(f"  left out, because full attention does not answer them: {note}")
    return {"rows": rows, "left out": low, "turns": turns}


def read_scores(path: Path) -> Table:
    """Read the scores of a `kvcli eval` run: its --predictions (one for each document) or its --json (means alone)."""
    first, *lines = path.read_text().splitlines()
    head = json.loads(first)
    return _of_results(head["results"]) if "results" in head else _of_predictions(map(json.loads, lines))


def _of_results(results: Sequence[dict[str, Any]]) -> Table:
    table: Table = defaultdict(dict)
    for result in results:
        if result["metric"] != "ppl":
            score = result["score"]
            table[_task(result)][result["variant"]] = Scores(score["value"], score["stderr"] or 0.0)
    return table


def _of_predictions(predictions: Any) -> Table:
    samples: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in predictions:
        if each["score"] is not None:
            samples[_task(each), each["variant"]][each["index"]].append(each["score"])
    table: Table = defaultdict(dict)
    for (task, variant), found in samples.items():
        table[task][variant] = Scores.of({index: statistics.mean(scores) for index, scores in found.items()})
    return table


def _task(entry: Mapping[str, Any]) -> str:
    parts = [entry["task"], entry["length"], entry["depth"]]
    return " ".join(str(part) for part in parts if part is not None)


def judge(
    claim: Claim, scores: Table, budgets: Sequence[int], tokens_behind: dict[str, list[int]]
) -> Iterator[dict[str, Any]]:
    """Hold a claim against the scores, budget by budget; nothing where methods of it have none."""
    names = {*claim.left, *claim.right}
    known = {variant for by_variant in scores.values() for variant in by_variant}
    if not any(f"{name} {budget}" in known for name in names for budget in budgets):
        budgets = budgets[:1]  # none of them has a budget
    for budget in budgets:
        tasks = []
        for task, by_variant in scores.items():
            if task.startswith(tuple(claim.tasks)) and _answered(task, by_variant):
                kept = _outside(by_variant, tokens_behind.get(task), budget) if claim.outside else by_variant
                sides = [[_of(kept, name, budget) for name in names] for names in (claim.left, claim.right)]
                if kept and all(each is not None for side in sides for each in side):
                    tasks.append((task, *sides))
        if not tasks:
            continue
        whole = _over_tasks([difference(left, right) for _, left, right in tasks])
        pairs = {
            f"{a} - {b}": _over_tasks([difference([left[i]], [right[j]]) for _, left, right in tasks])
            for (i, a), (j, b) in product(enumerate(claim.left), enumerate(claim.right))
        }
        against = min(pairs, key=lambda pair: pairs[pair][0] if claim.relation == "above" else -abs(pairs[pair][0]))
        verdict = _verdict(claim.relation, *(whole if claim.relation == "above" else pairs[against]))
        alone = [_verdict(claim.relation, *pair) for pair in pairs.values()]
        yield {
            "claim": claim.name,
            "budget": budget,
            "verdict": verdict,
            "difference": round(whole[0], 1),
            "error": round(whole[1], 1),
            "pairs": f"{alone.count('confirmed')}/{len(alone)}",
            "most against": f"{against}: {pairs[against][0]:.1f} +- {pairs[against][1]:.1f}",
            "tasks": ", ".join(task for task, *_ in tasks),
            "source": claim.source,
        }


def _verdict(relation: str, distance: float, error: float) -> str:
    beyond = abs(distance) > 2 * error
    if relation == "close":
        return "confirmed" if abs(distance) <= MARGIN else "contradicted" if beyond else "open"
    return "open" if not beyond else "confirmed" if distance > 0 else "contradicted"


def _over_tasks(differences: Sequence[tuple[float, float]]) -> tuple[float, float]:
    mean = statistics.mean(distance for distance, _ in differences)
    return mean, math.hypot(*(error for _, error in differences)) / len(differences)


def _answered(task: str, by_variant: dict[str, Scores]) -> bool:
    return task == COST or ("full" in by_variant and by_variant["full"].mean >= CEILING)


def _of(by_variant: dict[str, Scores], name: str, budget: int) -> Any:
    """Scores of a method at a budget, or of one that has none."""
    return by_variant.get(f"{name} {budget}", by_variant.get(name))


def _outside(by_variant: dict[str, Scores], behind: list[int] | None, budget: int) -> dict[str, Scores]:
    """Scores of documents whose fact stands farther from the end than the budget; none where that is not known."""
    chosen = {index for index, tokens in enumerate(behind or []) if tokens > budget}
    return {variant: each.among(chosen) for variant, each in by_variant.items()} if chosen else {}
