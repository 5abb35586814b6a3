"""`kvcli plan` against reality: memory and step time of combinations, planned from the config and then run.

Every repeat is two processes, one that counts and one that is timed; each does what `generate` does and plans half way
through the decode steps as if it knew nothing of them. Figures are medians over the repeats, ratios too.

- Memory: what plan adds up without its allowance for the runtime (weights, KV of both tiers, workspace), against how
  far the resident set of a run grows at its peak, from before the model is made to the middle of decoding. A short run
  comes before, for what the libraries load when they are first used is the runtime's. The moment at which random
  weights are drawn is left out: a checkpoint's are read instead. So that the resident set is what is allocated, the
  caches are filled when they are made, and the allocator gives back what is freed (`MALLOC_*`).
- Resident: the same in the timed process, where nothing is filled and the allocator does as it likes. Slots that no
  token has reached when the prefill takes its most are missing there, and what the allocator keeps is there too much;
  that is what plan's allowance is for.
- Step: the time that plan expects, against the median decode step, as many taken before it as after: a machine that
  others share changes its pace within seconds, and this way both see the same pace.
- Prefill stands beside them; nothing is claimed of it.

    OMP_NUM_THREADS=2 python benchmarks/plan_check.py
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import arguments, save, spread
from random_weights import model_of
from transformers import DeepseekV2Config, LlamaConfig, PreTrainedConfig, Qwen3NextConfig

from kvcli.capacity import memory
from kvcli.capacity.disk import disk_tier
from kvcli.capacity.planning.estimate import Machine, PlannedRun
from kvcli.capacity.planning.plan import plan
from kvcli.capacity.planning.probe import shortened
from kvcli.capacity.roofline import measure_rates
from kvcli.inputs.options import DiskOptions
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.dummy import fallback_tokenizer, random_model
from kvcli.models.geometry import ModelGeometry
from kvcli.models.loading import Model, ModelSpec, load_model, read_config
from kvcli.models.weights import ON_LOADING, form_of
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.sequence import RunningSequence

SHAPES = {
    "small": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "heads": (4, 2)},
    "mid": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "heads": (8, 4)},
    "wide": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "heads": (16, 4)},
}
# Forms in which checkpoints of one more shape are stored, planned from their files and loaded.
STORED = ("int8", "int4")
HEAVY = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6, "heads": (32, 8), "vocab_size": 4000}
KIND: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "moe_intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 131_072,
}
# A hybrid, of which each fourth layer attends and the others keep a state, and latent attention; both with experts.
KINDS: dict[str, PreTrainedConfig] = {
    "hybrid": Qwen3NextConfig(
        **KIND,
        num_key_value_heads=4,
        head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=8,
        shared_expert_intermediate_size=352,
    ),
    "latent": DeepseekV2Config(
        **KIND,
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
    ),
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
    ("hybrid", "freekv", 4096, 1),
    ("hybrid", "freekv", 16_384, 1),
    ("latent", "freekv", 4096, 1),
    ("latent", "freekv", 16_384, 1),
    ("int8", "freekv", 2500, 1),
    ("int4", "freekv", 2500, 1),
    ("mid", "freekv on disk", 8192, 1),
]
CPU, DTYPE = torch.device("cpu"), torch.float32
HALF, WARMUP = 36, 4  # steps on either side of the plan, and how many of each do not count
STEPS = 2 * HALF + 1  # the first token is the prompt's
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}  # glibc's, in bytes
ON_DISK = " on disk"
CACHED = 5  # a fifth of the KV that would lie in host memory is cached there


def config_of(shape: str) -> PreTrainedConfig:
    """The config of a shape of `SHAPES` or `KINDS`."""
    if shape in KINDS:
        return copy.deepcopy(KINDS[shape])
    sizes: dict[str, Any] = {"vocab_size": 32_000, **(HEAVY if shape in STORED else SHAPES[shape])}
    heads, kv_heads = sizes.pop("heads")
    return LlamaConfig(
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=131_072, **sizes
    )


def disk_of(geometry: ModelGeometry, method: str, context: int, batch: int) -> DiskOptions | None:
    """Where KV lies under a method with ` on disk`."""
    if not method.endswith(ON_DISK):
        return None
    profile = resolve_profile(method.removesuffix(ON_DISK))
    held = memory.kv_footprint(profile, geometry, context + STEPS, DTYPE, context).host
    return DiskOptions(Path(tempfile.gettempdir()), batch * held // CACHED)


def store(shape: str, folder: str) -> None:
    """Make a checkpoint in one of the forms of `STORED`, as transformers saves it."""
    random = random_model(config_of(shape), DTYPE, CPU)
    random.save_pretrained(folder)
    fallback_tokenizer(random.config.vocab_size).save_pretrained(folder)
    del random
    load_model(ModelSpec(folder, device="cpu", weights=shape)).module.save_pretrained(folder)  # type: ignore[arg-type]


def planned(shape: str, method: str, context: int, batch: int, folder: str | None) -> dict[str, float]:
    """What plan says, of a checkpoint from its files."""
    if folder is None:
        subject = PlannedRun.of(config_of(shape), DTYPE)
    else:
        config = read_config(ModelSpec(folder))
        subject = PlannedRun.of(config, DTYPE, form_of(config, "auto", CPU), Path(folder))
    machine = Machine(CPU, memory.available(CPU), measure_rates(CPU, DTYPE), here=True)
    profiles = [(method, resolve_profile(method.removesuffix(ON_DISK)))]
    disk = disk_of(subject.geometry, method, context, batch)
    (found,) = plan(subject, machine, profiles, [context], [batch], STEPS, disk=disk)
    assert found.times is not None
    return {
        "bytes": found.needed["host"] - memory.RUNTIME_BYTES,
        "weights": found.need.weights,
        "kv": found.need.kv.device + found.need.kv.host,
        "disk": found.need.kv.disk,
        "workspace": found.need.workspace,
        "step_ms": 1000 * found.times.step,
        "floor_ms": 1000 * found.times.roofline,
        "prefill_ms": 1000 * found.times.prefill,
    }


def run(shape: str, method: str, context: int, batch: int, fill: bool, folder: str | None) -> dict[str, Any]:
    """What really happens, by the moves of `kvcli generate`, and the plan; once in little before, for the libraries.

    `fill`: write the caches when they are made, so that what is allocated is resident.
    """
    little = shortened(config_of(shape if shape in KINDS else "small"), 4, DTYPE.itemsize)
    little.vocab_size = 1000
    form = ON_LOADING.get(shape)  # of which the libraries, too, are used once
    # So many tokens that loops for long contexts are loaded, too.
    _run(lambda: model_of(random_model(little, DTYPE, CPU, form)), method, 10_000, 1, fill, dict)

    def made() -> Model:
        if folder is not None:
            return load_model(ModelSpec(folder, device="cpu"))
        return model_of(random_model(config_of(shape), DTYPE, CPU))

    return _run(made, method, context, batch, fill, lambda: planned(shape, method, context, batch, folder))


def _run(
    make: Callable[[], Model],
    method: str,
    context: int,
    batch: int,
    fill: bool,
    between: Callable[[], dict[str, float]],
) -> dict[str, Any]:
    profile = resolve_profile(method.removesuffix(ON_DISK))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back, so that it is not taken for free
    before = _status("VmRSS")
    model = make()
    idle = _idle(model.module)
    model.module.requires_grad_(False).train(False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    generator = torch.Generator().manual_seed(0)
    # Tokens are drawn: the likeliest ones of random weights soon repeat themselves, and then nothing is recalled.
    sampling = Sampling(max_tokens=STEPS, temperature=1.0, ignore_eos=True)
    asked = disk_of(model.geometry, method, context, batch)
    disk = None if asked is None else disk_tier(asked, profile, CPU, batch)
    with engine(model, [context + STEPS], disk=disk) as ready, disk or nullcontext():
        started, sequences = time.perf_counter(), []
        for index in range(batch):
            ids = torch.randint(model.geometry.vocab_size, (context,), generator=generator).tolist()
            with _filled() if fill else nullcontext():
                made = ready.method(profile, ready.context(context, STEPS))
            (logits,) = ready.prefill(ids, [made])
            sequences.append(ready.sequence(made, sampling, index=index, sample=index))
            sequences[-1].accept(logits)
        prefill = time.perf_counter() - started
        steps = ready.decode(sequences)
        times = _steps(steps, sequences[0])
        # A library that copies weights at their first product leaves more of the file behind.
        taken = _status("VmHWM") - before - max(idle, _idle(model.module))
        said = between()
        times += _steps(steps, sequences[0])
        lying = sum(sequence.method.footprint().disk for sequence in sequences)
    was = {"disk": lying, "bytes": taken, "step_ms": statistics.median(times), "prefill_ms": 1000 * prefill}
    return {"planned": said, "taken": was}


@contextmanager
def _filled() -> Iterator[None]:
    """Have torch write what is allocated here (with NaN, so that a step that read it would be found out)."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _steps(steps: Iterator[object], sequence: RunningSequence) -> list[float]:
    """Run half of the steps of a decode loop: milliseconds of those that count."""
    done = len(sequence.decode_ms)
    for _ in islice(steps, HALF):
        pass
    return sequence.decode_ms[done + WARMUP :]


