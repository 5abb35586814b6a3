"""What saving costs beside the prefill, how fast loading is beside plain reads, and the memory of many questions.

    python benchmarks/saved_kv.py
    python benchmarks/saved_kv.py --shape llama-3.1-8b --layers 2 --context 32768

Random weights of a model's shape. Prefills with and without saving take turns; loads and plain reads of the same files,
by the same blocks and with an empty system cache, too. The first token after a load stands beside the time of reading
the files and the time of the question's own tokens. Memory is what a process of its own holds more than before.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from common import add_output, save, spread
from random_weights import model_of
from transformers import AutoModelForCausalLM

from kvcli.capacity.planning.probe import shortened
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.loading import ModelSpec, read_config
from kvcli.runtime.engine import Engine, engine
from kvcli.runtime.prefill import Branches
from kvcli.runtime.saved.layer_file import ALIGNMENT, UnbufferedFile
from kvcli.runtime.saved.manifest import PAGE, Identity, PromptRead, read_manifest
from kvcli.runtime.saved.reader import SavedKV, Segment
from kvcli.runtime.saved.writer import KVWriter, Saving
from kvcli.store.cache import Tiers
from kvcli.store.host_memory import host_memory

BLOCK = 8 << 20
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


def plain_read(folder: Path) -> float:
    """Read the data of all files, block by block past the cache; returns bytes a second."""
    memory, size, begun = host_memory((BLOCK,), torch.uint8), 0, time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with UnbufferedFile(path) as file:
            stop = path.stat().st_size
            for start, end in pairwise([*range(ALIGNMENT, stop, BLOCK), stop]):
                file.read_into(memory[: end - start], start)
                size += end - start
    return size / (time.perf_counter() - begun)


def opened(folder: Path) -> SavedKV:
    """Open what was saved."""
    manifest = read_manifest(folder)
    tiers = Tiers.for_device(torch.device("cpu"), manifest.dtype)
    return SavedKV([Segment(folder, manifest, len(manifest.pages))], tiers)


def load(folder: Path) -> float:
    """Load all layers, as fast as they come; returns bytes a second."""
    with opened(folder) as saved:
        manifest = saved.segments[0].manifest
        entry, begun = manifest.layers[0], time.perf_counter()
        kv = torch.empty(2, entry.num_kv_heads, saved.length, entry.head_dim, dtype=manifest.dtype)
        for layer in range(len(manifest.layers)):
            saved.fill(layer, kv)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small", help="a shape that comes with kvcli")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=12288, help="tokens of the document")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write: the disk that is measured")
    parser.add_argument("--held", type=int, metavar="N", help="only the memory of N questions, in bytes")
    add_output(parser, "saved_kv")
    given = parser.parse_args()
    config = shortened(read_config(ModelSpec(given.shape, load_format="dummy")), given.layers, 2)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    document = [5 + at % 1000 for at in range(given.context // PAGE * PAGE)]
    asked = [*document, *range(7, 7 + QUESTION)]
    capacities = [len(document) + QUESTION, len(asked) + QUESTION, 2 * QUESTION]
    with engine(model_of(module), capacities) as ready, tempfile.TemporaryDirectory(dir=given.folder) as place:
        if given.held is not None:
            print(held(ready, document, given.held))
            return
        folder, plain, saving, until, loads, reads, firsts = Path(place) / "kv", *([] for _ in range(6))
        question = []
        prefill(ready, document, None)
        for _ in range(given.rounds):
            plain.append(prefill(ready, document, None)[0])
            shutil.rmtree(folder, ignore_errors=True)
            read, all_of_it = prefill(ready, document, folder)
            saving.append(read)
            until.append(all_of_it)
            reads.append(plain_read(folder))
            loads.append(load(folder))
            firsts.append(first_token(ready, asked, folder))
            question.append(first_token(ready, asked[-QUESTION:], None))
        size = sum(path.stat().st_size for path in folder.iterdir())
        memory = {number: held_elsewhere(given, number) for number in (1, 10, 50)}
    results = {
        "shape": given.shape,
        "layers": given.layers,
        "context": len(document),
        "bytes": size,
        "prefill_s": spread(plain),
        "prefill_saving_s": spread(saving),
        "prefill_until_saved_s": spread(until),
        "plain_read_bytes_per_s": spread(reads),
        "load_bytes_per_s": spread(loads),
        "first_token_loaded_s": spread(firsts),
        "question_alone_s": spread(question),
        "memory_bytes": memory,
    }
    for name, value in results.items():
        print(name, value)
    save(given.output, results)


if __name__ == "__main__":
    main()
