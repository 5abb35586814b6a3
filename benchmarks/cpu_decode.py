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

All methods beside full attention and beside their floors, by `kvcli profile` with the same shape; and beside another
commit's, a few steps of each in turn:

    python benchmarks/cpu_decode.py --methods full,fier,shadowkv --against CHECKOUT

A model that selects by itself (DeepSeek V3.2's layers in the same sizes, 1,024 tokens a step), `native` beside `full`:
what a step costs, how often a selected token is on the device already, and what `kvcli plan` says:

    python benchmarks/cpu_decode.py --indexed
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from common import RESULTS, arguments, ratios, save, spread
from random_weights import CONFIG, FREEKV, INDEXED, WARMUP, Run, kvcli_steps, made_up_kv, stepping
from transformers import DeepseekV32ForCausalLM, DynamicCache, LlamaForCausalLM, PreTrainedModel

from kvcli.bench.runs import TokenClock
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.layers import cache_argument
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry.timeline import Timeline

HERE = Path(__file__).parents[1]
SLOTS = (2048, 8192, 32_768)  # tokens of a layer on the device
STEPS, TURNS = 8, 16  # of a process, while another waits
REST = 0.2  # seconds before a turn, after which the other process's threads are asleep
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


def profiled(methods: list[str], context: int, steps: int) -> dict[str, tuple[float, float]]:
    """Run `kvcli profile`: of every method its step and its floor, in milliseconds."""
    words = ["profile", "-m", "small", "--load-format", "dummy", "--dtype", "float32", "--method", ",".join(methods)]
    words += ["--context", str(context), "--output-len", str(steps), "--repeat", "1", "--quiet"]
    cases = kvcli(HERE, *words)["cases"]
    return {case["label"]: (case["step_ms"]["median"], case["floor_ms"]) for case in cases}


def in_turn(method: str, context: int, steps: int, turns: int, checkouts: list[Path]) -> list[list[float]]:
    """Let a process of each checkout take `steps` steps in turn: the median step of every turn, in milliseconds.

    A machine's speed changes within seconds, by more than what two commits differ by. So both processes stay, and the
    turns follow each other, in one order and then in the other.
    """
    most = 1 + steps * (turns + 1)
    command = [sys.executable, str(HERE / "benchmarks" / "random_weights.py"), method, str(context), str(most)]
    processes = [
        subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(root)}, cwd=root, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for root in checkouts
    ]  # fmt: skip
    taken: list[list[float]] = [[] for _ in checkouts]
    for turn in range(turns + 1):  # the first one compiles
        for own, process in list(zip(taken, processes, strict=True))[:: 1 if turn % 2 else -1]:
            time.sleep(REST)
            assert process.stdin is not None
            assert process.stdout is not None
            print(steps, file=process.stdin, flush=True)
            if not (times := process.stdout.readline()):
                raise ChildProcessError(f"not compared: {' '.join(command)} ended")
            own.append(statistics.median(json.loads(times)[WARMUP:]))
    for process in processes:
        process.kill()
        process.wait()
    return [own[1:] for own in taken]


def all_methods(methods: list[str], against: Path | None, contexts: list[int], steps: int, repeats: int) -> list[dict]:
    """Profile methods, and compare those with another checkout's that it knows."""
    known = set() if against is None else {each["name"] for each in kvcli(against, "methods")["methods"]}
    rows = []
    for context in contexts:
        rounds = [profiled(methods, context, steps) for _ in range(repeats)]
        for method in methods:
            row: dict = {"context": context, "method": method}
            said = f"{context:>7,} {method:<18}"
            if rounds:
                taken = [found[method] for found in rounds]
                row["here"] = {
                    "step_ms": spread([step for step, _ in taken]),
                    "over_floor": spread([step / floor for step, floor in taken]),
                    "over_full": spread([found[method][0] / found["full"][0] for found in rounds]),
                }
                of = {key: each["median"] for key, each in row["here"].items()}
                said += f" {of['step_ms']:.1f} ms, {of['over_floor']:.1f}x the floor, {of['over_full']:.2f}x full"
            if against is not None and method in known:
                try:
                    now, before = in_turn(method, context, STEPS, TURNS, [HERE, against])
                    row["speedup"] = ratio = spread([b / n for n, b in zip(now, before, strict=True)])
                    said += f" {ratio['median']:.2f}x as fast as before ({ratio['min']:.2f} to {ratio['max']:.2f})"
                except (
                    ChildProcessError
                ) as error:  # duoattention and razor read texts, for which a tokenizer is missing
                    said += f" {error}"
            print(said, flush=True)
            rows.append(row)
    return rows


