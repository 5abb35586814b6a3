"""Kill runs at random moments, let them go on, and hold what they say in the end against a run that nobody killed.

    python benchmarks/kill_resume.py                    all methods, greedy and sampled, 5 kills each: five minutes
    python benchmarks/kill_resume.py --method freekv --kills 20

Every run is a process of its own that ends by SIGKILL, at a moment drawn evenly over the time that it takes. It fails
where tokens, counts or the method's statistics differ, or where more tokens were lost than one writing is apart from
the next.
"""

import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from common import arguments, save

from kvcli.generate import generate, resume
from kvcli.inputs.options import Keep
from kvcli.inputs.profiles import known_settings, resolve_profile
from kvcli.inputs.prompts import Prompt
from kvcli.methods import method_names
from kvcli.models.loading import ModelSpec
from kvcli.request import GenerationRequest
from kvcli.runtime.checkpoint.kept_run import KeptRun
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.report import Report

ROOT = Path(__file__).parent.parent
SMALL = {"budget": 256, "sink": 32, "window": 32, "page_size": 16, "prefill_window": 256}


class Counting(Observer):
    """Counts the tokens of the longest sequence in memory that the parent process sees."""

    def __init__(self, seen: mmap.mmap):
        self.seen = seen

    def step(self, done: int, total: int) -> None:  # noqa: ARG002
        """Note it."""
        self.seen[:8] = struct.pack("q", done)


@dataclass(frozen=True)
class Case:
    """One method, greedy or sampled, and how it is run."""

    method: str
    temperature: float
    tokens: int
    every: int

    def request(self, keep: Keep | None) -> GenerationRequest:
        """What is asked: two documents, of which one is short, and two samples where tokens are drawn."""
        known = known_settings(self.method, None)
        profile = resolve_profile(self.method, overrides={key: SMALL[key] for key in SMALL if key in known})
        text = (ROOT / "examples" / "needle-4k.txt").read_text()[:6000]
        prompts = (Prompt("long", text, "What is the code?"), Prompt("short", text[:1500], "Who?"))
        samples = 2 if self.temperature else 1
        sampling = Sampling(self.tokens, self.temperature, seed=1, ignore_eos=True, num_samples=samples)
        return GenerationRequest(profile, prompts, sampling, keep=keep)


def outcome(report: Report) -> list[object]:
    """All of a report that does not depend on the clock."""
    rows = [replace(each, timing=None, steps=[]) for each in report.sequences]  # type: ignore[arg-type]
    return json.loads(json.dumps([row.__dict__ for row in rows], default=lambda each: each.__dict__))


def child(case: Case, directory: Path, seen: mmap.mmap, kill_after: float | None) -> float:
    """Run a case in a process of its own, to its end or until it is killed; returns the seconds that it took."""
    started = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            keep = Keep(directory / "kept", case.every)
            if (directory / "kept" / "journal.json").exists():
                report = resume(KeptRun.open(keep), Counting(seen))
            else:
                shutil.rmtree(directory / "kept", ignore_errors=True)
                report = generate(ModelSpec(), case.request(keep), Counting(seen))
            (directory / "outcome.json").write_text(json.dumps(outcome(report)))
            code = 0
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not (os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0):
        sys.exit(f"{case}: the process failed")
    return time.perf_counter() - started


def kept_tokens(directory: Path) -> int:
    """How many tokens the longest sequence has in the last writing."""
    if not (directory / "kept" / "journal.json").exists():
        return 0
    kept = KeptRun.open(Keep(directory / "kept"))
    try:
        if (report := kept.report()) is not None:
            return max(sequence.output_tokens for sequence in report.sequences)
        if kept.journal.tree() is None:
            return 0
        list(kept.journal.parts())
        return max(count for name, count in kept.journal.written.items() if name.endswith("token_ids"))
    finally:
        kept.close()


def run(case: Case, kills: int, draw: random.Random) -> dict[str, object]:
    """Kill a case so many times, one process after the other, and let the last one finish."""
    lost, finished_early = [], 0
    with tempfile.TemporaryDirectory() as folder:
        directory, seen = Path(folder), mmap.mmap(-1, 8)
        took = child(case, directory, seen, None)
        expected = json.loads((directory / "outcome.json").read_text())
        shutil.rmtree(directory / "kept")
        (directory / "outcome.json").unlink()
        for _ in range(kills):
            seen[:8] = struct.pack("q", 0)
            child(case, directory, seen, draw.uniform(0, took))
            if (directory / "outcome.json").exists():
                finished_early += 1
                shutil.rmtree(directory / "kept")
                (directory / "outcome.json").unlink()
                continue
            (reached,) = struct.unpack("q", seen[:8])
            if reached:
                lost.append(reached - kept_tokens(directory))
        child(case, directory, seen, None)
        same = json.loads((directory / "outcome.json").read_text()) == expected
    worst = max(lost, default=0)
    return {
        "method": case.method,
        "temperature": case.temperature,
        "kills": kills - finished_early,
        "tokens_lost": worst,
        "same": same and worst <= case.every,
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = arguments(__doc__, "kill_resume")
    parser.add_argument("--method", default=",".join(method_names()), help="methods, comma-separated")
    parser.add_argument("--kills", type=int, default=5, help="of each method, greedy and sampled")
    parser.add_argument("--tokens", type=int, default=48, help="of each sequence")
    parser.add_argument("--every", type=int, default=4, help="tokens from one writing to the next")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    given = parser.parse_args()
    draw, rows = random.Random(given.seed), []
    for method in given.method.split(","):
        for temperature in (0.0, 0.8):
            rows.append(run(Case(method, temperature, given.tokens, given.every), given.kills, draw))
            print(*rows[-1].values(), flush=True)
    save(given.output, {"rows": rows, "kills": sum(int(str(row["kills"])) for row in rows)})
    if not all(row["same"] for row in rows):
        sys.exit("some runs did not go on as if nobody had killed them")


if __name__ == "__main__":
    main()
