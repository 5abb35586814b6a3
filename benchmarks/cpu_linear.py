"""A linear layer on the CPU as kvcli runs it, against torch's own and oneDNN's, at several numbers of rows.

python benchmarks/cpu_linear.py
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import add_output, save, spread
from torch import nn

from kvcli.compat import onednn_linear
from kvcli.runtime.linear import cpu_linears

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


@torch.inference_mode()
def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 1024])
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each, in turn")
    add_output(parser, "cpu_linear")
    args = parser.parse_args()
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
        ratio, over = (spread([a / b for a, b in zip(other, ours, strict=True)]) for other in (theirs, onednn))
        times = {"torch_ms": spread(theirs), "onednn_ms": spread(onednn), "kvcli_ms": spread(ours)}
        results.append({"rows": rows, **times, "speedup": ratio, "speedup_over_onednn": over})
        print(
            f"{rows:>5} rows: {ratio['median']:.2f}x the speed ({ratio['min']:.2f} to {ratio['max']:.2f})", flush=True
        )
    save(args.output, {"shape": [INNER, WIDTH], "rows": results})


if __name__ == "__main__":
    main()
