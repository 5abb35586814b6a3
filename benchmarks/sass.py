"""Machine code of the kernels of a step at 128K, compiled for an H100 or H200 and counted: no GPU is needed.

    python benchmarks/sass.py [-o FILE]

A layer of an 8B model takes a step on a fake CUDA device, with a method's caches as they are after 128K tokens, and
every kernel of Triton that it launches is compiled with these arguments. Counted are instructions of the listing of
`cuobjdump`: all, and those in loops, which run more than once; shuffles, which sums over threads take; matrix
instructions; reads of global memory of 128 bits, and of at most 16 bits, which should be few where much is read; bytes
spilt to local memory. CTAs are the programs of the grid, which 132 multiprocessors share.
"""

import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/runtime/gpu")]

from common import arguments, save  # noqa: E402
from fake_cuda import CUDA, fake_cuda, method_on_fake_cuda  # noqa: E402
from gpu_predictions import DTYPE, MODEL  # noqa: E402
from kernel_counts import LENGTH, geometry_of, planned  # noqa: E402
from kernel_modules import kernel_modules  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton_compile import TOOLS, AbsentDevice, describe  # noqa: E402

from kvcli.kernels.norm_rope import add_rms_norm, rms_norm, silu_mul  # noqa: E402
from kvcli.kernels.softmax import Softmax  # noqa: E402
from kvcli.methods.contract import AnyMethod  # noqa: E402
from kvcli.models.geometry import ModelGeometry  # noqa: E402
from kvcli.runtime.gpu.pipeline import SlotPipeline  # noqa: E402
from kvcli.runtime.gpu.recorder import SerialStreams  # noqa: E402

CAPABILITY = 90
METHODS = ("full", "freekv", "quest", "fier", "loki", "shadowkv")  # which together launch the kernels that take longest
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")


class Address:
    """What Triton asks of a tensor in order to compile for it."""

    def __init__(self, x: torch.Tensor):
        self.dtype, self.shape, self.begins = x.dtype, x.shape, x.storage_offset() * x.element_size()

    def data_ptr(self) -> int:
        """Where it begins, in an allocation that is aligned as all are."""
        return self.begins

    def stride(self) -> tuple[int, ...]:
        """Nothing depends on it."""
        return (1,) * len(self.shape)


def counted(listing: str) -> dict[str, int]:
    """Count the instructions of a listing."""
    found = [(int(at, 16), name, predicate + rest) for at, predicate, name, rest in LINE.findall(listing)]
    found = [each for each in found if each[1] != "NOP"]
    # Where threads of a warp may differ, code stands after the end, and jumps back unconditionally: that is no loop.
    jumps = [(re.search(r"0x(\w+)", rest), at) for at, name, rest in found if name.startswith("BRA") and "P" in rest]
    loops = [(int(to[1], 16), at) for to, at in jumps if to and int(to[1], 16) < at]
    names = [name for _, name, _ in found]
    loads = [set(name.split(".")) for name in names if name.startswith(("LDG", "LDGSTS"))]
    return {
        "instructions": len(names),
        "in_loops": sum(any(begin <= at <= end for begin, end in loops) for at, *_ in found),
        "shuffles": sum(name.startswith("SHFL") for name in names),
        "matrix": sum(name.startswith(("HMMA", "HGMMA", "IMMA")) for name in names),
        "loads_128": sum("128" in words for words in loads),
        "loads_16": sum(bool(words & {"U16", "S16", "U8", "S8"}) for words in loads),
    }


def machine_code(compiled: Any) -> dict[str, int]:
    """Count what a compiled kernel consists of."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = [TOOLS / "cuobjdump", "-sass", file.name]
        listing = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    sizes = describe(compiled)
    return counted(listing) | {key: sizes[key] for key in ("registers", "spilt", "shared")}


class Launches:
    """Stands for `kvcli.kernels._triton.launch`: compiles what it is given; kernels that come out alike share a row."""

    def __init__(self) -> None:
        self.method = ""
        self.rows: list[dict[str, Any]] = []

    def __call__(
        self,
        kernel: Any,
        grid: Any,
        *args: Any,
        warps: int = 4,
        stages: int = 2,
        registers: Any = None,
        **constants: Any,
    ) -> None:
        """Compile."""
        given = [Address(x) if isinstance(x, torch.Tensor) else x for x in args]
        options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": True}
        compiled = kernel.run(*given, grid=grid, warmup=True, **constants, **options)
        row = {"kernel": kernel.__name__.strip("_"), "ctas": math.prod(grid), "warps": warps, **machine_code(compiled)}
        alike = next((one for one in self.rows if one.items() >= row.items()), None)
        if alike is None:
            self.rows.append(row | {"methods": [self.method]})
        elif self.method not in alike["methods"]:
            alike["methods"].append(self.method)


def layer_step(method: AnyMethod, geometry: ModelGeometry) -> None:
    """Launch what a layer does in a step: attention, all that goes with it, and norms and SiLU."""
    layer, x = geometry.layers[0], torch.empty(1, 1, geometry.hidden_size, dtype=DTYPE, device=CUDA)
    pipeline = SlotPipeline([method_on_fake_cuda(method)], [LENGTH], SerialStreams())
    pipeline.start()
    q, k, v = (
        torch.empty(1, heads, 1, layer.head_dim, dtype=DTYPE, device=CUDA)
        for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    )
    pipeline.advance()
    pipeline(0, q, k, v, Softmax(layer.head_dim**-0.5))
    pipeline.settle()
    weight, wide = x.new_empty(x.shape[-1]), x.new_empty(1, 1, 2 * geometry.intermediate_size)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5)
    silu_mul(wide)


def main() -> None:
    """Compile, count, and keep it."""
    asked = arguments("Machine code of the kernels of a step at 128K.", "sass").parse_args()
    driver.set_active(AbsentDevice(CAPABILITY))
    geometry, launches = geometry_of(1), Launches()
    for name in METHODS:
        launches.method, method = name, planned(geometry, name, {}, LENGTH)
        with pytest.MonkeyPatch.context() as patch, fake_cuda(patch):
            for module in kernel_modules():
                if hasattr(module, "launch"):
                    patch.setattr(module, "launch", launches)
            layer_step(method, geometry)
    rows = sorted(launches.rows, key=lambda row: (row["kernel"], -row["instructions"]))
    save(asked.output, {"context": LENGTH, "model": MODEL, "dtype": "bfloat16", "rows": rows})


if __name__ == "__main__":
    main()