def indexed(contexts: list[int], steps: int, repeats: int) -> list[dict]:
    """Run `full`, and `native` with several sizes of its cache on the device, in turn at each context."""
    torch.manual_seed(0)
    model, rows = DeepseekV32ForCausalLM(INDEXED).eval(), []
    for context in contexts:
        sizes = [slots for slots in SLOTS if slots < context] or [SLOTS[0]]
        runs = {("full", None, False): Run(resolve_profile("full"))}
        for slots in sizes:
            profile = resolve_profile("native", overrides={"slots": slots})
            runs |= {("native", slots, steady): Run(profile, steady) for steady in (False, True)}
        times: dict[tuple, list[float]] = {key: [] for key in runs}
        kv_times: dict[tuple, list[float]] = {key: [] for key in runs}
        ended = {}
        for _ in range(repeats):
            for key, run in runs.items():
                ended[key], of_kv = with_phases(run, model, context, steps)
                times[key].append(statistics.median(ended[key].decode_ms[WARMUP:]))
                kv_times[key].append(statistics.median(of_kv[WARMUP:]))
        for key, sequence in ended.items():
            method, slots, steady = key
            cache, taken = sequence.counters.cache(), len(sequence.decode_ms)
            row: dict = {"context": context, "method": method, "slots": slots, "steady": steady}
            row |= {"step_ms": spread(times[key]), "over_full": ratios(times[key], times["full", None, False])}
            row["kv_ms"] = spread(kv_times[key])
            row["index_bytes"] = sum(each.traffic(context).scored for each in sequence.method.caches)
            row["device_bytes"] = sequence.method.footprint().device
            row["device_bytes_by_plan"] = row["device_bytes"] / planned(method, slots, context, taken + 1)
            said = f"{context:>7,} {method} {slots or ''}{' steady' * steady} {row['step_ms']['median']:.1f} ms"
            said += f", {row['kv_ms']['median']:.1f} of them at KV"
            said += f", {row['over_full']['median']:.2f}x full, {row['device_bytes'] / 2**20:.0f} MiB on the device"
            if cache.pages_requested:
                row["hit_rate"] = 1 - cache.misses / cache.pages_requested
                row["recalled_a_step"] = cache.bytes_to_device / taken
                most = sum(each.traffic(context).recalled for each in sequence.method.caches)
                row["recalled_by_plan"] = row["recalled_a_step"] / most if most else None
                said += f", {row['hit_rate']:.0%} there, {row['recalled_a_step'] / 2**20:.2f} MiB recalled a step"
            print(said, flush=True)
            rows.append(row)
    return rows


def with_phases(run: Run, model: PreTrainedModel, context: int, steps: int) -> tuple[RunningSequence, list[float]]:
    """Take steps: the sequence, and of each step the milliseconds that tokens take to be stored, recalled, attended to.

    The rest of a step is the model's own: its layers, and the index that they score.
    """
    timeline, seen, taken = Timeline(enabled=True), 0, []
    for sequence in stepping(run, model, None, context, steps, timeline):
        spans, seen = timeline.spans[seen:], len(timeline.spans)
        taken.append(sum(each.end - each.start for each in spans) / 1000)
        ended = sequence
    return ended, taken


def planned(method: str, slots: int | None, context: int, tokens: int) -> int:
    """Return the bytes on the device that `kvcli plan` expects of a method's caches."""
    with tempfile.TemporaryDirectory() as folder:
        INDEXED.save_pretrained(folder)
        words = ["plan", "-m", folder, "--dtype", "float32", "--method", method, "--context", str(context)]
        words += ["--max-tokens", str(tokens), *([] if slots is None else ["--set", f"slots={slots}"])]
        return int(kvcli(HERE, *words)["plans"][0]["memory"]["kv_device"])


def commit_of(checkout: Path) -> str:
    """Name the commit that a checkout has."""
    return subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=checkout, text=True).strip()


def main() -> None:
    """Measure, print, keep."""
    parser = arguments(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16_384, 65_536], help="tokens")
    parser.add_argument("--steps", type=int, default=20, help="timed decode steps a run")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, in turn; 0 only compares")
    parser.add_argument("--methods", help="profile these, full among them, instead of freekv beside transformers")
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="with --methods: another checkout, whose steps are taken in turn"
    )
    parser.add_argument("--indexed", action="store_true", help="native beside full, on a model that selects by itself")
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write, by default the committed one")
    args = parser.parse_args()
    if args.indexed:
        rows = indexed(args.contexts, args.steps, args.repeats)
        save(args.output or RESULTS / "cpu_indexed.json", {"model": INDEXED.to_diff_dict(), "rows": rows})
        return
    if args.methods is not None:
        if "full" not in args.methods.split(","):
            parser.error("--methods lacks full, which the others are held against")
        against = None if args.against is None else args.against.resolve()
        rows = all_methods(args.methods.split(","), against, args.contexts, args.steps, args.repeats)
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
