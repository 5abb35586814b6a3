"""Linear layers on the CPU: in fp32 against torch's own and oneDNN's, and with packed weights by the time of fp32.

    python benchmarks/cpu_linear.py fp32
    python benchmarks/cpu_linear.py packed

`fp32` runs one layer at several numbers of rows, `packed` all those of a decode step, from one attention to the next in
one loop as a step runs them, and the vocabulary's; of these the least times count.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from common import add_command, arguments, ratios, said, save, spread
from torch import Tensor, nn

from kvcli.compat import onednn_linear
from kvcli.kernels.chain import Chain, Gate, Products
from kvcli.kernels.packed_linear import PACKINGS, PackedWeight
from kvcli.models.weights import room_for
from kvcli.runtime.linear import by_memory, cpu_linears, matrix_of

WIDTH, INNER = 512, 1408
COPIES = 40  # different weights in turn, more than a cache holds


def milliseconds(work: Callable[[], None]) -> float:
    """Median of 9 calls after a first one."""
    times = []
    for _ in range(10):
        started = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[1:])


SHAPES = {
    "SmolLM2-135M": {"width": 576, "kv": 192, "inner": 1536, "layers": 30, "vocabulary": 49152},
    "dummy:small": {"width": 512, "kv": 256, "inner": 1408, "layers": 8, "vocabulary": 32000},
    "4,096 wide": {"width": 4096, "kv": 1024, "inner": 14336, "layers": 2, "vocabulary": 0},
}

INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp writes for rows that are no whole number of blocks of 256."""


def format_of(name: str, columns: int) -> str:
    """Return the format that rows of so many columns have in a file of this format."""
    return INSTEAD[name] if name in INSTEAD and columns % PACKINGS[name].size else name


def linear(rows: int, columns: int, name: str, room: Iterator[Tensor | None]) -> nn.Linear:
    """Make a layer, of fp32 or of bytes that are numbers of a usual size; these lie where a file's would."""
    made = nn.Linear(columns, rows, bias=False, device="meta")
    if name == "F32":
        made.weight = nn.Parameter(torch.randn(rows, columns), requires_grad=False)
        return made
    held = next(room)
    assert held is not None
    packing = PACKINGS[name]
    drawn = torch.randint(0, 256, (rows, packing.row_bytes(columns)), dtype=torch.uint8)
    packed = drawn & 0xBB if packing.size > 1 else drawn & 0xBF | 0x30
    if name == "MXFP4":
        packed.view(rows, -1, packing.nbytes)[..., 0] = 120  # an exponent
    packed = held.copy_(packed.view(-1)).view(rows, -1)
    made.weight = nn.Parameter(PackedWeight(packed, packing, torch.float32), requires_grad=False)
    return made


def step(shape: dict[str, int], name: str) -> Callable[[Tensor], None]:
    """Make the products of a step, each layer's from what attention gave to the next queries, keys and values."""
    width, kv, inner = shape["width"], shape["kv"], shape["inner"]
    sizes = [(width, width), (inner, width), (inner, width), (width, inner), (width, width), (kv, width), (kv, width)]
    sizes = sizes * shape["layers"] + [(shape["vocabulary"], width)] * (shape["vocabulary"] > 0)
    formats = [format_of(name, columns) for _, columns in sizes]
    both = list(zip(sizes, formats, strict=True))
    taken = [] if name == "F32" else [rows * PACKINGS[each].row_bytes(columns) for (rows, columns), each in both]
    room = iter(room_for(taken, torch.device("cpu")))
    linears = [linear(*size, each, room) for size, each in both]
    chains = []
    for first in range(0, 7 * shape["layers"], 7):
        out, gate, up, down, *attention = map(matrix_of, linears[first : first + 7])
        stages = [
            Products("attended", "sum", [out], plus="x"),
            Gate("sum", "inner", gate, up),
            Products("inner", "out", [down], plus="sum"),
            Products("out", "products", attention),
        ]
        chains.append(Chain(["x", "attended"], stages, ["products"]))
    head = by_memory(linears[-1]) if shape["vocabulary"] else None

    def run(x: Tensor) -> None:
        for chain in chains:
            chain(x, x)
        if head is not None:
            head(x)

    return run


def fp32(args: argparse.Namespace) -> None:
    """Run a layer as kvcli does, as torch does and by oneDNN."""
    model = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(COPIES))
    results = []
    for rows in args.rows:
        x, theirs, onednn, ours = torch.randn(1, rows, WIDTH), [], [], []

        def work(x: torch.Tensor = x) -> None:
            for layer in model:
                layer(x)

        def by_onednn(x: torch.Tensor = x) -> None:
            for layer in model:
                onednn_linear(x, layer.weight)

        for _ in range(args.repeats):
            theirs.append(milliseconds(work))
            onednn.append(milliseconds(by_onednn))
            with cpu_linears(model):
                ours.append(milliseconds(work))
        ratio, over = (ratios(other, ours) for other in (theirs, onednn))
        times = {"torch_ms": spread(theirs), "onednn_ms": spread(onednn), "kvcli_ms": spread(ours)}
        results.append({"rows": rows, **times, "speedup": ratio, "speedup_over_onednn": over})
        print(f"{rows:>5} rows: {said(ratio)} the speed", flush=True)
    save(args.output, {"shape": [INNER, WIDTH], "rows": results})


def packed(args: argparse.Namespace) -> None:
    """Run the layers of a decode step with weights in each format."""
    results = []
    for called, shape in SHAPES.items():
        steps, x = {name: step(shape, name) for name in args.formats}, torch.randn(1, shape["width"])
        least = dict.fromkeys(args.formats, float("inf"))
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


@torch.inference_mode()
def main() -> None:
    """Measure, print, keep."""
    commands = (parser := arguments(__doc__)).add_subparsers(required=True)
    one = add_command(commands, fp32, "cpu_linear")
    one.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 1024])
    one.add_argument("--repeats", type=int, default=5, help="measurements of each, in turn")
    two = add_command(commands, packed, "packed_linear")
    two.add_argument("--formats", nargs="+", default=["F32", *PACKINGS])
    two.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    args.work(args)


if __name__ == "__main__":
    main()
