"""Rows that are made up, runs of them in this process, and what each row came to."""

import json
import random
from pathlib import Path

from kvcli.batch import inflight
from kvcli.batch import run as batch_run
from kvcli.batch.run import BatchRequest
from kvcli.batch.stop import Stop
from kvcli.batch.tally import Tally
from kvcli.inputs.options import Sampling
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.loading import ModelSpec
from kvcli.telemetry.observer import Observer

AT_ONCE = 8
WORDS = "If the mist comes gladly the merchant takes a book to the orchard and opens an old tower".split()  # noqa: SIM905


def ragged(count: int, longest: int, words: int, seed: int = 0) -> list[dict]:
    """Rows of which most are short and some are long."""
    drawn = random.Random(seed)
    return [
        {
            "custom_id": f"r{number}",
            "prompt": " ".join(drawn.choices(WORDS, k=drawn.randint(4, words))),
            "max_tokens": max(2, round(longest ** drawn.random())),
            "ignore_eos": True,
        }
        for number in range(count)
    ]


def with_bad(rows: list[dict]) -> list[dict]:
    """Make every twentieth row bad, in turn by a field, its length and its value."""
    bad = ({"tools": []}, {"prompt": "merchant " * 9000}, {"top_p": 2})
    return [{**row, **bad[n // 20 % 3]} if n % 20 == 7 else row for n, row in enumerate(rows)]


def run_rows(rows, folder: Path, spec=None, method="full", kind=inflight.InFlight, in_order=False, watch=()):
    """Run rows in this process; gives the counts and the texts by name."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    output.unlink(missing_ok=True)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tally = Tally(watchers=list(watch))
    request = BatchRequest(str(source), output, resolve_profile(method), Sampling(), max_inflight=AT_ONCE)
    before = batch_run.InFlight, batch_run.grouped
    batch_run.InFlight = kind
    if in_order:
        batch_run.grouped = lambda jobs: [[job] for job in jobs]
    try:
        batch_run.run(spec or ModelSpec(), request, Observer(), tally, Stop())
    finally:
        batch_run.InFlight, batch_run.grouped = before
    return tally, texts(output)


def texts(path: Path) -> dict[str, str]:
    """What each row came to: its text, or the code of its error."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    found = {
        each["custom_id"]: each["error"]["code"]
        if each["error"]
        else each["response"]["body"]["choices"][0]["message"]["content"]
        for each in results
    }
    assert len(found) == len(results), "a row is there twice"
    return found
