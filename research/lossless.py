"""Text of full attention from drafts: what is accepted, how fast it is, and whether it is the same text.

    python research/lossless.py             # about three minutes; results/lossless.json
    python research/lossless.py --table

SmolLM2 has read the beginning of three of the texts of `real_models.py` and goes on for 64 tokens, greedily, under
full attention and with `--lossless N`. Cases are run in turn, round after round, of the same saved KV; a speed is the
ratio of two runs of a round, of tokens a second after the first.
"""

import itertools
import json
import tempfile
from pathlib import Path
from statistics import fmean

from real_models import RESULTS, fetch, texts

# `real_models` makes the benchmarks' helpers importable.
from common import arguments, ratios, save  # isort: skip

import kvcli

TEXTS, LENGTHS = ("documentation", "licences", "code"), (4000,)
METHODS, DRAFTED, GENERATED = ("retroinfer", "freekv", "streaming"), (2, 8), 64


def main() -> None:
    """Generate, compare, and write what was found; or print its table."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="print what is in the file")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "lossless.json")
    args = parser.parse_args()
    if not args.table:
        measure(args.rounds, args.output)
    print(table(json.loads(args.output.read_text())["rows"]))


def measure(rounds: int, output: Path) -> None:
    """Run every case of every text in turn."""
    model, written = kvcli.load(str(fetch("smollm2"))), texts()
    tokenizer = model.loaded.tokenizer
    rows = []
    for kind, length in itertools.product(TEXTS, LENGTHS):
        ids = tokenizer(written[kind].read_text()[: 10 * length], add_special_tokens=False)["input_ids"][:length]
        document, options = tokenizer.decode(ids), {"raw": True, "ignore_eos": True, "max_tokens": GENERATED}
        with tempfile.TemporaryDirectory() as folder:
            kept = str(Path(folder) / "kv")
            model.generate(document, method="full", save_kv=kept, raw=True, max_tokens=1)
            found: dict[tuple[str, int], list[kvcli.Answer]] = {}
            for _ in range(rounds):
                for case in (("full", 0), *itertools.product(METHODS, DRAFTED)):
                    more = {"lossless": case[1]} if case[1] else {}
                    answer = model.generate(document, method=case[0], kv=kept, **options, **more)
                    found.setdefault(case, []).append(answer)
        full = found.pop(("full", 0))
        for (method, drafted), answers in found.items():
            drafts = answers[0].statistics["drafts"]
            rates = [[each.statistics["timing"]["tokens_per_s"] for each in run] for run in (answers, full)]
            row = {"text": kind, "length": length, "method": method, "drafted": drafted}
            row |= {"accepted": drafts["accepted"] / drafts["drafted"], "passes": drafts["passes"]}
            same = all(one.token_ids == other.token_ids for one, other in zip(answers, full, strict=True))
            rows.append(row | {"speedup": ratios(*rates), "same": same})
            print(rows[-1], flush=True)
    save(output, {"rounds": rounds, "generated": GENERATED, "rows": rows})


def table(rows: list[dict]) -> str:  # type: ignore[type-arg]
    """Make a table: shares are means over texts, speeds the range of their medians."""
    lines = ["| tokens | method | N | accepted | tokens a pass | times as fast as `full` | same texts |"]
    lines.append("| --- " * 7 + "|")
    for length, method, drafted in itertools.product(LENGTHS, METHODS, DRAFTED):
        mine = [row for row in rows if (row["length"], row["method"], row["drafted"]) == (length, method, drafted)]
        speeds = sorted(row["speedup"]["median"] for row in mine)
        share, passes = (fmean(row[key] for row in mine) for key in ("accepted", "passes"))
        same = f"{sum(row['same'] for row in mine)} of {len(mine)}"
        speed = f"{speeds[0]:.2f} to {speeds[-1]:.2f}"
        lines.append(
            f"| {length:,} | `{method}` | {drafted} | {share:.0%} | {GENERATED / passes:.1f} | {speed} | {same} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
