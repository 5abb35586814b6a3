"""Decode steps with KV of 8 and 4 bits in host memory against KV as the model computes it, on the CPU.

    python benchmarks/kv_step.py                     about ten minutes on two cores
    python benchmarks/kv_step.py --methods freekv --repeats 3

A dummy Llama of mid size continues 16K made-up tokens whose queries turn completely at every step, so that nearly all
that is selected is recalled; `offload` and `refreekv`, which keeps everything here, read all of it. In fp32 and in
bfloat16, in turn, repeat after repeat; a ratio is taken within each repeat.
"""

import argparse
import statistics
from typing import Any

import torch
from common import add_output, save, spread
from cpu_decode import CONFIG, Run, kvcli_steps, made_up_kv
from transformers import LlamaForCausalLM

from kvcli.inputs.profiles import resolve_profile

METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("freekv", "arkvale", "shadowkv", "infllm", "infinigen", "pariskv", "retroinfer")},
    "magicpig": {},
    "fier": {"offload": True},
    "offload": {},
    "refreekv": {"offload": True, "threshold": 0.0},
}
DTYPES = ("auto", "int8", "int4")


def measure(method: str, context: int, dtype: torch.dtype, steps: int, repeats: int) -> dict[str, Any]:
    """Run one method with all of them, print and return the figures."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval().to(dtype)
    kv = [(k.to(dtype), v.to(dtype)) for k, v in made_up_kv(context)]
    taken: dict[str, list[float]] = {held: [] for held in DTYPES}
    for _ in range(repeats):
        for held, times in taken.items():
            run = Run(resolve_profile(method, overrides={**METHODS[method], "kv_dtype": held}))
            times.append(statistics.median(kvcli_steps(run, model, kv, context, steps)[0]))
    row: dict[str, Any] = {"method": method, "dtype": str(dtype).removeprefix("torch."), "context": context}
    for held, times in taken.items():
        row[f"{held}_ms"] = spread(times)
        row[f"{held}_ratio"] = spread([own / plain for own, plain in zip(times, taken["auto"], strict=True)])
    said = ", ".join(f"{held} {row[f'{held}_ratio']['median']:.2f}" for held in DTYPES[1:])
    print(f"{method:<11} {row['dtype']:<9} {row['auto_ms']['median']:6.1f} ms as computed; {said} of it", flush=True)
    return row


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--context", type=int, default=16_384, help="tokens")
    parser.add_argument("--steps", type=int, default=10, help="timed decode steps a run")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, in turn")
    add_output(parser, "kv_step")
    given = parser.parse_args()
    dtypes = (torch.float32, torch.bfloat16)
    pairs = [(method, dtype) for method in given.methods.split(",") for dtype in dtypes]
    rows = [measure(method, given.context, dtype, given.steps, given.repeats) for method, dtype in pairs]
    save(given.output, {"model": CONFIG.to_diff_dict(), "rows": rows})


if __name__ == "__main__":
    main()
