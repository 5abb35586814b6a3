"""What saving costs beside the prefill, how fast loading is beside plain reads, and the memory of many questions.

    python benchmarks/saved_kv.py                          two to three minutes on two cores
    python benchmarks/saved_kv.py --shape llama-3.1-8b --layers 2 --context 32768

Random weights of a model's shape. Prefills with and without saving take turns. So do plain reads of saved files, block
by block, loads of the same files, first tokens of a question on them, and the question's own tokens; all reads go past
the system's cache. These files hold documents of several lengths (`--loaded`), of made-up KV, as no prefill of the
longest is needed. Each ratio is one of neighbours in time; medians, least and most are over the rounds. Memory is what
a process of its own holds more than before.

A load begins with open files, as plain reads do, and ends with all pages in pools of host memory, held against their
checksums. Where bytes go to matters beside the
disk, so loads and plain reads both go into memory that was there before (`_there`) and into new memory (`_new`), which
the system has to find and clear; plain reads also into one block again and again, which stays in the processor's caches
(`_block`). Where a virtual machine gives memory back to its host, new memory can be slower than the disk, and where the
host copies what it reads, so can memory that is not in a cache. Ratios are given of like to like, and of loads to plain
reads into one block.

The question's own tokens are timed on a document whose KV is in memory, and without the time of putting it in place;
`question_without_document_s` is what they take alone, without attention to the document.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from common import arguments, ratios, save, spread
from random_weights import model_of
from transformers import AutoModelForCausalLM

from kvcli.capacity.planning.probe import shortened
from kvcli.inputs.profiles import resolve_profile
from kvcli.kernels.softmax import Softmax
from kvcli.kv.cache import Tiers
from kvcli.memory.disk_tier import ALIGNMENT, UnbufferedFile
from kvcli.memory.pinned import host_memory
from kvcli.models.loading import ModelSpec, read_config
from kvcli.runtime.engine import Engine, engine
from kvcli.runtime.prefill import Branches, prefill_branches
from kvcli.runtime.saved.manifest import PAGE, Identity, Manifest, PromptRead, read_manifest
from kvcli.runtime.saved.reader import SavedKV, Segment
from kvcli.runtime.saved.writer import KVWriter, Saving
from kvcli.sizes import slices

BLOCK = 8 << 20
READ_IN_ALL = 1 << 30  # bytes that small documents are read of in every way, a read of some milliseconds being a chance
QUESTION = 32  # tokens
IDENTITY = Identity(model="made up", weights="", tokenizer="", rope="", dtype="bfloat16")
PROFILE = resolve_profile("freekv")


def prefill(ready: Engine, ids: list[int], target: Path | None) -> tuple[float, float]:
    """Read a prompt, and save it to `target`; returns the seconds of reading, and of all until it is saved."""
    method = ready.method(PROFILE, ready.context(len(ids), QUESTION))
    begun = time.perf_counter()
    writers = []
    if target is not None:
        saving = Saving(ids, IDENTITY, PromptRead(source="made up", text=""), 0, IDENTITY.root)
        writers.append(KVWriter(saving, target.parent, lambda _: target))
    ready.prefill_branches(Branches((), [ids]), [[method]], watchers=writers)
    read = time.perf_counter() - begun
    for writer in writers:
        writer.finish()
    return read, time.perf_counter() - begun


def plain_read(folder: Path, where: str) -> float:
    """Read the data of all files, block by block past the system's cache; returns bytes a second.

    `where` to: the same "block" again and again, memory that is "there", or "new" memory, a piece for each file.
    """
    sizes = {path: path.stat().st_size - ALIGNMENT for path in sorted(folder.glob("*.safetensors"))}
    block = host_memory((BLOCK,), torch.uint8).zero_()
    there = {path: host_memory((size,), torch.uint8).zero_() for path, size in sizes.items() if where == "there"}
    with ExitStack() as stack:
        files = {path: stack.enter_context(UnbufferedFile(path)) for path in sizes}
        begun = time.perf_counter()
        for path, size in sizes.items():
            if where == "new":
                there[path] = host_memory((size,), torch.uint8)
            for part in slices(size, BLOCK):
                target = block[: part.stop - part.start] if where == "block" else there[path][part]
                files[path].read_into(target, ALIGNMENT + part.start)
        return sum(sizes.values()) / (time.perf_counter() - begun)


@dataclass(frozen=True)
class MemoryThere(Tiers):
    """A CPU's memory, where `there` has all that layers will be read into."""

    there: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, manifest: Manifest) -> MemoryThere:
        """Make memory for all layers, and touch it."""
        there = [host_memory(manifest.shape(layer), manifest.dtype).zero_() for layer in range(len(manifest.layers))]
        cpu = torch.device("cpu")
        return cls(cpu, cpu, manifest.dtype, there=there)

    def on_host_async(self, *shape: int, dtype: torch.dtype | None = None) -> Future[torch.Tensor]:
        """Give what is there for the next layer."""
        if not shape[0]:  # a pool before it holds pages
            return super().on_host_async(*shape, dtype=dtype)
        ready: Future[torch.Tensor] = Future()
        ready.set_result(self.there.pop())
        assert ready.result().shape == shape
        return ready


