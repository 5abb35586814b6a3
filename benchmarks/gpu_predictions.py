"""Predicted times of a decode step of every method on a GPU, from bytes, kernels and published rates: none is needed.

    python benchmarks/gpu_predictions.py [--gpu NAME] [-o FILE]

Bytes are those of `kvcli plan --gpu` (`kvcli.capacity.roofline.step_work`), rates the maker's (`GPUS`). The floor is
what these alone allow, with recall beside all else. A prediction adds what a step has beside its bytes:

- Memory and bus reach a part of their rates (`ATTAINED`, `BUS`).
- Every kernel of a layer's chain (`kernel_counts.json`) begins some time after the one before it ends, in a CUDA graph
  (`LAUNCH_SECONDS`).
- Grids begin and end slowly: beside its bytes a kernel takes `KERNEL_SECONDS`, a product of one row
  `PRODUCT_SECONDS`, attention, whose programs read a few pages each, `ATTENTION_SECONDS`.
- What is recalled before attention is waited for, and the first page takes `RECALL_SECONDS` more. Where attention
  itself recalls, its beginning is not waited for again, but for `LAST_SECONDS` once the last page has come.
- Kernels without loops issue each of their instructions once (`sass.json`, which has some methods). Multiprocessors
  issue `ISSUED` a second; where this takes longer than the bytes of the scores, the difference counts.
- The last program of a KV head chooses alone (`CHOICE_SECONDS`), and where it also pools the scores, it takes some time
  for each page (`PAGE_SECONDS`). A step waits for this if it chooses before attention; of FreeKV's layers, those in
  which at least one head is corrected.

The constants down to `RECALL_SECONDS` were read from a trace of single layers on an H200 (`gpu_layers.json`,
`streaming`, `full` and `freekv`), `BUS` from `gpu_before.json`. A choice took 14 us and 7 ns a page in steps of
`freekv` with 30 % of its heads corrected (`MEASURED`). At both contexts that is 6.7 us, and 4.9 ns for every
instruction that a warp of the last program executed: 2,964 and 7,361. Today it executes 1,623 and 4,267, which gives
`CHOICE_SECONDS` and `PAGE_SECONDS`.
`LAST_SECONDS` was a guess, with which the steps that were measured afterwards came out within 5 %.
Methods of which a graph runs no whole step spend their time on the host, which is not predicted either: they have a
floor alone.
"""

import json
import operator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from common import RESULTS, arguments, save

from kvcli.capacity import memory
from kvcli.capacity.planning.advice import PublishedGPU, published
from kvcli.capacity.planning.estimate import PlannedRun
from kvcli.capacity.roofline import MachineRates, Rate, Work, least_seconds, step_work
from kvcli.errors import KvcliError
from kvcli.inputs.profiles import Profile, resolve_profile
from kvcli.kernels.page_scores import ALONE
from kvcli.methods import method_names
from kvcli.methods.card import GRAPH, gpu_step_of
from kvcli.methods.contract import AnyMethod
from kvcli.methods.step import FromHost, StepPlan
from kvcli.models.loading import ModelSpec, read_config

MODEL, DTYPE, BUDGET = "llama-3.1-8b", torch.bfloat16, 2048
CONTEXTS = (32_768, 131_072)
OUTPUT = 256  # tokens that there is room for
ATTAINED = 0.9  # of the published rate of memory, by long reads: 4.3 TB/s on an H200
BUS = 0.77  # of that of the bus, by kernels that read host memory: 49 GB/s
LAUNCH_SECONDS = 0.45e-6  # from the end of a kernel to the beginning of the next one, in a graph
KERNEL_SECONDS = 1.6e-6
PRODUCTS, SPLIT = 4, 2  # of a layer: products, and kernels that add up the parts of some
PRODUCT_SECONDS = 3.5e-6
ATTENTION_SECONDS = 10.5e-6
RECALL_SECONDS = 1.5e-6  # beside those of a kernel: the list, the address and the page are read one after another
LAST_SECONDS = 5e-6
BY_ATTENTION = True  # whether attention recalls where it can, as it does since steps were measured
BESIDE_LAYERS = 15  # kernels of a step outside its layers: embedding, angles, head, choice of the token, log
TURNOVER = 0.2  # part of what is selected that a step exchanges, where it stays on the device
CORRECTED = 0.3  # part of FreeKV's KV heads that wait for their recall
CHOICE_SECONDS = 10.3e-6  # of the last program of a KV head, whatever there is to choose from
PAGE_SECONDS = 4.2e-9  # more for every page of the head, where that program pools their scores as well
MEASURED = {"CHOICE_SECONDS": 14e-6, "PAGE_SECONDS": 7e-9, "BY_ATTENTION": False}  # of the steps in `gpu_before.json`
MULTIPROCESSORS = 132
ISSUED = MULTIPROCESSORS * 4 * 1.75e9  # instructions of warps a second: schedulers of each, Hz under load
EXPOSED = {"before": 1.0, "after": CORRECTED, "ahead": 0.0, "borrowed": 0.0}  # part of the recall, by the choice's time


