"""`kvcli plan` against a traced prefill of a long prompt beside a GPU, without one: bytes on a made-up device.

    python benchmarks/traced_prefill.py [--context 1M] [--layers N] [-o FILE]

An 8B shape reads a prompt on torch's fake tensors: every tensor that is allocated on the device is counted while it
lives, nothing is computed (`tests/fake_prefill.py`). Beside the weights a prefill takes the same for every layer after
the first ones, so that a few layers are run; methods hold a cache for each of these. Planned is what plan says for so
many layers, without its allowance for the runtime: while the prompt is read, and when all of it is on the device. What
the allocator keeps, and what libraries take for themselves, is not traced.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from common import arguments, save  # noqa: E402
from fake_prefill import Prefilled  # noqa: E402

from kvcli.capacity import memory  # noqa: E402
from kvcli.inputs.profiles import resolve_profile  # noqa: E402
from kvcli.models.geometry import geometry_of  # noqa: E402
from kvcli.models.loading import ModelSpec, read_config  # noqa: E402
from kvcli.sizes import parse_count  # noqa: E402

SHAPE, DTYPE, MORE = "llama-3-8b-1m", torch.bfloat16, 256  # tokens of output
METHODS: dict[str, dict[str, Any]] = {
    "freekv, dense_layers=0": {"dense_layers": 0},
    "freekv": {},
    "offload": {},
    "quest": {},
    "full": {},
}


def check(label: str, context: int, layers: int) -> dict[str, Any]:
    """Trace one method's prefill: planned and taken bytes, and planned by taken."""
    config = read_config(ModelSpec(SHAPE, load_format="dummy"))
    config.num_hidden_layers = layers
    profile = resolve_profile(method=label.split(",")[0], overrides=METHODS[label])
    geometry = geometry_of(config, DTYPE)
    need = memory.need(profile, geometry, DTYPE, [context], MORE, 1, device=torch.device("cuda"))
    reading = need.kv.device + sum(need.prefill.device.values()) - need.prefill.away
    held = need.kv.device + need.prefill.device["rotary tables"]
    with pytest.MonkeyPatch.context() as patch:
        taken = Prefilled(config, profile, context, MORE, patch)
    peak = max(reading, held)
    ratios = {"peak": peak / taken.peak, "after": held / taken.after}
    said, was, after = (size / 2**30 for size in (peak, taken.peak, taken.after))
    print(
        f"{label:<40}{context:>10,} x {layers} layers  {said:6.2f} GiB planned beside the weights, {was:6.2f} taken"
        f" ({ratios['peak']:.3f}); after it {held / 2**30:6.2f}, {after:6.2f} ({ratios['after']:.3f});"
        f" waits {sum(taken.bytes.waits.values())}",
        flush=True,
    )
    row = {
        "planned": {"peak": peak, "after": held, "terms": dict(need.prefill.device), "away": need.prefill.away},
        "taken": {"peak": taken.peak, "after": taken.after, "copies": dict(taken.bytes.copies)},
        "planned_by_taken": ratios,
    }
    return {"method": label, "context": context, "layers": layers, **row}


def main() -> None:
    """Trace all methods, print, keep."""
    parser = arguments(__doc__, "traced_prefill")
    parser.add_argument("--context", type=parse_count, default=1 << 20, help="tokens of the prompt")
    parser.add_argument("--layers", type=int, default=3, help="of the model that are run")
    parser.add_argument("--only", type=int, nargs="+", help="methods by their place, from 0")
    args = parser.parse_args()
    labels = list(METHODS) if args.only is None else [list(METHODS)[at] for at in args.only]
    rows = [check(label, args.context, args.layers) for label in labels]
    worst = max(abs(row["planned_by_taken"]["peak"] - 1) for row in rows)
    print(f"furthest off: {worst:.1%}")
    save(args.output, {"shape": SHAPE, "dtype": str(DTYPE), "rows": rows, "furthest_off": worst})


if __name__ == "__main__":
    main()
