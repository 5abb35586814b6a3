"""Decode step of freekv against transformers' `generate` with its default cache, on the CPU.

A dummy Llama (8 layers, width 512, 8 heads, 4 KV heads, fp32) continues contexts of 4K, 16K and 64K tokens; freekv
attends to 1,024 of them (sink = window = 128). Both start from the same made-up KV, because decode time does not
depend on its values, but for one thing: how far queries turn from step to step decides what freekv corrects and
recalls. With random weights and the tokens that they give, queries turn completely: nearly every head is corrected and
nearly every page recalled, freekv's worst case ("turning"). Fed the same token at every step they hardly turn
("steady"). Trained models lie between: 4 to 52 % of heads corrected (arXiv 2505.13109, appendix E).

kvcli's own loop with full attention stands with them, so that what retrieval gains can be told from what the loop
gains. All are run in turn, repeat after repeat; a ratio is taken within each repeat.

    python benchmarks/cpu_decode.py

All methods beside full attention and beside their floors, by `kvcli profile` with the same shape, and another commit's
in turn, round after round:

    python benchmarks/cpu_decode.py --methods full,fier,shadowkv --against CHECKOUT
"""

import json
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import torch
from common import RESULTS, arguments, ratios, save, spread
from random_weights import CONFIG, FREEKV, WARMUP, Run, kvcli_steps, made_up_kv
from transformers import DynamicCache, LlamaForCausalLM

from kvcli.bench.runs import TokenClock
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.layers import cache_argument
from kvcli.sizes import slices

AT_ONCE = 4  # methods that a checkout profiles before the other does: a machine's speed changes within minutes
RUNS = {
    "full": Run(resolve_profile("full")),
    "turning": Run(FREEKV),
    "steady": Run(FREEKV, steady=True),
}


@torch.inference_mode()
def transformers_steps(model: LlamaForCausalLM, kv: list, context: int, steps: int) -> list[float]:
    """Step times of `generate`, in milliseconds."""
    cache, clock = DynamicCache(config=CONFIG), TokenClock()
    for layer, (k, v) in enumerate(kv):
        cache.update(k[None], v[None], layer)
    ids = torch.ones(1, context + 1, dtype=torch.long)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{cache_argument(model): cache},
        max_new_tokens=steps + WARMUP + 1,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=clock,
    )
    # The first time is that of the prompt, the steps after it fill caches.
    return [1000 * (later - earlier) for earlier, later in pairwise(clock.times[1 + WARMUP :])]


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
        speedup = ratios(times["transformers"], times[name])
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


def kvcli(checkout: Path, *words: str) -> dict:
    """Run kvcli of a checkout; returns its JSON."""
    env = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "kvcli", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=checkout, env=env)
    if done.returncode:
        sys.exit(f"kvcli {words[0]} in {checkout} ended with exit code {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def profiled(checkout: Path, methods: list[str], context: int, steps: int) -> dict[str, tuple[float, float]]:
    """Run `kvcli profile` of a checkout: of every method its step and its floor, in milliseconds."""
    words = ["profile", "-m", "small", "--load-format", "dummy", "--dtype", "float32", "--method", ",".join(methods)]
    words += ["--context", str(context), "--output-len", str(steps), "--repeat", "1", "--quiet"]
    cases = kvcli(checkout, *words)["cases"]
    return {case["label"]: (case["step_ms"]["median"], case["floor_ms"]) for case in cases}


def all_methods(methods: list[str], against: Path | None, contexts: list[int], steps: int, repeats: int) -> list[dict]:
    """Profile methods, in turn those of them that another checkout knows; ratios are taken within a round."""
    checkouts = {"here": Path(__file__).parents[1]} | ({} if against is None else {"against": against.resolve()})
    known = {name: {each["name"] for each in kvcli(root, "methods")["methods"]} for name, root in checkouts.items()}
    rows = []
    for context in contexts:
        rounds: list[dict[str, dict[str, tuple[float, float]]]] = []
        for _ in range(repeats):
            rounds.append({name: {} for name in checkouts})
            for part in slices(len(methods), AT_ONCE):
                for name, root in checkouts.items():
                    told = [method for method in methods[part] if method in known[name]]
                    rounds[-1][name] |= profiled(root, told, context, steps) if told else {}
        for method in methods:
            row: dict = {"context": context, "method": method}
            of = [name for name in checkouts if method in known[name]]
            for name in of:
                taken = [found[name][method] for found in rounds]
                row[name] = {
                    "step_ms": spread([step for step, _ in taken]),
                    "over_floor": spread([step / floor for step, floor in taken]),
                    "over_full": spread([found[name][method][0] / found[name]["full"][0] for found in rounds]),
                }
            if "against" in of:
                ratios = [found["against"][method][0] / found["here"][method][0] for found in rounds]
                row["speedup"] = spread(ratios)
            print(f"{context:>7,} {method:<18} " + ", ".join(_said(name, row[name]) for name in of), flush=True)
            rows.append(row)
    return rows


def _said(name: str, row: dict) -> str:
    of = {key: row[key]["median"] for key in ("step_ms", "over_floor", "over_full")}
    return f"{name} {of['step_ms']:.1f} ms, {of['over_floor']:.1f}x the floor, {of['over_full']:.2f}x full"


def commit_of(checkout: Path) -> str:
    """Name the commit that a checkout has."""
    return subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=checkout, text=True).strip()


def main() -> None:
    """Measure, print, keep."""
    parser = arguments(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16_384, 65_536], help="tokens")
    parser.add_argument("--steps", type=int, default=20, help="timed decode steps a run")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, in turn")
    parser.add_argument("--methods", help="profile these, full among them, instead of freekv beside transformers")
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="with --methods: another checkout, profiled in turn"
    )
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write, by default the committed one")
    args = parser.parse_args()
    if args.methods is not None:
        if "full" not in args.methods.split(","):
            parser.error("--methods lacks full, which the others are held against")
        rows = all_methods(args.methods.split(","), args.against, args.contexts, args.steps, args.repeats)
        before = None if args.against is None else commit_of(args.against)
        save(args.output or RESULTS / "cpu_methods.json", {"against": before, "rows": rows})
        return
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    rows = [measure(model, context, args.steps, args.repeats) for context in args.contexts]
    first, last = rows[0], rows[-1]
    growth = {name: last[f"{name}_ms"]["median"] / first[f"{name}_ms"]["median"] for name in RUNS if name != "full"}
    found = ", ".join(f"{ratio:.2f}x ({name})" for name, ratio in growth.items())
    print(f"freekv's step at {last['context']:,} tokens takes of that at {first['context']:,}: {found}")
    settings = FREEKV.settings.model_dump()
    save(
        args.output or RESULTS / "cpu_decode.json",
        {"model": CONFIG.to_diff_dict(), "settings": settings, "rows": rows, "growth": growth},
    )


if __name__ == "__main__":
    main()
