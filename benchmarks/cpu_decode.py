"""Decode step of freekv against transformers' `generate` with its default cache, on the CPU.

A dummy Llama (8 layers, width 512, 8 heads, 4 KV heads, fp32) continues contexts of 4K, 16K and 64K tokens; freekv
attends to 1,024 of them (sink = window = 128). Both start from the same made-up KV, because decode time does not
depend on its values, but for one thing: how far queries turn from step to step decides what freekv corrects and
recalls. With random weights and the tokens that they give, queries turn completely: nearly every head is corrected and
nearly every page recalled, freekv's worst case ("turning"). Fed the same token at every step they hardly turn
("steady"). Trained models lie between: 4 to 52 % of heads corrected (arXiv 2505.13109, appendix E).

Both are run as they are by default and with `--pipeline compiled`. kvcli's own loop with full attention stands beside
them, so that what retrieval gains can be told from what the loop gains. All are run in turn, repeat after repeat; a
ratio is taken within each repeat.

    python benchmarks/cpu_decode.py
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

import torch
from common import add_output, save, spread
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from kvcli.kernels.softmax import Softmax
from kvcli.methods import get_method
from kvcli.methods.base import SequenceContext
from kvcli.methods.config import MethodConfig
from kvcli.methods.freekv import FreeKVConfig
from kvcli.methods.full import FullConfig
from kvcli.models.geometry import geometry_of
from kvcli.models.rope import installed
from kvcli.runtime.attention_hook import attached
from kvcli.runtime.compiled import CompiledStepper
from kvcli.runtime.decode import BlockingStepper
from kvcli.runtime.detokenizer import StreamingDetokenizer
from kvcli.runtime.linear import onednn_linears
from kvcli.runtime.sampling import Sampler, Sampling
from kvcli.runtime.sequence import RunningSequence
from kvcli.store.cache import Tiers
from kvcli.telemetry.counters import Counters
from kvcli.telemetry.timeline import Timeline

CONFIG = LlamaConfig(
    vocab_size=32_000,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=131_072,
)
SETTINGS = FreeKVConfig(budget=1024, sink=128, window=128)


class Run(NamedTuple):
    """What is timed beside transformers."""

    method: str
    settings: MethodConfig
    steady: bool = False
    compiled: bool = False


RUNS = {
    "full": Run("full", FullConfig()),
    "turning": Run("freekv", SETTINGS),
    "turning, compiled": Run("freekv", SETTINGS, compiled=True),
    "steady": Run("freekv", SETTINGS, steady=True),
    "steady, compiled": Run("freekv", SETTINGS, steady=True, compiled=True),
}
WARMUP = 2
SOFTMAX = Softmax((CONFIG.hidden_size // CONFIG.num_attention_heads) ** -0.5)


class Clock(BaseStreamer):
    """Notes when each token of `generate` arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002
        """Take a token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more comes."""

    def steps_ms(self) -> list[float]:
        """Time between tokens; the first put is the prompt, the step after it fills caches."""
        times = self.times[1 + WARMUP :]
        return [1000 * (b - a) for a, b in pairwise(times)]


