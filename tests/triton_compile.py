"""Compile every case's kernels for compute capabilities, which needs no GPU; one line of JSON a kernel.

Not under the interpreter: run it as a program. `python tests/triton_compile.py bfloat16 float32 90 80 100` takes the
last case of every function in both dtypes for 9.0, the first, and of these in bf16 for the others the kernels that are
not the same everywhere: `tied` to the device by matrix products or atomics; for the first also some over latents.
`--all` takes every case in three dtypes for all, and the last ones at five head dimensions. `--ends` takes those that a
size changes at both ends of it, for the first capability. `--check` takes what `benchmarks/gpu.py` checks, every case
in three dtypes at odd and at real sizes, so that a device finds them in Triton's cache. Kernels are specialised as on
the device (argument types, alignment, sizes), down to machine code, by the assembler of Triton.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton_cases import CASES, ODD, REAL, REAL_LATENT, TOLERANCE, Case, Draw, Sizes

from kvcli.kernels import _triton
from kvcli.kernels import paged_attention as paged_decode_attention
from kvcli.kernels.page_table import SlotLayout
from kvcli.kernels.query_similarity import correct_heads
from kvcli.kernels.token_scores import token_scores_device
from kvcli.methods.twilight.kernels import keep_nucleus

# What is compiled for latents, too, which all query heads share.
LATENTS = {paged_decode_attention.paged_decode_attention, token_scores_device, correct_heads, keep_nucleus}
TIED = re.compile("tt.dot|tt.atomic|inline_asm")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class AbsentDevice:
    """What Triton asks of a device in order to compile for it; devices are numbered by their capability."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, _: int) -> int:
        return 0


def describe(compiled: Any) -> dict[str, int]:
    """Registers, bytes spilt and shared, the widest read or write of global memory in bits, and the narrowest read."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    found = re.findall(r"(ld|st)\.global[.a-zA-Z0-9:_]*?((?:\.v\d)?)\.b(\d+)", compiled.asm["ptx"])
    bits = [(which, int(width) * int(several[2:] or 1)) for which, several, width in found]
    sizes = {"registers": registers, "spilt": stack, "shared": compiled.metadata.shared}
    return sizes | {
        "widest": max(each for _, each in bits),
        "narrowest": min((each for which, each in bits if which == "ld"), default=0),
    }


def ends() -> Iterator[Sizes]:
    """Pages of 1 to 64 tokens, the smallest and largest heads and budgets."""
    yield from (REAL._replace(layout=SlotLayout(p, 512 // p, 1024 // p, 512 // p)) for p in (1, 2, 4, 8, 16, 32, 64))
    yield from (REAL._replace(d=d) for d in (64, 256))
    for layout in (SlotLayout(1, 1, 2, 1), SlotLayout(64, 1, 2, 1), SlotLayout(1, 16, 2016, 16)):
        yield REAL._replace(layout=layout)


def plan(dtypes: Sequence[torch.dtype], extent: str) -> Iterator[tuple[torch.dtype, Sizes, Case]]:
    """What to compile: dtype, sizes, case."""
    last = list({case.kernel: case for case in CASES}.values())
    if extent == "--ends":
        marking = next(case for case in CASES if case.name == "topk_pages_device-first")  # has loops of its own
        yield dtypes[0], REAL._replace(layout=SlotLayout(1, 16, 2016, 16)), marking
        yield from ((dtype, sizes, case) for dtype in dtypes for sizes in ends() for case in last)
        return
    if extent == "--check":
        yield from itertools.product(TOLERANCE, (ODD, REAL), CASES)
        return
    yield from ((torch.bfloat16, REAL_LATENT, case) for case in last if case.kernel in LATENTS)
    if extent != "--all":
        yield from itertools.product(dtypes, (REAL,), last)
        return
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield from ((dtype, REAL, case) for case in CASES)
        yield from ((dtype, REAL._replace(d=d), case) for d in (64, 80, 96, 256) for case in last)


def main(capabilities: Sequence[int], dtypes: Sequence[torch.dtype], extent: str) -> None:
    """Call the cases with launches replaced by compilation."""
    everything = extent == "--all"
    _triton.on_cpu = True
    paged_decode_attention.multiprocessors = lambda _: 132
    launch, seen, tied = JITFunction.run, set(), set()
    case_of: dict[str, Any] = {}

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = kernel.__name__
        if not everything and case_of["capability"] != capabilities[0] and name not in tied:
            return
        compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
        if TIED.search(compiled.asm["ttir"]):
            tied.add(name)
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            line = {"kernel": name, **case_of, "tied": name in tied, **describe(compiled)}
            print(json.dumps(line), flush=True)

    JITFunction.run = compile_only
    for dtype, sizes, case in plan(dtypes, extent):
        call = case.make(Draw(dtype, torch.device("cpu")), sizes)
        everywhere = everything or (dtype == torch.bfloat16 and sizes is REAL)
        for capability in capabilities if everywhere else capabilities[:1]:
            driver.set_active(AbsentDevice(capability))
            case_of.update(case=case.name, capability=capability, dtype=str(dtype).removeprefix("torch."), d=sizes.d)
            case_of.update(layout=sizes.layout)
            case.kernel(*call.args)


if __name__ == "__main__":
    words = sys.argv[1:]
    asked = [getattr(torch, word) for word in words if word.startswith(("float", "bfloat"))]
    extents = [word for word in words if word in ("--all", "--ends", "--check")]
    main([int(word) for word in words if word.isdigit()] or [90], asked or [torch.bfloat16], *(extents or [""]))