def main() -> None:
    """Predict, print the table, and keep it."""
    parser = arguments("Predicted times of a decode step of every method on a GPU.", "gpu_predictions")
    parser.add_argument("--gpu", default="h200", help="a GPU of `kvcli plan --gpu`")
    asked = parser.parse_args()
    gpu = published(asked.gpu)
    subject = PlannedRun.of(read_config(ModelSpec(MODEL, load_format="dummy")), DTYPE)
    counts = json.loads((RESULTS / "kernel_counts.json").read_text())["methods"]
    rows = [
        predicted(subject, gpu, label, profile, context, counts)
        for label, profile in profiles(counts)
        for context in CONTEXTS
    ]
    names = ("ATTAINED", "BUS", "ISSUED", "TURNOVER", "CORRECTED")
    assumed = {
        name.lower(): globals()[name] for name in (*names, *(each for each in globals() if each[-8:] == "_SECONDS"))
    }
    made = {"gpu": asked.gpu, "source": gpu.source, "model": MODEL, "dtype": "bfloat16", "budget": BUDGET, "batch": 1}
    save(asked.output, {"predicted": True, **made, "assumed": assumed, "rows": rows})


def profiles(counts: dict[str, Any]) -> list[tuple[str, Profile]]:
    """Every method as it comes, with one budget, and those settings of `kernel_counts.json` that change its bytes."""
    found = [(name, resolved(name)) for name in method_names()]
    found += [
        (label, resolved(label.partition("-")[0], offload=True)) for label in counts if label.endswith("-offload")
    ]
    found.append(("streaming-positions", resolved("streaming", positions="cache")))
    return sorted(found, key=lambda each: each[0])


def resolved(name: str, **changed: Any) -> Profile:
    """Settings of a method's profile, but for the budget where it takes that one."""
    with suppress(KvcliError):
        return resolve_profile(name, overrides={"budget": BUDGET, **changed})
    return resolve_profile(name, overrides=changed)


