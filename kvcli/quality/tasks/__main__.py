"""Write task rows: `python -m kvcli.quality.tasks niah_single --tokenizer DIR --length 4096 -o rows.jsonl`.

One JSON object a line in RULER's row format, or with `--text` the bare input of a single row.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcli.errors import KvcliError
from kvcli.quality.tasks import TASKS, make_row


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and write the rows. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvcli.quality.tasks", description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json; default: the demo model's")
    parser.add_argument("--length", type=int, default=4096, help="tokens of document and question")
    parser.add_argument("--depth", type=float, help="depth in the document, 0 start to 1 end; default: random")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", action="store_true", help="write only the input of one row instead of JSON lines")
    parser.add_argument("-o", "--output", type=Path, help="file to write instead of standard output")
    options = parser.parse_args(arguments)
    if options.text and options.rows != 1:
        parser.error("--text writes one row")

    # Deferred: the tasks themselves need no tokenizer library.
    from tokenizers import Tokenizer

    folder = options.tokenizer or Path(__file__).parents[2] / "models" / "demo"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    try:
        rows = [
            make_row(
                options.task,
                length=options.length,
                seed=options.seed,
                index=index,
                depth=options.depth,
                count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
            )
            for index in range(options.rows)
        ]
    except KvcliError as error:
        print(f"{error.what}: {error.hint}", file=sys.stderr)
        return int(error.exit_code)
    text = rows[0].input + "\n" if options.text else "".join(json.dumps(row.as_dict()) + "\n" for row in rows)
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
