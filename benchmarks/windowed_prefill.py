"""How the time of a prefill grows with the prompt: by windows (actqkv, infllm) and exactly, on the CPU.

A dummy Llama (8 layers, width 512, 8 heads, 4 KV heads, fp32) reads random prompts; windows of 256 tokens attend to
2,048 tokens in every layer. The contexts of one repeat are read in turn; growth is a ratio within a repeat: a doubling
of the context that takes twice the time is linear.

    python benchmarks/windowed_prefill.py
"""

import argparse
import time
from itertools import pairwise

import torch
from common import add_output, save, spread
from cpu_decode import CONFIG
from transformers import LlamaForCausalLM

from kvcli.attention import attached
from kvcli.geometry import geometry_of
from kvcli.linear import onednn_linears
from kvcli.methods import get_method
from kvcli.methods.base import SequenceContext
from kvcli.profile import Profile, resolve_profile
from kvcli.rope import installed
from kvcli.stats import Counters
from kvcli.store.cache import Tiers
from kvcli.timeline import Timeline
from kvcli.windowed import read_prompt


@torch.inference_mode()
def seconds(model: LlamaForCausalLM, profile: Profile, context: int) -> float:
    """Read a prompt of `context` tokens once."""
    layers = geometry_of(CONFIG, torch.float32).layers
    ids = torch.randint(0, CONFIG.vocab_size, (context,), generator=torch.Generator().manual_seed(context)).tolist()
    with attached(model) as hook, onednn_linears(model), installed(model, [context]) as rope:
        tiers, counters = Tiers.for_device(torch.device("cpu"), torch.float32), Counters(len(layers))
        of_sequence = SequenceContext(context, tiers, counters, Timeline(), rope.rotary(context))
        method = get_method(profile.method)(profile.settings, layers, of_sequence)
        started = time.perf_counter()
        read_prompt(model, hook, ids, [method], layers, lambda _: None)
        return time.perf_counter() - started


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["actqkv", "infllm", "full"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[16_384, 32_768, 65_536], help="tokens")
    parser.add_argument("--longest-exact", type=int, default=32_768, help="longest context that is read exactly")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turn")
    add_output(parser, "windowed_prefill")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    rows, times = [], {}
    for name in args.methods:
        profile = resolve_profile(method=name)
        contexts = [n for n in args.contexts if name != "full" or n <= args.longest_exact]
        runs = [[seconds(model, profile, context) for context in contexts] for _ in range(args.repeats)]
        for index, (shorter, longer) in enumerate(pairwise(contexts)):
            growth = spread([run[index + 1] / run[index] for run in runs])
            rows.append({"method": name, "from": shorter, "to": longer, "growth": growth})
            print(
                f"{name:<8} {shorter:>6,} -> {longer:>6,} tokens: {growth['median']:.2f}x the time "
                f"({growth['min']:.2f} to {growth['max']:.2f})",
                flush=True,
            )
        times[name] = {str(context): spread([run[i] for run in runs]) for i, context in enumerate(contexts)}
    save(args.output, {"model": CONFIG.to_diff_dict(), "rows": rows, "seconds": times})


if __name__ == "__main__":
    main()