def predicted(
    subject: PlannedRun, gpu: PublishedGPU, label: str, profile: Profile, context: int, counts: dict[str, Any]
) -> dict[str, Any]:
    """Predict a step of one sequence: the parts of its time in ms, `step_ms` None where the host decides."""
    geometry, itemsize, depth = subject.geometry, DTYPE.itemsize, subject.geometry.depth
    method = memory.planned_method(profile, geometry, context + OUTPUT, DTYPE, context)
    graph = gpu_step_of(type(method), method) == GRAPH
    plan = method.step_plan if graph else None
    stays = plan is not None and isinstance(plan.fetch, FromHost)
    work = step_work(geometry, itemsize, [(method, context + 1)], TURNOVER if stays else 1.0)
    work |= foretold(subject, method)
    needed = memory.need(profile, geometry, DTYPE, [context], OUTPUT, 1, device=torch.device("cuda"))
    row = {"method": label, "context": context, "gpu_step": gpu_step_of(type(method), method)}
    row |= {"fits": needed.on(torch.device("cuda"))["device"] <= gpu.memory}
    row |= {"read_bytes": sum(part.read for part in work.values())}
    floor = least_seconds(work, rates(gpu, 1.0, 1.0), True)
    row |= {"recalled_bytes": work["recall"].to_device, "floor_ms": 1000 * floor}
    if plan is None:
        return row | dict.fromkeys(("kernels_ms", "exposed_ms", "choice_ms", "step_ms"))
    dense = method.config.leading_dense_layers
    choosing = depth - dense
    chain = dense * counts["full"]["chain"] + choosing * counts[label]["corrected"] + BESIDE_LAYERS
    attained = rates(gpu, ATTAINED, BUS)
    on_device = sum(replace(part, to_device=0, to_host=0).seconds(attained) for part in work.values())
    begun, waited, chosen = begin_seconds(chain, depth), 0.0, 0.0
    if plan.index is not None:
        waiting = choosing * waiting_part(plan, geometry.layers[-1].num_kv_heads)  # layers
        if stays and waiting:
            beside = RECALL_SECONDS
            if BY_ATTENTION and isinstance(plan.fetch, FromHost) and plan.fetch.rebuild is None:
                beside += LAST_SECONDS - ATTENTION_SECONDS
            waited = max(0.0, EXPOSED[plan.when] * work["recall"].seconds(attained) + waiting * beside)
        scored = sum(work[phase].seconds(attained) for phase in ("score", "select"))
        issued = issue_seconds(label.partition("-")[0], context)
        chosen = waiting * choice_seconds(method, context) + max(0.0, choosing * issued - scored)
    step = max(on_device + waited + begun + chosen, least_seconds(work, attained, True))
    found = {"kernels_ms": begun, "exposed_ms": waited, "choice_ms": chosen, "step_ms": step}
    return row | {name: 1000 * seconds for name, seconds in found.items()}


def choice_seconds(method: AnyMethod, context: int) -> float:
    """Return how long the last program of a KV head searches alone in a layer."""
    pages = -(-(context + OUTPUT) // getattr(method.config, "page_size", 1))
    return CHOICE_SECONDS + (PAGE_SECONDS * pages if pages <= ALONE else 0.0)


def begin_seconds(chain: int, depth: int) -> float:
    """Return how long the kernels of a step's chain take beside their bytes, those between them included."""
    kernels, products = chain + depth * SPLIT, depth * PRODUCTS
    small = kernels - products - depth
    own = products * PRODUCT_SECONDS + depth * ATTENTION_SECONDS + small * KERNEL_SECONDS
    return kernels * LAUNCH_SECONDS + own


def waiting_part(plan: StepPlan, heads: int) -> float:
    """Return the part of the layers that wait for a choice: all, none, or those in which a head is corrected."""
    return 1 - (1 - CORRECTED) ** heads if plan.when == "after" else EXPOSED[plan.when]


def issue_seconds(method: str, context: int) -> float:
    """Return how long a layer's kernels without loops issue instructions; grids that fill a GPU grow with the context.

    It is 0 for methods whose kernels `sass.json` does not have.
    """
    kept = json.loads((RESULTS / "sass.json").read_text())
    rows = [row for row in kept["rows"] if method in row["methods"] and not row["in_loops"]]
    issued = [row["instructions"] * row["warps"] * row["ctas"] for row in rows]
    grown = [context / kept["context"] if row["ctas"] > MULTIPROCESSORS else 1.0 for row in rows]
    return sum(map(operator.mul, issued, grown)) / ISSUED


def foretold(subject: PlannedRun, method: AnyMethod) -> dict[str, Work]:
    """Queries, keys and values made a layer ahead: the weights of these products are read once more."""
    if not method.wants_next_query:
        return {}
    heads = (layer.num_heads + 2 * layer.num_kv_heads for layer in subject.geometry.layers if layer.index > 0)
    width = subject.geometry.layers[0].head_dim * subject.geometry.hidden_size
    return {"foretold": Work(read=sum(heads) * width * DTYPE.itemsize)}


def rates(gpu: PublishedGPU, part: float, of_bus: float) -> MachineRates:
    """Take these parts of the rates that a maker publishes; a copy reads and writes."""
    read, bus = Rate.given(part * gpu.bandwidth), Rate.given(of_bus * gpu.bus)
    return MachineRates(read, Rate.given(part * gpu.bandwidth / 2), bus, bus, Rate.given(part * gpu.compute))


if __name__ == "__main__":
    main()