def made_up_kv(context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [Hk, context, d] of every layer."""
    generator = torch.Generator().manual_seed(context)
    shape = (CONFIG.num_key_value_heads, context, CONFIG.hidden_size // CONFIG.num_attention_heads)
    return [tuple(torch.randn(shape, generator=generator) for _ in range(2)) for _ in range(CONFIG.num_hidden_layers)]


@torch.inference_mode()
def transformers_steps(model: LlamaForCausalLM, kv: list, context: int, steps: int) -> list[float]:
    """Step times of `generate`, in milliseconds."""
    cache, clock = DynamicCache(config=CONFIG), Clock()
    for layer, (k, v) in enumerate(kv):
        cache.update(k[None], v[None], layer)
    ids = torch.ones(1, context + 1, dtype=torch.long)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=steps + WARMUP + 1,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=clock,
    )
    return clock.steps_ms()


@torch.inference_mode()
def kvcli_steps(run: Run, model: LlamaForCausalLM, kv: list, context: int, steps: int) -> tuple[list[float], Counters]:
    """Step times of kvcli's loop with a method, in milliseconds, and its counters."""
    layers, total = geometry_of(CONFIG, torch.float32).layers, steps + WARMUP
    with ExitStack() as ready:
        hook, rope = ready.enter_context(attached(model)), ready.enter_context(installed(model, [context + total + 1]))
        ready.enter_context(onednn_linears(model))
        counters = Counters(len(layers))
        tiers = Tiers.for_device(torch.device("cpu"), torch.float32)
        context_of = SequenceContext(context + total + 1, tiers, counters, Timeline(), rope.rotary(context + total + 1))
        method = get_method(run.method)(run.settings, layers, context_of)
        for layer, (k, v) in enumerate(kv):
            method.prefill(layer, k, v, k[:, :0], SOFTMAX)
        sampler = Sampler(Sampling(), 0, torch.device("cpu"))
        sequence = RunningSequence(
            0, "made up", 0, context, method, counters, sampler, StreamingDetokenizer(None), (), total + 1, 0.0
        )
        sequence.token_ids.append(1)
        stepper = (CompiledStepper if run.compiled else BlockingStepper)(model, hook, None)
        ready.callback(stepper.finish)
        times = []
        for _ in range(total):
            started = time.perf_counter()
            counters.next_step()
            token = sampler(stepper.step([sequence])[0][0])
            sequence.token_ids.append(1 if run.steady else token)
            times.append(1000 * (time.perf_counter() - started))
    return times[WARMUP:], counters


def measure(model: LlamaForCausalLM, context: int, steps: int, repeats: int) -> dict:
    """Run everything in turn at one context, print and return the figures."""
    kv = made_up_kv(context)
    times: dict[str, list[float]] = {name: [] for name in ("transformers", *RUNS)}
    counters = {}
    for _ in range(repeats):
        times["transformers"].append(statistics.median(transformers_steps(model, kv, context, steps)))
        for name, run in RUNS.items():
            taken, counters[name] = kvcli_steps(run, model, kv, context, steps)
            times[name].append(statistics.median(taken))
    row: dict = {"context": context, **{f"{name}_ms": spread(values) for name, values in times.items()}}
    print(f"{context:>7,} tokens: transformers {row['transformers_ms']['median']:.1f} ms a step")
    for name in RUNS:
        speedup = spread([a / b for a, b in zip(times["transformers"], times[name], strict=True)])
        row[f"{name}_speedup"] = speedup
        line = f"  {name:<17} {row[f'{name}_ms']['median']:6.1f} ms, "
        line += f"{speedup['median']:.1f}x ({speedup['min']:.1f} to {speedup['max']:.1f})"
        correction, cache = counters[name].correction(), counters[name].cache()
        if correction.heads_checked:
            row[f"{name}_corrected_heads"] = correction.heads_corrected / correction.heads_checked
            row[f"{name}_missed_pages"] = cache.misses / cache.pages_requested
            line += f", {row[f'{name}_corrected_heads']:.0%} of heads corrected"
            line += f", {row[f'{name}_missed_pages']:.0%} of pages missed"
        print(line, flush=True)
    return row


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16_384, 65_536], help="tokens")
    parser.add_argument("--steps", type=int, default=20, help="timed decode steps a run")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, in turn")
    add_output(parser, "cpu_decode")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    rows = [measure(model, context, args.steps, args.repeats) for context in args.contexts]
    first, last = rows[0], rows[-1]
    growth = {name: last[f"{name}_ms"]["median"] / first[f"{name}_ms"]["median"] for name in RUNS if name != "full"}
    found = ", ".join(f"{ratio:.2f}x ({name})" for name, ratio in growth.items())
    print(f"freekv's step at {last['context']:,} tokens takes of that at {first['context']:,}: {found}")
    settings = SETTINGS.model_dump()
    save(args.output, {"model": CONFIG.to_diff_dict(), "settings": settings, "rows": rows, "growth": growth})


if __name__ == "__main__":
    main()