def opened(folder: Path, where: str = "new") -> SavedKV:
    """Open what was saved, to be read into "new" memory or into what is "there"."""
    manifest = read_manifest(folder)
    new = Tiers.for_device(torch.device("cpu"), manifest.dtype)
    tiers = new if where == "new" else MemoryThere.of(manifest)
    return SavedKV([Segment(folder, manifest, len(manifest.pages))], tiers)


def load(folder: Path, where: str) -> float:
    """Load all layers into pools of host memory, "new" or "there", as fast as they come; returns bytes a second."""
    with opened(folder, where) as saved:
        pools, begun = [], time.perf_counter()
        for layer in range(len(saved.segments[0].manifest.layers)):
            saved.check(layer)
            pools.append(saved.pool())
            saved.keep(pools[-1])
        return saved.bytes_read / (time.perf_counter() - begun)


def first_token(ready: Engine, ids: list[int], folder: Path | None) -> float:
    """Ask a question on a loaded document, or on one that was never there; returns the seconds to its first token."""
    method = ready.method(PROFILE, ready.context(len(ids), QUESTION))
    begun = time.perf_counter()
    if folder is None:
        ready.prefill(ids, [method])
    else:
        with opened(folder) as saved:
            branches = Branches(ids[: saved.length], [ids[saved.length :]], saved, saved.length)
            ready.prefill_branches(branches, [[method]])
    return time.perf_counter() - begun


class InMemory:
    """A document whose KV `kv` [2, Hk, n, d] is in memory, the same in all layers, for a question that nobody keeps."""

    query_rows = 0

    def __init__(self, kv: torch.Tensor):
        self.kv, self.length, self.filling = kv, kv.shape[2], 0.0

    def fill(self, layer: int, kv: torch.Tensor) -> None:  # noqa: ARG002
        """Put it in place, and note how long that takes."""
        begun = time.perf_counter()
        kv.copy_(self.kv)
        self.filling += time.perf_counter() - begun

    def fill_state(self, *_: object) -> None:
        """No layer keeps a state."""

    def observe(self, *_: object) -> None:
        """Look at nothing."""

    def prefill(self, *_: object) -> None:
        """Keep nothing."""

    def own_tokens(self, ready: Engine, ids: list[int]) -> float:
        """The seconds that the tokens after the document take."""
        branches, begun = Branches(ids[: self.length], [ids[self.length :]], self, self.length), time.perf_counter()
        self.filling = 0.0
        ready.rope.use([len(ids) + QUESTION])
        prefill_branches(ready.hook, branches, [self], ready.layers, lambda _: None)
        return time.perf_counter() - begun - self.filling


