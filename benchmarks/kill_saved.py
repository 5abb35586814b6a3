"""Kill runs that save, load and prune KV in every phase of their work, and look at what they leave.

    python benchmarks/kill_saved.py               200 kills, about two minutes on two cores
    python benchmarks/kill_saved.py --kills 20

Runs are processes of their own: one saves a document to a directory of its own while another asks a store about it,
and in other rounds one prunes the store while another loads from it. An audit hook notes which phase each is in. Rounds
take the phases of the four in turn, late ones first: as the chosen process enters its phase it starts a timer of the
system, which kills it at a moment drawn evenly over as long as the phase takes when nobody is killed, and SIGKILL ends
the other one. So the renames of a manifest and of a directory, a thousandth of a run, are met as often as the rest.
The histogram says in which phases kills fell.

It fails where a directory is neither whole nor away, where something whole is lost that nobody removed, where the text
of a run that goes on from what is left differs, or where a run that is not killed leaves something half-made.
"""

import itertools
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import arguments, save

from kvcli.errors import KvcliError
from kvcli.generate import generate
from kvcli.inputs.options import KVOptions
from kvcli.inputs.profiles import resolve_profile
from kvcli.inputs.prompts import Prompt
from kvcli.models.loading import ModelSpec
from kvcli.request import GenerationRequest
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.saved.files import TEMPORARY
from kvcli.runtime.saved.library import KVStore
from kvcli.runtime.saved.manifest import MANIFEST
from kvcli.runtime.saved.reader import verify
from kvcli.telemetry.observer import Observer

TEXT = (Path(__file__).parent.parent / "examples" / "needle-4k.txt").read_text()[:6000]
SAVING = ("begin", "layers", "manifest", "manifest's name", "directory's name", "end")
WORKS = {
    "save": SAVING,
    "store": SAVING,
    "prune": ("begin", "name taken away", "files removed", "end"),
    "load": ("begin", "end"),
}
PAIRS = (("save", "store"), ("prune", "load"))  # at once
PHASES = tuple(dict.fromkeys(itertools.chain.from_iterable(WORKS.values())))
END_S = 0.02  # that a process stays when its work is done
QUESTIONS = ("What is the code?", "Who?", "Where was it, and when?")


def ask(question: str, kv: KVOptions) -> list[int]:
    """Ask the demo model about the document; returns the tokens."""
    profile = resolve_profile("freekv", overrides={"budget": 256, "sink": 32, "window": 32})
    prompts = (Prompt("document", TEXT, question),)
    request = GenerationRequest(profile, prompts, Sampling(max_tokens=4, ignore_eos=True), kv=kv)
    return generate(ModelSpec(), request, Observer()).sequences[0].token_ids


class Phases:
    """Where a process is in its work, in memory that its parent sees: when it began each phase, 0 for not yet."""

    def __init__(self) -> None:
        self.seen = mmap.mmap(-1, 8 * len(PHASES))
        self.kill_in: tuple[str, float] | None = None  # a phase, and how many seconds after its beginning

    def enter(self, phase: str) -> None:
        """Note that a phase begins, and start the timer in the chosen one."""
        struct.pack_into("d", self.seen, 8 * PHASES.index(phase), time.monotonic())
        if self.kill_in is not None and phase == self.kill_in[0]:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, self.kill_in[1]))  # SIGALRM, which nobody handles

    def begun(self, phase: str) -> float:
        """When a phase began."""
        return float(struct.unpack_from("d", self.seen, 8 * PHASES.index(phase))[0])

    def last(self) -> str:
        """The phase that began last."""
        return max(PHASES, key=self.begun)

    def lasts(self, phase: str) -> float:
        """How long a phase took: until the next one began."""
        return min((at for at in map(self.begun, PHASES) if at > self.begun(phase)), default=0.0) - self.begun(phase)

    def watch(self, event: str, given: tuple[object, ...]) -> None:
        """Tell phases by what the process asks of the system (an audit hook)."""
        names = [str(each) for each in given[:2]]
        if event == "os.mkdir" and TEMPORARY in names[0]:
            self.enter("layers")
        elif event == "open" and names[0].endswith(f"{MANIFEST}.new"):
            self.enter("manifest")
        elif event == "os.rename" and names[0].endswith(".new"):
            self.enter("manifest's name")
        elif event == "os.rename" and TEMPORARY in Path(names[0]).name:
            self.enter("directory's name")
        elif event == "os.rename" and TEMPORARY in Path(names[1]).name:
            self.enter("name taken away")
        elif event == "shutil.rmtree":
            self.enter("files removed")


def start(work: Callable[[], object], phases: Phases) -> int:
    """Do some work in a process of its own, which stays for a moment at its end."""
    if (pid := os.fork()) == 0:
        try:
            phases.enter("begin")
            sys.addaudithook(phases.watch)
            work()
            phases.enter("end")
            time.sleep(END_S)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return pid


