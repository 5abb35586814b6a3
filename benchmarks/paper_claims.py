"""What the papers claim, checked on the bundled demo model: `all`, one study, or `orders`, which compares the methods.

    python benchmarks/paper_claims.py all
    python benchmarks/paper_claims.py refreekv --thresholds 0.001 0.01 0.1 --rows 50
    python benchmarks/paper_claims.py second-turn --rows 40 -o second.json
    python benchmarks/paper_claims.py orders --second-turn second.json --eval predictions.jsonl -o orders.json

Documents are the evaluation split of kvcli.quality.tasks, seeded. The module of a study in `claims/` says what it
measures. The demo model is tiny (4 layers, heads of 64 channels): figures of the papers' models cannot be expected,
orders can.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from claims import (
    actqkv_probe,
    block_choice,
    fier_recall,
    orders,
    parts,
    prompt_end,
    query_heads,
    refreekv,
    second_turn,
    shadowkv,
    subject,
)
from common import add_output, save

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="study", required=True)
    every = commands.add_parser("all", help="all studies, written to results/paper_claims.json")
    subject.add_arguments(every)
    add_output(every, "paper_claims")
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