def loading(ready: Engine, tokens: int, folder: Path, rounds: int) -> dict[str, object]:
    """Save a document of made-up KV, read it and ask about it."""
    document = [5 + at % 1000 for at in range(tokens)]
    asked = [*document, *range(7, 7 + QUESTION)]
    saving = Saving(document, IDENTITY, PromptRead(source="made up", text=""), 0, IDENTITY.root)
    writer = KVWriter(saving, folder.parent, lambda _: folder)
    layer = ready.layers[0]
    k, v = kv = torch.randn(2, layer.num_kv_heads, tokens, layer.head_dim, dtype=torch.bfloat16)
    for each in ready.layers:
        writer.prefill(each.index, k, v, kv[:, :0], Softmax(1.0))
    writer.finish()
    there, size = InMemory(kv), writer.bytes_written
    reads: dict[str, list[float]] = {"block": [], "there": [], "new": []}
    loads: dict[str, list[float]] = {"there": [], "new": []}
    firsts, questions, alone = ([] for _ in range(3))
    first_token(ready, asked, folder)
    for _ in range(max(rounds, READ_IN_ALL // size)):
        for where, rates in reads.items():
            rates.append(plain_read(folder, where))
        for where, rates in loads.items():
            rates.append(load(folder, where))
        firsts.append(first_token(ready, asked, folder))
        questions.append(there.own_tokens(ready, asked))
        alone.append(first_token(ready, asked[-QUESTION:], None))
    shutil.rmtree(folder)

    def to_parts(rates: list[float]) -> dict[str, float]:
        """First tokens beside reading the file at these rates and the question's own tokens, round for round."""
        rows = zip(firsts, rates, questions, strict=True)
        return spread([first / (size / rate + own) for first, rate, own in rows])

    return {
        "tokens": tokens,
        "bytes": size,
        **{f"plain_read_{where}_bytes_per_s": spread(rates) for where, rates in reads.items()},
        **{f"load_{where}_bytes_per_s": spread(rates) for where, rates in loads.items()},
        **{f"load_to_plain_read_{where}": ratios(rates, reads[where]) for where, rates in loads.items()},
        **{f"load_{where}_to_plain_read_block": ratios(rates, reads["block"]) for where, rates in loads.items()},
        "plain_read_there_s": spread([size / rate for rate in reads["there"]]),
        "question_s": spread(questions),
        "question_without_document_s": spread(alone),
        "first_token_s": spread(firsts),
        **{f"first_token_to_read_{where}_and_question": to_parts(rates) for where, rates in reads.items()},
    }


def held(ready: Engine, document: list[int], questions: int) -> int:
    """Ask so many questions; returns the bytes that this process holds more than before."""
    before = psutil.Process().memory_full_info().uss
    prompts = [[*document, *range(100 + n, 100 + n + QUESTION)] for n in range(questions)]
    methods = [[ready.method(PROFILE, ready.context(len(ids), QUESTION))] for ids in prompts]
    ready.prefill_branches(Branches.of(prompts, len(document)), methods)
    return int(psutil.Process().memory_full_info().uss - before)


def held_elsewhere(given: argparse.Namespace, questions: int) -> int:
    """The same in a process of its own, which has held nothing before."""
    sizes = ["--shape", given.shape, "--layers", given.layers, "--context", given.context]
    command = [sys.executable, __file__, *map(str, sizes), "--held", str(questions)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Measure, and write the figures."""
    parser = arguments(__doc__, "saved_kv")
    parser.add_argument("--shape", default="small", help="a shape that comes with kvcli")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=12288, help="tokens of the document")
    parser.add_argument("--rounds", type=int, default=3, help="of prefills; loads have at least three times as many")
    parser.add_argument("--loaded", default="2048,12288,262144", help="tokens of documents that are loaded")
    parser.add_argument("--folder", type=Path, help="where to write: the disk that is measured")
    parser.add_argument("--held", type=int, metavar="N", help="only the memory of N questions, in bytes")
    given, before = parser.parse_args(), os.getloadavg()
    config = shortened(read_config(ModelSpec(given.shape, load_format="dummy")), given.layers, 2)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    document = [5 + at % 1000 for at in range(given.context // PAGE * PAGE)]
    loaded = [int(tokens) // PAGE * PAGE for tokens in given.loaded.split(",")]
    capacities = [QUESTION * 2, *(tokens + n * QUESTION for tokens in (len(document), *loaded) for n in (1, 2))]
    with engine(model_of(module), capacities) as ready, tempfile.TemporaryDirectory(dir=given.folder) as place:
        if given.held is not None:
            print(held(ready, document, given.held))
            return
        folder, plain, saving, until = Path(place) / "kv", *([] for _ in range(3))
        prefill(ready, document, None)
        for _ in range(given.rounds):
            plain.append(prefill(ready, document, None)[0])
            read, all_of_it = prefill(ready, document, folder)
            saving.append(read)
            until.append(all_of_it)
            shutil.rmtree(folder)
        sizes = [loading(ready, tokens, folder, 3 * given.rounds) for tokens in loaded]
        memory = {number: held_elsewhere(given, number) for number in (1, 10, 50)}
    results = {
        "shape": given.shape,
        "layers": given.layers,
        "context": len(document),
        "load_average": [*before, *os.getloadavg()],
        "prefill_s": spread(plain),
        "prefill_saving_s": spread(saving),
        "saving_to_plain_prefill": ratios(saving, plain),
        "prefill_until_saved_s": spread(until),
        "memory_bytes": memory,
        "loading": sizes,
    }
    for name, value in [*results.items(), *(item for size in sizes for item in size.items())]:
        print(name, value)
    save(given.output, results)


if __name__ == "__main__":
    main()
