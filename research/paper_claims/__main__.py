"""What the papers claim, checked on the bundled demo model: `all`, one study, or `orders`, which compares the methods.

    python research/paper_claims all
    python research/paper_claims refreekv --thresholds 0.001 0.01 0.1 --rows 50
    python research/paper_claims second-turn --rows 40 -o second.json
    python research/paper_claims orders --second-turn second.json --eval predictions.jsonl -o orders.json

Documents are the evaluation split of kvcli.quality.tasks, seeded. The module of a study says what it measures. The demo
model is tiny (4 layers, heads of 64 channels): figures of the papers' models cannot be expected, orders can.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import actqkv_probe
import block_choice
import fier_recall
import orders
import parts
import prompt_end
import query_heads
import refreekv
import second_turn
import shadowkv
import subject
from common import save

RESULTS = Path(__file__).parents[1] / "results"

STUDIES: dict[str, Any] = {
    "fier-recall": fier_recall,
    "actqkv-probe": actqkv_probe,
    "block-choice": block_choice,
    "shadowkv": shadowkv,
    "refreekv": refreekv,
    "second-turn": second_turn,
    "prompt-end": prompt_end,
    "parts": parts,
    "query-heads": query_heads,
}
COMPARISONS: dict[str, Any] = {"orders": orders}  # of what studies and `kvcli eval` found: no part of `all`


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        prog="python research/paper_claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="study", required=True)
    every = commands.add_parser("all", help="all studies")
    subject.add_arguments(every)
    every.add_argument("-o", "--output", type=Path, default=RESULTS / "paper_claims.json", help="JSON file to write")
    for name, study in (STUDIES | COMPARISONS).items():
        command = commands.add_parser(name, help=study.__doc__.partition("\n")[0], description=study.__doc__)
        subject.add_arguments(command)
        command.add_argument("-o", "--output", type=Path, help="JSON file to write")
        study.add_arguments(command)
        if name in STUDIES:
            study.add_arguments(every)
    args = parser.parse_args()

    chosen = STUDIES if args.study == "all" else {args.study: (STUDIES | COMPARISONS)[args.study]}
    settings = {name: _as_named(value) for name, value in vars(args).items() if name != "output"}
    results: dict[str, Any] = {}
    with subject.opened(args) as opened:
        for name, study in chosen.items():
            started = time.perf_counter()
            results[name] = study.run(opened, args)
            print(f"  {time.perf_counter() - started:.0f} s")
            if args.output:
                save(args.output, {"model": opened.model.name, "arguments": settings, **results})


def _as_named(setting: Any) -> Any:
    """Name files without the folders of the machine that they lay on, but for the one that they were in."""
    if isinstance(setting, list):
        return [_as_named(each) for each in setting]
    return str(Path(*Path(setting).parts[-2:])) if isinstance(setting, str) and Path(setting).is_absolute() else setting


if __name__ == "__main__":
    main()
