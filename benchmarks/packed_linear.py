"""The linear layers of a decode step on the CPU with packed weights, by the time of fp32: least times, taken in turns.

python benchmarks/packed_linear.py
"""

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from common import add_output, save
from torch import Tensor, nn

from kvcli.kernels.packed_linear import PACKINGS, PackedWeight
from kvcli.models.gguf import room_for
from kvcli.runtime.cpu_layers import CpuKernels

SHAPES = {
    "SmolLM2-135M": {"width": 576, "kv": 192, "inner": 1536, "layers": 30},
    "4,096 wide": {"width": 4096, "kv": 1024, "inner": 14336, "layers": 2},
}


def linear(rows: int, columns: int, name: str, room: Iterator[Tensor | None]) -> nn.Linear:
    """Make a layer, of fp32 or of bytes that are numbers of a usual size; these lie where a file's would."""
    made = nn.Linear(columns, rows, bias=False, device="meta")
    if name == "F32":
        made.weight = nn.Parameter(torch.randn(rows, columns), requires_grad=False)
        return made
    drawn = torch.randint(0, 256, (rows, PACKINGS[name].row_bytes(columns)), dtype=torch.uint8)
    packed = drawn & 0xBB if PACKINGS[name].size > 1 else drawn & 0xBF | 0x30
    if name == "MXFP4":
        packed.view(rows, -1, PACKINGS[name].nbytes)[..., 0] = 120  # an exponent
    held = next(room)
    assert held is not None
    packed = held.copy_(packed.view(-1)).view(rows, -1)
    made.weight = nn.Parameter(PackedWeight(packed, PACKINGS[name], torch.float32), requires_grad=False)
    return made


def step(shape: dict[str, int], name: str) -> Callable[[Tensor], None]:
    """Make the products of all layers as steps run them: queries, keys and values are one, and so are gate and up."""
    width, kv, inner, kernels = shape["width"], shape["kv"], shape["inner"], CpuKernels()
    sizes = [(width, width), (kv, width), (kv, width), (inner, width), (inner, width), (width, width), (width, inner)]
    layers, taken = [], [] if name == "F32" else [rows * PACKINGS[name].row_bytes(columns) for rows, columns in sizes]
    room = iter(room_for(taken * shape["layers"], torch.device("cpu")))
    for _ in range(shape["layers"]):
        q, k, v, gate, up, out, down = (linear(*size, name, room) for size in sizes)
        attention, gated = kernels.together([q, k, v]), kernels.gated(gate, up)
        layers.append((attention, kernels.alone(out), gated, kernels.alone(down)))

    def run(x: Tensor) -> None:
        for attention, out, gated, down in layers:
            attention(x)
            out(x)
            down(gated(x))

    return run


@torch.inference_mode()
def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["F32", *PACKINGS])
    parser.add_argument("--repeats", type=int, default=30)
    add_output(parser, "packed_linear")
    args = parser.parse_args()
    results = []
    for called, shape in SHAPES.items():
        names = [name for name in args.formats if name == "F32" or shape["width"] % PACKINGS[name].size == 0]
        steps, x = {name: step(shape, name) for name in names}, torch.randn(1, 1, shape["width"])
        least = dict.fromkeys(names, float("inf"))
        for repeat in range(args.repeats + 1):
            for name, run in steps.items():
                started = time.perf_counter()
                run(x)
                taken = 1000 * (time.perf_counter() - started)
                if repeat:
                    least[name] = min(least[name], taken)
        for name, taken in least.items():
            results.append({"shape": called, "format": name, "ms": taken, "by_fp32": taken / least["F32"]})
            print(f"{called:<14} {name:<6} {taken:8.2f} ms  {taken / least['F32']:.2f}", flush=True)
    save(args.output, {"steps": results})


if __name__ == "__main__":
    main()
