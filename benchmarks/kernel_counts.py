"""Kernels that every method launches a layer and step at 128K, counted on a fake CUDA device: no GPU is needed.

    python benchmarks/kernel_counts.py [--against COMMIT] [-o FILE]

Counted are Triton kernels and operations of torch of a layer's attention and all that goes with it, in an 8B model
whose caches are as they are after a prompt of 128K tokens (`raas-contested`: after a short one, within its budget). The
chain is what the next layer waits for, the model's own kernels of a llama layer among them (`LAYER` of
`tests/runtime/gpu/test_fused.py`); where heads are corrected it is longer. `--against` puts the budgets of the trace's
test at a commit beside.
"""

import ast
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/runtime/gpu")]

import test_fused  # noqa: E402
import test_trace  # noqa: E402
from common import arguments, save  # noqa: E402
from gpu_predictions import BUDGET, DTYPE, MODEL, OUTPUT, resolved  # noqa: E402
from stated import variants  # noqa: E402

from kvcli.capacity import memory  # noqa: E402
from kvcli.capacity.planning.estimate import PlannedRun  # noqa: E402
from kvcli.methods import get_method  # noqa: E402
from kvcli.methods.contract import AnyMethod  # noqa: E402
from kvcli.methods.shadowkv.cache import ShadowCache  # noqa: E402
from kvcli.models.geometry import ModelGeometry  # noqa: E402
from kvcli.models.loading import ModelSpec, read_config  # noqa: E402
from kvcli.runtime.gpu.recorder import SerialStreams  # noqa: E402

LENGTH = 131_072
CHOOSING: dict[str, Any] = {"dense_layers": 0, "positions": "original", "retrieval": 0.75}  # unless a switch turns them
TRACE = "tests/runtime/gpu/test_trace.py"


class CountedStreams(SerialStreams):
    """Notes how many kernels were submitted to each stream beside the main one."""

    def __init__(self) -> None:
        self.beside: Counter[str] = Counter()
        self.count: Any = lambda: 0

    def submit(self, name: str, work: Any, after: Any) -> None:  # noqa: ARG002
        """Count what the work launches."""
        before = self.count()
        work()
        self.beside[name.split()[0]] += self.count() - before


def geometry_of(layers: int) -> ModelGeometry:
    """Return the model with its first layers alone."""
    whole = PlannedRun.of(read_config(ModelSpec(MODEL, load_format="dummy")), DTYPE).geometry
    return replace(whole, layers=whole.layers[:layers])


def planned(geometry: ModelGeometry, name: str, changed: dict[str, Any], prompt: int) -> AnyMethod:
    """Make a method that has read a prompt, without the bytes of its caches; all its layers choose."""
    known = get_method(name).Config.model_fields
    settings = {key: value for key, value in CHOOSING.items() if key in known} | changed
    method = memory.planned_method(resolved(name, **settings), geometry, LENGTH + OUTPUT, DTYPE, prompt)
    for cache in method.caches:
        cache.length = prompt
        if isinstance(cache, ShadowCache):
            cache.num_chunks = cache.layout.stored(prompt, prompt)
        for part in [own for _, own in cache.apart] or [cache]:
            part.length = prompt
            slots = part.as_slots()  # made of tensors without bytes, before there are fake ones
            part.as_slots = lambda slots=slots: slots  # type: ignore[method-assign]
    return method


def counted(name: str, switch: dict[str, Any], prompt: int) -> dict[str, float]:
    """Count a layer's kernels after such a prompt: all, of the chain, and of the chain through a corrected head."""
    geometry, streams = geometry_of(test_trace.LAYERS), CountedStreams()
    layer, methods = geometry.layers[0], [planned(geometry, name, switch, prompt)]
    sizes = layer.num_heads, layer.num_kv_heads, layer.head_dim
    with pytest.MonkeyPatch.context() as patch:
        triton, torch_, _ = test_trace.traced(methods, [prompt], patch, streams, *sizes)
    beside = streams.beside
    chain = triton + torch_ - sum(beside.values()) + test_fused.LAYER
    corrected = chain - 1 + beside["correction"] if "correction" in beside else chain
    return {"triton": triton, "torch": torch_, "chain": chain, "corrected": corrected}


def cases() -> dict[str, tuple[str, dict[str, Any], int]]:
    """Name every method and switch that a graph serves, with its prompt; `test_trace.cases` has them, too."""
    found = {str(case.id): (*case.values, LENGTH) for case in variants()}
    return found | {"raas-contested": ("raas", {}, BUDGET // 2)}


def main() -> None:
    """Print the table, and write it."""
    parser = arguments(__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="a commit whose numbers stand beside")
    parser.add_argument("-o", "--output", type=Path, help="write JSON, too")
    asked = parser.parse_args()
    before = budgets(asked.against) if asked.against else {}
    found = {label: counted(*case) for label, case in cases().items()}
    print("| method | Triton + torch | before | chain | through a corrected head |\n| --- | --- | --- | --- | --- |")
    for label, numbers in found.items():
        old = "{} + {}".format(*before[label]) if label in before else ""
        sums = "{triton:g} + {torch:g} | " + old + " | {chain:g} | {corrected:g}"
        print(f"| `{label}` | {sums.format(**numbers)} |")
    if asked.output:
        against = {"commit": asked.against, "methods": before}
        save(asked.output, {"length": LENGTH, "model": test_fused.LAYER, "methods": found, "against": against})


def budgets(commit: str) -> dict[str, list[int]]:
    """Read what the trace's test allowed at a commit: Triton kernels and operations of torch a layer."""
    text = subprocess.check_output(["git", "show", f"{commit}:{TRACE}"], cwd=ROOT, text=True)
    stated = text[text.index("BUDGET = ") + len("BUDGET = ") :]
    return {name: list(numbers) for name, numbers in ast.literal_eval(stated[: stated.index("}") + 1]).items()}


if __name__ == "__main__":
    main()
