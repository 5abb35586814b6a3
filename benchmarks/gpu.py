"""The device path on a GPU: what is right, what the machine allows, and how far a decode step is from it.

    python benchmarks/gpu.py                      # as many parts as nine minutes have room for; wants an H100 or H200
    python benchmarks/gpu.py --parts kernels,rates   # anew; other parts stay in the file as this commit measured them
    python benchmarks/gpu.py --resume             # what the file lacks of this commit; again until it has all
    python benchmarks/gpu.py --resume FILE -o ELSEWHERE   # what FILE lacks; FILE stays as it is
    python benchmarks/gpu.py --smoke              # what a CPU can do of it: tiny shapes, references for kernels

It runs from a checkout that is not installed, too (`PYTHONPATH=. python benchmarks/gpu.py`). `machine`, `kernels`,
`rates` and `packed` need torch, triton, numpy and typing_extensions; the other parts need transformers, pydantic and
psutil as well.
A part whose package is not here says so and is not run; the others are.
Without a package index in reach: `pip download -d DIR pydantic psutil` elsewhere, for that machine's Python, and there
`pip install --no-index --find-links DIR pydantic psutil`.

Parts run in the order of what matters most: whether the device path is right, what the machine allows, and the steps
that the targets are about. Every part runs in a process of its own within a limit of time, and every row is in the file
as soon as it is found: a part that hangs or fails, or a call that is cut off, loses only what was being measured, and
`--resume` measures that and the rest. What was not run is recorded as not run, with the reason. The exit code is 1
where a kernel, a selection or a copy differs from its reference.

Weights and prompts are made up, and queries of made-up models mean nothing: which heads are corrected and how many
pages a step exchanges is therefore forced to given rates (`kvcli.runtime.gpu.pipeline`), after all the work of finding
it out was done. The KV of made-up contexts lies in one pool of host memory that all layers share, because that of the
longest would not fit; it is far larger than the processor's caches, and pinned in pages of the same size, so that this
changes what is read, not how fast.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from common import RESULTS, arguments, provenance, write
from gpu_parts.frame import Ended, Found, Rows, in_processes, name_of
from gpu_parts.setting import Setting, full, smoke
from gpu_parts.targets import judged, show, wrong


class BenchmarkPart(NamedTuple):
    """A function of a module in `gpu_parts`, the seconds it may take, what it finds out, and whether it takes times.

    Parts that take no times run side by side: what they do is to compile.
    """

    module: str
    name: str
    limit: float
    about: str
    timed: bool = True


PARTS = (
    BenchmarkPart("device", "machine", 30, "the device"),
    BenchmarkPart("device", "kernels", 240, "every kernel against its reference", timed=False),
    BenchmarkPart("agreement", "agreement", 150, "the pipeline over slots against the blocking one", timed=False),
    BenchmarkPart("agreement", "texts", 150, "every method on the device against the same on a CPU", timed=False),
    BenchmarkPart("device", "rates", 60, "copies on the device and across the bus, pages gathered by recall"),
    BenchmarkPart("steps", "speed", 60, "a decode step at a short context"),
    BenchmarkPart("steps", "phases", 45, "where the time of a step goes"),
    BenchmarkPart("peers", "peers", 75, "transformers' caches"),
    BenchmarkPart("steps", "length", 75, "a decode step at a context 32 times as long"),
    BenchmarkPart("peers", "reading", 120, "prefill"),
    BenchmarkPart("steps", "batch", 90, "batches, and recall that is blocking and page by page"),
    BenchmarkPart("methods", "methods_middle", 240, "every method beside freekv, middle context"),
    BenchmarkPart("methods", "throughput", 240, "ShadowKV against full attention, each at its largest batch"),
    BenchmarkPart("products", "packed", 120, "products with weights packed as in GGUF files"),
    BenchmarkPart("methods", "methods_short", 180, "every method beside freekv, short context"),
    BenchmarkPart("methods", "methods_batch", 300, "every method beside freekv, a batch at the short context"),
    BenchmarkPart("methods", "methods_large", 240, "methods that offload beside freekv, a batch at the middle context"),
    BenchmarkPart("methods", "methods_pieces", 240, "every method served in pieces beside freekv, short context"),
    BenchmarkPart("steps", "layers", 120, "the kernels of a layer, middle context"),
    BenchmarkPart("steps", "other", 45, "another architecture"),
    BenchmarkPart("steps", "ablation", 60, "recall with its parts switched off"),
    BenchmarkPart("peers", "static", 110, "transformers' static cache, compiled"),
)
"""What counts most is first; a call of nine minutes has room for six or seven of them at their limits."""

NOT_ASKED: dict[str, Any] = {"state": "not run", "error": "not asked for", "rows": []}
SECONDS = 510.0  # for everything but imports
ROUNDS_END = 0.8  # of a part's limit: rounds that are still to come then are left out


def main() -> None:
    """Run the parts, print the tables, keep the results."""
    parser = arguments(__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--parts", help=f"only some, comma-separated: {', '.join(names)}")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="FILE",
        help="leave out what FILE (by default the one that is written) has, done by this commit on this device",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    parser.add_argument("--commit", help="commit of this tree, where git cannot tell")
    parser.add_argument("-o", "--output", type=Path, help="JSON file; the committed one, or none with --smoke")
    args = parser.parse_args()
    chosen = names if args.parts is None else args.parts.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"no part is called {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    setting = smoke() if args.smoke else full()
    output = args.output or (None if args.smoke else RESULTS / "gpu.json")
    origin = provenance(args.commit)
    prepare()
    deadline = time.monotonic() + args.seconds
    source = output if args.resume in (None, True) else Path(args.resume)
    if source is not output and not source.is_file():
        parser.error(f"--resume: there is no file {source}")
    results: dict[str, Any] = {}
    if args.resume or args.parts is not None:
        results = measured(source, setting, origin)
    if results:  # of the same device, as has to be seen
        chosen = ["machine", *chosen]
    before = device_of(results)

    def keep() -> None:
        if output is not None:
            table = judged(results, not setting.smoke)
            write(output, {"smoke": setting.smoke, "targets": table, "parts": results}, origin)

    for parts in side_by_side(PARTS):
        asked = [part for part in parts if part.name in chosen]
        for part in parts:
            if part not in asked:
                results.setdefault(part.name, NOT_ASKED)
        again = [part for part in asked if not args.resume or part.name == "machine"]
        left = [part for part in asked if part in again or results.get(part.name, NOT_ASKED)["state"] != "done"]
        if not left:
            continue
        for part in left:
            print(f"{part.name}: {part.about}", flush=True)
        known = {part: [] if part in again else results.get(part.name, NOT_ASKED)["rows"] for part in left}
        for name, found in run(known, setting, results, deadline - time.monotonic()):
            results[name] = found
            if name != "machine":
                keep()
        if left[0].name == "machine" and before not in (None, device_of(results)):
            print(f"  {source} was measured on {before}: nothing of it is taken", flush=True)
            results = {"machine": results["machine"]}
        keep()
        if left[0].name == "machine" and results["machine"]["error"]:
            sys.exit(f"no device to measure: {results['machine']['error']}\n--smoke runs it small on the CPU")
    show(results, judged(results, not setting.smoke))
    if output is not None:
        print(f"written to {output}")
    if lines := wrong(results):
        sys.exit("\n".join(lines))


def measured(source: Path | None, setting: Setting, origin: dict[str, Any]) -> dict[str, Any]:
    """Read the parts that a file has of the same commit and sizes."""
    if source is None or not source.exists():
        return {}
    before = json.loads(source.read_text())
    same = (before["smoke"], before["provenance"]["commit"]) == (setting.smoke, origin["commit"])
    if not same:
        print(f"nothing is taken of {source}, which is of another commit or of other sizes", flush=True)
    return before["parts"] if same else {}


def device_of(results: dict[str, Any]) -> str | None:
    """Name the device of results that know it."""
    rows = results.get("machine", {"rows": []})["rows"]
    return rows[0]["device"] if rows else None


def side_by_side(parts: Sequence[BenchmarkPart]) -> Iterator[list[BenchmarkPart]]:
    """Yield parts one by one, and those together that follow one another and take no times."""
    for timed, group in groupby(parts, lambda part: part.timed):
        together = list(group)
        yield from ([part] for part in together) if timed else [together]


def run(
    known: Mapping[BenchmarkPart, Rows], setting: Setting, results: Mapping[str, Any], seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run parts side by side, each in its own process, within `seconds` and their limits.

    `known` has the rows that each had before. Yields after every message a part's name and what it has: rows, state,
    time taken. Until a part has ended it is one that was cut off, which is what the file says if nothing more comes.
    """
    limit = min(seconds, max(part.limit for part in known))
    if limit <= 0:
        for part in known:
            yield part.name, results.get(part.name, NOT_ASKED) | {"state": "not run", "error": "no time was left"}
        return
    rows = {part.name: list(found) for part, found in known.items()}
    taken = {name: results.get(name, {}).get("seconds", 0.0) if found else 0.0 for name, found in rows.items()}
    started, ends = time.monotonic(), dict.fromkeys(rows, Ended("it was cut off"))
    setting = replace(setting, deadline=started + ROUNDS_END * limit)
    works = {part.name: partial(rows_of, part, setting, Found(results, found)) for part, found in known.items()}
    for name, message in in_processes(works, limit, len(works)):
        if isinstance(message, Ended):
            ends[name] = message
        else:
            names = [name_of(row) for row in message]
            rows[name] = [row for row in rows[name] if name_of(row) not in names] + message
        end = ends[name]
        state = "done" if end.error is None else "not run" if end.not_here else "not finished"
        seconds = round(taken[name] + time.monotonic() - started, 1)
        yield name, {"state": state, "error": end.error, "seconds": seconds, "rows": rows[name]}
        if isinstance(message, Ended) and message.error is not None:
            print(f"  {name} {state}: {message.error}", flush=True)


def rows_of(part: BenchmarkPart, setting: Setting, found: Found) -> Iterator[Rows]:
    """Import a part and run it; what it needs may be missing, which is its own failure."""
    module = importlib.import_module(f"gpu_parts.{part.module}")
    rows: Iterator[Rows] = getattr(module, part.name)(setting, found)
    return rows


def prepare() -> None:
    """Get ready to fork: import what most parts need; those that can do without it go on without.

    Any of these may be absent; nothing that a part imports for itself is imported before.
    """
    # Asking whether there is a device must not start CUDA: a process that has started it cannot be forked.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # kvcli is imported by now. Further on, `kernels/` of a checkout on the path would shadow the package of that name
    # that transformers looks for.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parents[1]]
    try:
        importlib.import_module("kvcli.runtime.engine")
        importlib.import_module("transformers.models.llama.modeling_llama")
        importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    except ImportError as error:
        print(f"only machine, kernels, rates and packed can run: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