def _idle(model: torch.nn.Module) -> int:
    """Bytes of files of weights that are mapped and resident although a library has copied them: nothing needs them."""
    held, idle, start, stop = list(model.state_dict().values()), 0, 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) .*\.safetensors", line):
            start, stop = (int(bound, 16) for bound in found.groups())
        elif re.match(r"[0-9a-f]+-", line):
            start = stop = 0
        elif stop and line.startswith("Rss:"):
            used = sum(x.numel() * x.element_size() for x in held if start <= x.data_ptr() < stop)
            idle += max(0, (int(line.split()[1]) << 10) - used)
    return idle


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def check(combination: tuple[str, str, int, int], repeats: int) -> dict[str, Any]:
    """Run one combination with its plan, print and return both; every ratio is of one process."""
    found = [_repeat(combination) for _ in range(repeats)]
    said, was = (
        {key: statistics.median(each[of][key] for each in found) for key in found[0][of]} for of in ("planned", "taken")
    )
    pairs = {"bytes": "bytes", "resident": "bytes", "step_ms": "step_ms", "prefill_ms": "prefill_ms"}
    ratios = {
        key: spread([each["planned"][plan] / each["taken"][key] for each in found]) for key, plan in pairs.items()
    }
    shape, method, context, batch = combination
    step = ratios["step_ms"]
    print(
        f"{shape:<6}{method:<15}{context:>7,} x{batch}  memory {said['bytes'] / 2**20:7.0f} MiB planned,"
        f" {was['bytes'] / 2**20:7.0f} taken ({ratios['bytes']['median']:.3f}),"
        f" {was['resident'] / 2**20:7.0f} resident ({ratios['resident']['median']:.3f})"
        f"  step {said['step_ms']:7.1f} ms planned, {was['step_ms']:7.1f} taken"
        f" ({step['median']:.2f}, {step['min']:.2f}-{step['max']:.2f}), {said['floor_ms']:.1f} at least"
        f"  prefill {ratios['prefill_ms']['median']:.2f}",
        flush=True,
    )
    names = ("shape", "method", "context", "batch")
    return {**dict(zip(names, combination, strict=True)), "planned": said, "taken": was, "planned_by_taken": ratios}


