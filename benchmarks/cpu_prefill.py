"""Prefill on the CPU: exactly against transformers' own, and how its time grows with the prompt.

    python benchmarks/cpu_prefill.py exact
    python benchmarks/cpu_prefill.py growth

`exact`: time, and memory above the weights, beside transformers (sdpa, default cache). Both read the same random prompt
with the same dummy Llama (8 layers, width 512, 8 heads, 4 KV heads, fp32); kvcli keeps its KV as freekv does. Every
measurement is a process of its own, so that its peak memory is its own; the two take turns, and a ratio is taken within
each repeat.

`growth`: a Llama of 2 such layers reads random prompts by windows (actqkv, infllm) and exactly; windows of 256 tokens
attend to 2,048 tokens in every layer. The contexts of one repeat are read in turn; growth is a ratio within a repeat: a
doubling of the context that takes twice the time is linear. It does not depend on the number of layers, which are all
alike: two keep it to some minutes. Results are written after every prompt that was read.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from common import add_command, arguments, said, save, spread
from random_weights import CONFIG, FREEKV, model_of
from transformers import LlamaConfig, LlamaForCausalLM

from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.runtime.engine import engine

WHO = ("transformers", "kvcli")


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@torch.inference_mode()
def measure(who: str, context: int) -> dict[str, float]:
    """Read a prompt once; seconds, and bytes above what the loaded model took."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    ids = torch.randint(0, CONFIG.vocab_size, (context,))
    model(input_ids=ids[None, :64], use_cache=False)  # warm-up
    before = peak_bytes()
    started = time.perf_counter()
    if who == "transformers":
        model(input_ids=ids[None], logits_to_keep=1, use_cache=True)
    else:
        with engine(model_of(model), [context]) as ready:
            ready.prefill(ids.tolist(), [ready.method(FREEKV, ready.context(context, 0))])
    return {"seconds": time.perf_counter() - started, "bytes": peak_bytes() - before}


SHALLOW = LlamaConfig(**CONFIG.to_diff_dict() | {"num_hidden_layers": 2})


@torch.inference_mode()
def seconds(model: LlamaForCausalLM, profile: Profile, context: int) -> float:
    """Read a prompt of `context` tokens once."""
    ids = torch.randint(0, SHALLOW.vocab_size, (context,), generator=torch.Generator().manual_seed(context)).tolist()
    with engine(model_of(model), [context]) as ready:
        method = ready.method(profile, ready.context(context, 0))
        started = time.perf_counter()
        ready.prefill(ids, [method])
        return time.perf_counter() - started


def growths(method: str, seconds_of: Mapping[int, Sequence[float]]) -> list[dict[str, Any]]:
    """How much longer the next context took, in the repeats that have read both."""
    return [
        {
            "method": method,
            "from": shorter,
            "to": longer,
            "growth": spread([b / a for a, b in zip(seconds_of[shorter], seconds_of[longer], strict=False)]),
        }
        for shorter, longer in pairwise(seconds_of)
    ]


def exact(args: argparse.Namespace) -> None:
    """Read prompts exactly, beside transformers."""
    if args.measure:
        print(json.dumps(measure(args.measure, args.contexts[0])))
        return
    rows = []
    for context in args.contexts:
        runs = []
        for _ in range(args.repeats):
            run = {}
            for who in WHO:
                command = [sys.executable, __file__, "exact", "--measure", who, "--contexts", str(context)]
                run[who] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                if run[who]["bytes"] <= 0:
                    sys.exit(f"{context:,} tokens take no memory that can be seen: ask for more --contexts")
            runs.append(run)
        row = {"context": context}
        for figure in ("seconds", "bytes"):
            for who in WHO:
                row[f"{who}_{figure}"] = spread([run[who][figure] for run in runs])
            row[f"{figure}_ratio"] = spread([run["kvcli"][figure] / run["transformers"][figure] for run in runs])
        rows.append(row)
        seconds, memory = row["seconds_ratio"], row["bytes_ratio"]
        print(
            f"{context:>7,} tokens: kvcli takes {seconds['median']:.2f}x the time ({seconds['min']:.2f} to "
            f"{seconds['max']:.2f}) and {memory['median']:.2f}x the memory of transformers",
            flush=True,
        )
    save(args.output, {"model": CONFIG.to_diff_dict(), "settings": FREEKV.settings.model_dump(), "rows": rows})


def growth(args: argparse.Namespace) -> None:
    """Read prompts of growing length, by windows and exactly."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHALLOW).eval()
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name in args.methods:
        profile = resolve_profile(method=name)
        contexts = [n for n in args.contexts if name != "full" or n <= args.longest_exact]
        for _ in range(args.repeats):
            for context in contexts:
                times[name][context].append(seconds(model, profile, context))
                rows = [row for each, found in times.items() for row in growths(each, found)]
                kept = {each: {str(n): spread(taken) for n, taken in found.items()} for each, found in times.items()}
                save(args.output, {"model": SHALLOW.to_diff_dict(), "rows": rows, "seconds": kept})
        for row in growths(name, times[name]):
            print(
                f"{name:<8} {row['from']:>6,} -> {row['to']:>6,} tokens: {said(row['growth'])} the time",
                flush=True,
            )


def main() -> None:
    """Measure, print, keep."""
    commands = (parser := arguments(__doc__)).add_subparsers(required=True)
    one = add_command(commands, exact, "cpu_prefill")
    one.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 16_384], help="tokens")
    one.add_argument("--repeats", type=int, default=3, help="runs of each, in turn")
    one.add_argument("--measure", choices=WHO, help=argparse.SUPPRESS)
    two = add_command(commands, growth, "windowed_prefill")
    two.add_argument("--methods", nargs="+", default=["actqkv", "infllm", "full"])
    two.add_argument("--contexts", type=int, nargs="+", default=[16_384, 32_768, 65_536], help="tokens")
    two.add_argument("--longest-exact", type=int, default=32_768, help="longest context that is read exactly")
    two.add_argument("--repeats", type=int, default=2, help="runs of each, in turn")
    args = parser.parse_args()
    args.work(args)


if __name__ == "__main__":
    main()
