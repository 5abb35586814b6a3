"""`kvcli plan` against reality: memory and step time of ten combinations, planned from the config and then run.

Each plan and each run is a process of its own, in turn, repeat after repeat; figures are medians over the repeats.

- Memory: what plan adds up without its allowance for the runtime (weights, KV of both tiers, workspace), against how
  far the resident set of a run grows at its peak, from before the model is made to the last step. A short run comes
  before, for what the libraries load when they are first used is the runtime's. The moment at which random weights are
  drawn is left out: a checkpoint's are read instead.
- Step: the time that plan expects, against the median decode step of the run.
- Prefill stands beside them; nothing is claimed of it.

    OMP_NUM_THREADS=2 python benchmarks/plan_check.py
"""

import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import add_output, save
from transformers import LlamaConfig

from kvcli import memory
from kvcli.ceilings import measure_ceilings
from kvcli.dummy import random_model
from kvcli.engine import engine
from kvcli.geometry import geometry_of
from kvcli.model import Model
from kvcli.planning.estimate import Machine, Subject
from kvcli.planning.plan import plan
from kvcli.profile import resolve_profile
from kvcli.sampling import Sampler, Sampling

CPU, DTYPE = torch.device("cpu"), torch.float32
STEPS, WARMUP = 24, 4
SHAPES = {
    "small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "heads": (4, 2)},
    "mid": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "heads": (8, 4)},
    "wide": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "heads": (16, 4)},
}
COMBINATIONS = [  # shape, method, context, batch
    ("small", "streaming", 8192, 1),
    ("small", "fier", 8192, 1),
    ("small", "freekv", 8192, 2),
    ("mid", "full", 4096, 1),
    ("mid", "full", 8192, 1),
    ("mid", "freekv", 4096, 1),
    ("mid", "quest", 8192, 1),
    ("mid", "shadowkv", 4096, 1),
    ("wide", "full", 4096, 2),
    ("wide", "freekv", 4096, 1),
]


def config_of(shape: str) -> LlamaConfig:
    """The config of a shape of `SHAPES`."""
    sizes: dict[str, Any] = dict(SHAPES[shape])
    heads, kv_heads = sizes.pop("heads")
    return LlamaConfig(
        vocab_size=32_000,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=131_072,
        **sizes,
    )


def planned(shape: str, method: str, context: int, batch: int) -> dict[str, float]:
    """What plan says."""
    subject = Subject.of(config_of(shape), DTYPE)
    machine = Machine(CPU, memory.available(CPU), measure_ceilings(CPU, DTYPE), here=True)
    (found,) = plan(subject, machine, [(method, resolve_profile(method))], [context], [batch], STEPS)
    assert found.times is not None
    return {
        "bytes": found.needed["host"] - memory.RUNTIME_BYTES,
        "weights": found.need.weights,
        "kv": found.need.kv.device + found.need.kv.host,
        "workspace": found.need.workspace,
        "step_ms": 1000 * found.times.step,
        "floor_ms": 1000 * found.times.floor,
        "prefill_ms": 1000 * found.times.prefill,
    }


def run(shape: str, method: str, context: int, batch: int) -> dict[str, float]:
    """What really happens, by the moves of `kvcli generate`; once in little before, so that all libraries are there."""
    little = config_of("small")
    little.num_hidden_layers, little.vocab_size = 4, 1000
    _run(little, method, 3000, 1)
    return _run(config_of(shape), method, context, batch)


def _run(config: LlamaConfig, method: str, context: int, batch: int) -> dict[str, float]:
    profile, geometry = resolve_profile(method), geometry_of(config, DTYPE)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back, so that it is not taken for free
    before = _status("VmRSS")
    module = random_model(config, DTYPE, CPU).requires_grad_(False).train(False)
    model = Model(module, None, geometry, CPU, DTYPE, "made up", "dummy")  # type: ignore[arg-type]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    generator = torch.Generator().manual_seed(0)
    with engine(model, [context + STEPS]) as ready, torch.inference_mode():
        started, rows = time.perf_counter(), []
        for _ in range(batch):
            ids = torch.randint(config.vocab_size, (context,), generator=generator).tolist()
            made = ready.method(profile, ready.context(context, STEPS))
            (logits,) = ready.read(ids, [made])
            rows.append(_Row(made, context, int(logits.argmax())))
        prefill = time.perf_counter() - started
        sampler, times = Sampler(Sampling(), 0, CPU), []
        for _ in range(STEPS - 1):
            started = time.perf_counter()
            for row in rows:
                row.method.context.counters.next_step()
            for row, logits in zip(rows, ready.step(rows), strict=True):  # type: ignore[arg-type]
                row.token_ids.append(sampler(logits))
            times.append(time.perf_counter() - started)
    return {
        "bytes": _status("VmHWM") - before,
        "step_ms": 1000 * statistics.median(times[WARMUP:]),
        "prefill_ms": 1000 * prefill,
    }


class _Row:
    """What a step reads of a sequence."""

    def __init__(self, method: Any, prompt: int, token: int):
        self.method, self.prompt, self.token_ids = method, prompt, [token]

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.prompt + len(self.token_ids) - 1


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _apart(what: str, combination: tuple[Any, ...]) -> dict[str, float]:
    """Do it in a process of its own."""
    command = [sys.executable, __file__, what, *map(str, combination)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]


def check(combination: tuple[str, str, int, int], repeats: int) -> dict[str, Any]:
    """Plan and run one combination, print and return both."""
    plans, runs = [], []
    for _ in range(repeats):
        plans.append(_apart("plan", combination))
        runs.append(_apart("run", combination))
    said, was = ({key: statistics.median(each[key] for each in found) for key in found[0]} for found in (plans, runs))
    ratios = {key: said[key] / was[key] for key in was}
    shape, method, context, batch = combination
    print(
        f"{shape:<6}{method:<10}{context:>7,} x{batch}  memory {said['bytes'] / 2**20:7.0f} MiB planned,"
        f" {was['bytes'] / 2**20:7.0f} taken ({ratios['bytes']:.3f})  step {said['step_ms']:7.1f} ms planned,"
        f" {was['step_ms']:7.1f} taken ({ratios['step_ms']:.2f}), {said['floor_ms']:.1f} at least"
        f"  prefill {ratios['prefill_ms']:.2f}",
        flush=True,
    )
    names = ("shape", "method", "context", "batch")
    return {**dict(zip(names, combination, strict=True)), "planned": said, "taken": was, "planned_by_taken": ratios}


def main() -> None:
    """Check all combinations, print, keep."""
    if len(sys.argv) > 1 and sys.argv[1] in ("plan", "run"):
        shape, method, context, batch = sys.argv[2:]
        print(json.dumps({"plan": planned, "run": run}[sys.argv[1]](shape, method, int(context), int(batch))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="plans and runs of each combination, in turn")
    parser.add_argument("--only", type=int, nargs="+", help="combinations by their place, from 0")
    add_output(parser, "plan_check")
    args = parser.parse_args()
    chosen = COMBINATIONS if args.only is None else [COMBINATIONS[index] for index in args.only]
    load = os.getloadavg()[0]
    rows = [check(combination, args.repeats) for combination in chosen]
    worst = {
        what: max(abs(row["planned_by_taken"][key] - 1) for row in rows)
        for what, key in (("memory", "bytes"), ("step", "step_ms"))
    }
    print(f"furthest off: memory {worst['memory']:.1%}, step {worst['step']:.1%}; load average {load:.1f} before")
    save(args.output, {"shapes": SHAPES, "load_average": load, "rows": rows, "furthest_off": worst})


if __name__ == "__main__":
    main()
