"""How the time of a prefill grows with the prompt: by windows (actqkv, infllm) and exactly, on the CPU.

A dummy Llama (2 layers, width 512, 8 heads, 4 KV heads, fp32) reads random prompts; windows of 256 tokens attend to
2,048 tokens in every layer. The contexts of one repeat are read in turn; growth is a ratio within a repeat: a doubling
of the context that takes twice the time is linear. It does not depend on the number of layers, which are all alike: two
keep it to some minutes. Results are written after every prompt that was read.

    python benchmarks/windowed_prefill.py
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from common import add_output, save, spread
from cpu_decode import CONFIG as DECODE_CONFIG
from random_weights import model_of
from transformers import LlamaConfig, LlamaForCausalLM

from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.runtime.engine import engine

CONFIG = LlamaConfig(**DECODE_CONFIG.to_diff_dict() | {"num_hidden_layers": 2})


@torch.inference_mode()
def seconds(model: LlamaForCausalLM, profile: Profile, context: int) -> float:
    """Read a prompt of `context` tokens once."""
    ids = torch.randint(0, CONFIG.vocab_size, (context,), generator=torch.Generator().manual_seed(context)).tolist()
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


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["actqkv", "infllm", "full"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[16_384, 32_768, 65_536], help="tokens")
    parser.add_argument("--longest-exact", type=int, default=32_768, help="longest context that is read exactly")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each, in turn")
    add_output(parser, "windowed_prefill")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name in args.methods:
        profile = resolve_profile(method=name)
        contexts = [n for n in args.contexts if name != "full" or n <= args.longest_exact]
        for _ in range(args.repeats):
            for context in contexts:
                times[name][context].append(seconds(model, profile, context))
                rows = [row for each, found in times.items() for row in growths(each, found)]
                kept = {each: {str(n): spread(taken) for n, taken in found.items()} for each, found in times.items()}
                save(args.output, {"model": CONFIG.to_diff_dict(), "rows": rows, "seconds": kept})
        for row in growths(name, times[name]):
            growth = row["growth"]
            print(
                f"{name:<8} {row['from']:>6,} -> {row['to']:>6,} tokens: {growth['median']:.2f}x the time "
                f"({growth['min']:.2f} to {growth['max']:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
