"""Questions on one document, asked in one run, of its saved KV, and one by one: the tokens have to be the same.

    python benchmarks/questions.py                      every method, three budgets, ten questions: about five minutes
    python benchmarks/questions.py --method freekv,quest --questions 3

The document is saved once under `full` and opened under every method that reads prompts exactly. Methods that read by
windows keep no KV that others can open; they are asked together and alone.
"""

import itertools
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, save

import kvcli
from kvcli.errors import KvcliError
from kvcli.methods import get_method, method_names

DOCUMENT = (Path(__file__).parent.parent / "examples" / "needle-4k.txt").read_text()[:8000]
ASKED = ("access code", "locker number", "phone extension", "badge number", "parcel number")
NAMES = ("Nelson", "Victor")
BUDGETS = (256, 512, 1024)
COMMON = {"sink": 32, "window": 32, "page_size": 16, "dense_layers": 1}


def settings(method: str, budget: int) -> dict[str, Any]:
    """What the method knows of these settings."""
    fields = get_method(method).Config.model_fields
    return {name: value for name, value in {**COMMON, "budget": budget}.items() if name in fields}


def main() -> None:
    """Ask, compare, and write what was found."""
    parser = arguments(__doc__, "questions")
    parser.add_argument("--method", default=",".join(method_names()))
    parser.add_argument("--questions", type=int, default=len(ASKED) * len(NAMES))
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()
    every = [f"According to the text above, what is the {what} of {name}?" for what in ASKED for name in NAMES]
    questions = list(itertools.islice(every, args.questions))
    model = kvcli.load()
    rows, differing = [], 0
    with tempfile.TemporaryDirectory() as folder:
        kept = str(Path(folder) / "kv")
        model.generate(DOCUMENT, prompt=questions[0], method="full", max_tokens=1, save_kv=kept)
        for method in args.method.split(","):
            budgets = BUDGETS if "budget" in get_method(method).Config.model_fields else BUDGETS[:1]
            for budget in budgets:
                options = {"method": method, "max_tokens": args.max_tokens, **settings(method, budget)}
                alone = [model.generate(DOCUMENT, prompt=question, **options).token_ids for question in questions]
                together = [answer.token_ids for answer in model.generate(DOCUMENT, prompt=questions, **options)]
                row = {"method": method, "budget": budget, "together": sum(map(list.__eq__, together, alone))}
                try:
                    saved = [answer.token_ids for answer in model.generate(DOCUMENT, questions, kv=kept, **options)]
                    row["saved"] = sum(map(list.__eq__, saved, alone))
                except KvcliError as refused:
                    row["refused"] = str(refused)
                differing += sum(len(questions) - row.get(way, len(questions)) for way in ("together", "saved"))
                rows.append(row)
                print(row, flush=True)
    save(args.output, {"questions": len(questions), "differing": differing, "rows": rows})
    if differing:
        raise SystemExit(f"{differing} answers differ")


if __name__ == "__main__":
    main()
