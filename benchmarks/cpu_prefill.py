"""Exact prefill against transformers' own (sdpa, default cache), on the CPU: time, and memory above the weights.

Both read the same random prompt with the same dummy Llama (8 layers, width 512, 8 heads, 4 KV heads, fp32); kvcli
keeps its KV as freekv does. Every measurement is a process of its own, so that its peak memory is its own; the two
take turns, and a ratio is taken within each repeat.

    python benchmarks/cpu_prefill.py
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from common import add_output, save, spread
from cpu_decode import CONFIG, FREEKV
from random_weights import model_of
from transformers import LlamaForCausalLM

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


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 16_384], help="tokens")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn")
    parser.add_argument("--measure", choices=WHO, help=argparse.SUPPRESS)
    add_output(parser, "cpu_prefill")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.contexts[0])))
        return
    rows = []
    for context in args.contexts:
        runs = []
        for _ in range(args.repeats):
            run = {}
            for who in WHO:
                command = [sys.executable, __file__, "--measure", who, "--contexts", str(context)]
                run[who] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
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


if __name__ == "__main__":
    main()