def run(works: dict[str, Callable[[], object]], kill_in: tuple[str, float] | None) -> dict[str, Phases]:
    """Do works at once, let the first one be killed in a phase and kill the others then; gives what was killed."""
    phases = {name: Phases() for name in works}
    first, *others = works
    phases[first].kill_in = kill_in
    pids = {name: start(work, phases[name]) for name, work in works.items()}
    ended = {first: os.waitpid(pids[first], 0)[1]}
    for name in others:
        if os.WIFSIGNALED(ended[first]):
            os.kill(pids[name], signal.SIGKILL)
        ended[name] = os.waitpid(pids[name], 0)[1]
    return {name: phases[name] for name, status in ended.items() if kill_in is None or os.WIFSIGNALED(status)}


def whole(folder: Path) -> bool:
    """Tell whether a directory is whole; one that is there and is not whole is a failure."""
    if not folder.exists():
        return False
    verify(folder)  # raises where it is not
    return True


def kill(times: int, folder: Path, seed: int) -> dict[str, Any]:
    """Kill so many runs; returns what was seen.

    Raises:
        KvcliError: something half-made has a name.
        AssertionError: something whole was lost, or a text differs.
    """
    draw, store, lasting = random.Random(seed), folder / "store", dict[tuple[str, str], float]()
    expected = {question: ask(question, KVOptions()) for question in QUESTIONS}
    histogram = {name: Counter[str]() for name in WORKS}  # all may remove what killed ones have left
    seen = {"kills": 0, "rounds": 0, "saved": 0, "loads": 0}

    def works(names: Sequence[str], target: Path, question: str) -> dict[str, Callable[[], object]]:
        every: dict[str, Callable[[], object]] = {
            "save": lambda: ask(question, KVOptions(save=target)),
            "store": lambda: ask(question, KVOptions(cache=store)),
            "load": lambda: ask(question, KVOptions(cache=store)),
            "prune": lambda: KVStore(store).prune(0),
        }
        return {name: every[name] for name in names}

    for names in PAIRS:
        done = run(works(names, folder / "first", QUESTIONS[0]), None)
        lasting |= {(name, phase): done[name].lasts(phase) for name in names for phase in WORKS[name]}
    shutil.rmtree(folder / "first")
    turns = itertools.cycle(
        [(*pair, phase) for names in PAIRS for pair in (names, names[::-1]) for phase in WORKS[pair[0]][::-1]]
    )
    while seen["kills"] < times:
        (*names, phase), question = next(turns), draw.choice(QUESTIONS)
        target = folder / f"kv-{seen['rounds']}"
        if "save" in names:
            KVStore(store).prune(0)
        else:
            ask(question, KVOptions(cache=store))
        before = {entry.folder for entry in KVStore(store).entries()}
        killed = run(works(names, target, question), (phase, draw.uniform(0, lasting[names[0], phase])))
        for name, where in killed.items():
            histogram[name][where.last()] += 1
        seen["kills"] += len(killed)
        seen["rounds"] += 1
        found = {entry.folder for entry in KVStore(store).entries()}
        for entry in found:
            whole(entry)
        assert "prune" in names or before <= found, f"lost: {before - found}"
        assert all((path / MANIFEST).exists() for path in store.iterdir() if not path.name.startswith(TEMPORARY))
        if "store" in names and ("store" not in killed or killed["store"].begun("end")):
            assert found, "lost what was stored"
        if whole(target):
            seen["saved"] += 1
            assert ask(question, KVOptions(use=target)) == expected[question], "another text from what was saved"
            seen["loads"] += 1
            shutil.rmtree(target)
        else:
            assert "save" in killed or "save" not in names, "nothing was saved"
            assert "save" not in killed or not killed["save"].begun("end"), "lost what was saved"
        if found and draw.random() < 0.2:
            assert ask(question, KVOptions(cache=store)) == expected[question], "another text from the store"
            seen["loads"] += 1
    ask(QUESTIONS[0], KVOptions(save=folder / "last", cache=store))  # clears what the killed ones have left
    left = [path for parent in (folder, store) for path in parent.iterdir() if path.name.startswith(TEMPORARY)]
    assert not left, f"left: {left}"
    return {**seen, "histogram": histogram}


def main() -> None:
    """Run, and write what was seen."""
    parser = arguments(__doc__, "kill_saved")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)  # more do not survive a fork
    with tempfile.TemporaryDirectory() as folder:
        try:
            seen = kill(given.kills, Path(folder), given.seed)
        except (KvcliError, AssertionError) as error:
            sys.exit(f"failed: {error}")
    for name, phases in seen["histogram"].items():
        print(f"{name}: " + ", ".join(f"{phase} {phases[phase]}" for phase in PHASES if phase in phases))
    print(", ".join(f"{number} {name}" for name, number in seen.items() if name != "histogram"))
    save(given.output, {"seed": given.seed, **seen})


if __name__ == "__main__":
    main()
