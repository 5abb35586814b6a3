"""Kill runs that save, load and keep KV at random moments, and look at what they leave.

    python benchmarks/kill_saved.py               200 kills
    python benchmarks/kill_saved.py --kills 20

Every run is a process of its own that ends by SIGKILL, at a moment drawn evenly over the time that runs take: one saves
a document to a directory of its own, another asks a store about it at the same time, and now and then a third prunes
the store. It fails where a directory is neither whole nor away, where something whole is lost that nobody removed,
where the text of a run that goes on from what is left differs, or where a run that is not killed leaves something
half-made.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import add_output, save

from kvcli.errors import KvcliError
from kvcli.generate import generate
from kvcli.inputs.kv_options import KVOptions
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.prompts import Prompt
from kvcli.models.loading import ModelSpec
from kvcli.request import GenerationRequest
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.saved.folders import TEMPORARY
from kvcli.runtime.saved.manifest import MANIFEST
from kvcli.runtime.saved.reader import verify
from kvcli.runtime.saved.store import KVStore
from kvcli.telemetry.observer import Observer

TEXT = (Path(__file__).parent.parent / "examples" / "needle-4k.txt").read_text()[:8000]
QUESTIONS = ("What is the code?", "Who?", "Where was it, and when?")


def ask(question: str, kv: KVOptions) -> list[int]:
    """Ask the demo model about the document; returns the tokens."""
    profile = resolve_profile("freekv", overrides={"budget": 256, "sink": 32, "window": 32})
    prompts = (Prompt("document", TEXT, question),)
    request = GenerationRequest(profile, prompts, Sampling(max_tokens=4, ignore_eos=True), kv=kv)
    return generate(ModelSpec(), request, Observer()).sequences[0].token_ids


def start(work: Callable[[], object]) -> int:
    """Do some work in a process of its own."""
    if (pid := os.fork()) == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return pid


def run(works: list[Callable[[], object]], kill_after: float | None) -> bool:
    """Do works at once, and kill them after so many seconds; tells whether any was killed."""
    pids = [start(work) for work in works]
    if kill_after is not None:
        time.sleep(kill_after)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    return any(os.WIFSIGNALED(os.waitpid(pid, 0)[1]) for pid in pids)


def whole(folder: Path) -> bool:
    """Tell whether a directory is whole; one that is there and is not whole is a failure."""
    if not folder.exists():
        return False
    verify(folder)  # raises where it is not
    return True


def kill(times: int, folder: Path, seed: int) -> dict[str, int]:
    """Kill so many runs; returns what was seen.

    Raises:
        KvcliError: something half-made has a name.
        AssertionError: something whole was lost, or a text differs.
    """
    draw, store = random.Random(seed), folder / "store"
    expected = {question: ask(question, KVOptions()) for question in QUESTIONS}
    begun = time.perf_counter()
    run([lambda: ask(QUESTIONS[0], KVOptions(save=folder / "first"))], None)
    lasts = time.perf_counter() - begun
    shutil.rmtree(folder / "first")
    seen = {"kills": 0, "rounds": 0, "saved": 0, "entries": 0, "loads": 0}
    complete: set[Path] = set()
    while seen["kills"] < times:
        target, question = folder / f"kv-{seen['rounds']}", draw.choice(QUESTIONS)
        works: list[Callable[[], object]] = [
            lambda: ask(question, KVOptions(save=target)),  # noqa: B023 - it runs before the next round
            lambda: ask(question, KVOptions(cache=store)),  # noqa: B023
        ]
        pruned = draw.random() < 0.1
        if pruned and store.exists():
            works.append(lambda: KVStore(store).prune(0))
        killed = run(works, draw.uniform(0, 2.5 * lasts))
        seen["kills"] += killed
        seen["rounds"] += 1
        if whole(target):
            seen["saved"] += 1
            assert ask(question, KVOptions(use=target)) == expected[question], "another text from what was saved"
            seen["loads"] += 1
            shutil.rmtree(target)
        found = {entry.folder for entry in KVStore(store).entries()}
        assert pruned or complete <= found, f"lost: {complete - found}"
        complete = {entry for entry in found if whole(entry)}
        seen["entries"] = max(seen["entries"], len(complete))
        assert all((path / MANIFEST).exists() for path in store.iterdir() if not path.name.startswith(TEMPORARY))
        if draw.random() < 0.2:
            assert ask(question, KVOptions(cache=store)) == expected[question], "another text from the store"
            seen["loads"] += 1
    ask(QUESTIONS[0], KVOptions(save=folder / "last", cache=store))  # clears what the killed ones have left
    left = [path for parent in (folder, store) for path in parent.iterdir() if path.name.startswith(TEMPORARY)]
    assert not left, f"left: {left}"
    return seen


def main() -> None:
    """Run, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    add_output(parser, "kill_saved")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            seen = kill(given.kills, Path(folder), given.seed)
        except (KvcliError, AssertionError) as error:
            sys.exit(f"failed: {error}")
    print(", ".join(f"{number} {name}" for name, number in seen.items()))
    save(given.output, {"seed": given.seed, **seen})


if __name__ == "__main__":
    main()
