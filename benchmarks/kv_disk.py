"""Decode steps with KV on a disk below host memory, against the same steps with all of it in host memory.

The bundled model answers on a document of 8K tokens, and a dummy Llama (8 layers, width 512, 4 KV heads, fp32) goes on
from 16K tokens of made-up KV, fed the same token at every step ("steady", queries hardly turn, as those of trained
models) or its own ("turning": with random weights nearly every page is recalled at every step, and no cache helps).
Host memory caches `--share` of the KV. Both run in one process in turn, repeat after repeat, and a ratio is taken
within each; tokens have to be the same. The first steps do not count: there the cache learns what is asked for.

    OMP_NUM_THREADS=1 python benchmarks/kv_disk.py --disk DIR
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import arguments, save, spread
from random_weights import CONFIG, SOFTMAX, made_up_kv, model_of
from transformers import LlamaForCausalLM

from kvcli.capacity.memory import kv_footprint
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.memory.disk_tier import DiskTier
from kvcli.methods import get_method
from kvcli.methods.contract import AnyMethod
from kvcli.models.loading import Model, ModelSpec, open_checkpoint
from kvcli.runtime.engine import Engine, engine
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.report import Sequence

DOCUMENT = Path(__file__).parent.parent / "examples" / "needle-8k.txt"
LEARNING, COUNTED = 32, 32  # steps
DEMO = {"budget": 1024, "sink": 64, "window": 128, "offload": True}
MID = {**DEMO, "sink": 128}


@dataclass
class Case:
    """A model at a context, a method, and how its KV comes and its tokens are chosen."""

    name: str
    model: Model
    profile: Profile
    context: int
    fill: Callable[[Engine, AnyMethod], torch.Tensor]
    steady: bool = False


def cases(methods: list[str]) -> list[Case]:
    """Make the models, and what is run on them."""
    demo = open_checkpoint(ModelSpec(None)).load()
    ids = demo.tokenizer(DOCUMENT.read_text())["input_ids"]
    torch.manual_seed(0)
    dummy = model_of(LlamaForCausalLM(CONFIG).eval().requires_grad_(False))
    context = 16_384
    kv = made_up_kv(context)

    def noise(_: Engine, method: AnyMethod) -> torch.Tensor:
        for layer, (k, v) in enumerate(kv):
            method.prefill(layer, k, v, torch.zeros(CONFIG.num_attention_heads, 0, k.shape[2]), SOFTMAX)
        return torch.zeros(CONFIG.vocab_size)

    found = []
    for name in methods:
        known = get_method(name).Config.model_fields
        small, large = (
            resolve_profile(name, overrides={key: value for key, value in sizes.items() if key in known})
            for sizes in (DEMO, MID)
        )
        found.append(Case("demo", demo, small, len(ids), lambda ready, method: ready.prefill(ids, [method])[0]))
        found.append(Case("mid, steady", dummy, large, context, noise, steady=True))
        if name == "freekv":
            found.append(Case("mid, turning", dummy, large, context, noise))
    return found


def run(case: Case, disk: DiskTier | None) -> tuple[Sequence, dict[str, Any]]:
    """Decode all steps; gives also the median of those that count in ms, and what the disk did in them."""
    steps = LEARNING + COUNTED
    sampling = Sampling(max_tokens=steps + 1, ignore_eos=True)
    with engine(case.model, [case.context + steps + 1], disk=disk) as ready:
        method = ready.method(case.profile, ready.context(case.context, steps + 1))
        logits = case.fill(ready, method)
        sampler = (lambda _: 7) if case.steady else None
        sequence = ready.sequence(method, sampling, sampler=sampler)
        sequence.accept(logits)
        for _ in ready.decode([sequence]):
            pass
        blocks = [cache.disk for cache in method.caches if cache.disk is not None]
        asked = blocks[0].layout.block_bytes if blocks else 0
        held = method.footprint()
    report = sequence.report()
    counted = report.steps[LEARNING:]
    reads, read = sum(step.disk_reads for step in counted), sum(step.bytes_from_disk for step in counted)
    return report, {
        "step_ms": statistics.median(step.ms for step in counted),
        "host_hits": sum(step.host_hits for step in counted),
        "disk_reads": reads,
        "bytes_from_disk_a_step": read / len(counted),
        "read_by_missed": read / (reads * asked) if reads else None,
        "host": held.host,
        "disk": held.disk,
    }


def measure(case: Case, share: float, folder: Path, repeats: int) -> dict[str, Any]:
    """Run a case with and without a disk in turn."""
    capacity = case.context + LEARNING + COUNTED + 1
    held = kv_footprint(case.profile, case.model.geometry, capacity, case.model.dtype, case.context).host
    ratios, plain_ms, found = [], [], []
    for _ in range(repeats):
        expected, plain = run(case, None)
        with DiskTier(folder, int(share * held)) as disk:
            report, with_disk = run(case, disk)
        assert report.token_ids == expected.token_ids
        assert report.cache.misses == expected.cache.misses
        ratios.append(with_disk["step_ms"] / plain["step_ms"])
        plain_ms.append(plain["step_ms"])
        found.append(with_disk)
    last = found[-1]
    asked = last["host_hits"] + last["disk_reads"]
    row = {
        "case": case.name,
        "method": case.profile.method,
        "context": case.context,
        "kv_bytes": held,
        "step_by_step_without": spread(ratios),
        "step_ms": spread([each["step_ms"] for each in found]),
        "step_ms_without": spread(plain_ms),
        "hit_rate": last["host_hits"] / asked if asked else None,
        **{key: last[key] for key in ("disk_reads", "bytes_from_disk_a_step", "read_by_missed", "host", "disk")},
        "tokens_identical": True,
    }
    hits = "-" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}"
    amplified = "-" if last["read_by_missed"] is None else f"{last['read_by_missed']:.2f}"
    ratio = row["step_by_step_without"]
    print(
        f"{case.name:<13}{case.profile.method:<10}{case.context:>7,}  {ratio['median']:.2f}x"
        f" ({ratio['min']:.2f} to {ratio['max']:.2f}) of {row['step_ms_without']['median']:.1f} ms  hits {hits}"
        f"  {last['bytes_from_disk_a_step'] / 2**20:.2f} MiB a step, {amplified}x of what was missed",
        flush=True,
    )
    return row


def main() -> None:
    """Measure, print, keep."""
    parser = arguments(__doc__, "kv_disk")
    parser.add_argument("--repeats", type=int, default=5, help="of each case")
    parser.add_argument("--share", type=float, default=0.2, help="of the KV that host memory caches")
    parser.add_argument("--methods", default="freekv,arkvale,infllm,shadowkv,offload")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="directory of the files")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    rows = [measure(case, given.share, given.disk, given.repeats) for case in cases(given.methods.split(","))]
    settings = {"share": given.share, "learning_steps": LEARNING, "counted_steps": COUNTED, "load_average": load}
    save(given.output, {**settings, "rows": rows})


if __name__ == "__main__":
    main()