def _repeat(combination: tuple[str, str, int, int]) -> dict[str, Any]:
    """The plan and what the timed process took, with the bytes of the other one beside it."""
    command = [sys.executable, __file__]
    with TemporaryDirectory() as folder:
        stored = [folder] if combination[0] in STORED else []
        if stored:
            subprocess.run([*command, "store", combination[0], folder], check=True)

        def one(kind: str, settings: dict[str, str]) -> dict[str, Any]:
            environment = {**os.environ, **settings}
            line = [*command, "run", *map(str, combination), kind, *stored]
            out = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
            return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]

        counted, timed = one("counted", GIVEN_BACK), one("timed", {})
    timed["taken"] |= {"bytes": counted["taken"]["bytes"], "resident": timed["taken"]["bytes"]}
    return timed


def main() -> None:
    """Check all combinations, print, keep."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns at every product that it rounds inputs
    if len(sys.argv) > 1 and sys.argv[1] == "run":
        shape, method, context, batch, kind, *stored = sys.argv[2:]
        folder = stored[0] if stored else None
        print(json.dumps(run(shape, method, int(context), int(batch), kind == "counted", folder)))
        return
    if len(sys.argv) > 1 and sys.argv[1] == "store":
        store(*sys.argv[2:])
        return
    parser = arguments(__doc__, "plan_check")
    parser.add_argument("--repeats", type=int, default=5, help="of each combination")
    parser.add_argument("--only", type=int, nargs="+", help="combinations by their place, from 0")
    args = parser.parse_args()
    chosen = COMBINATIONS if args.only is None else [COMBINATIONS[index] for index in args.only]
    load = os.getloadavg()[0]
    rows = [check(combination, args.repeats) for combination in chosen]
    worst = {
        what: max(abs(row["planned_by_taken"][key]["median"] - 1) for row in rows)
        for what, key in (("memory", "bytes"), ("resident", "resident"), ("step", "step_ms"))
    }
    off = ", ".join(f"{what} {share:.1%}" for what, share in worst.items())
    print(f"furthest off: {off}; load average {load:.1f} before")
    kinds = {name: KINDS[name].to_diff_dict() for name in KINDS if any(row["shape"] == name for row in rows)}
    shapes = {name: SHAPES[name] for name in SHAPES if any(row["shape"] == name for row in rows)} | kinds
    if any(row["shape"] in STORED for row in rows):
        shapes["stored"] = HEAVY
    save(args.output, {"shapes": shapes, "load_average": load, "rows": rows, "furthest_off": worst})


if __name__ == "__main__":
    main()
