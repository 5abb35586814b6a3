"""Products with weights packed as in GGUF files, of one row and of a prompt's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from common import ratios
from torch import Tensor
from torch.nn import functional

from gpu_parts.clock import Work, captured, freed, in_turn, milliseconds
from gpu_parts.frame import Found, Row, Rows
from gpu_parts.setting import Setting
from kvcli.kernels.packed_linear import MOST_ROWS, PACKINGS, PackedWeight, Packing, packed_linear, packed_linear_ref

READ = 512 << 20  # bytes of different weights before one is read again, far more than a cache holds
CALLS = 4
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
PACKED_SHAPE = 14_336, 4096  # of a projection of an MLP
PROMPT = 1024  # rows of a piece of a prompt


def packed(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row for each format and number of rows: ms a call of either way, and whether packed weights are right.

    The library multiplies by the same numbers, unpacked beforehand. Calls follow each other in a CUDA graph, each with
    a weight that no cache holds.
    """
    for name in PACKED:
        rows = (1, MOST_ROWS, 2 * MOST_ROWS + 1 if setting.smoke else PROMPT)
        missing = [m for m in rows if not found.has(f"{name}, {m} rows")]
        if missing:
            yield from against_unpacked(PACKINGS[name], missing, setting)
            freed(setting.device)


def against_unpacked(packing: Packing, rows: list[int], setting: Setting) -> Iterator[Rows]:
    """Time one format with these numbers of rows."""
    out, width = (side // (16 if setting.smoke else 1) for side in PACKED_SHAPE)
    count = 2 if setting.smoke else -(-READ // (out * packing.row_bytes(width)))
    weights = [drawn(packing, out, width, setting) for _ in range(count)]
    plain = [weight.unpack() for weight in weights[: 2 if setting.smoke else -(-READ // (2 * out * width))]]
    for m in rows:
        x = torch.randn(m, width, device=setting.device, dtype=setting.dtype)
        exact = packed_linear_ref(x, weights[0]).float()
        error = ((packed_linear(x, weights[0]).float() - exact).norm() / exact.norm()).item()
        works = {
            "library": (captured(partial(each, partial(functional.linear, x), plain), setting.device), CALLS),
            "packed": (captured(partial(each, partial(packed_linear, x), weights), setting.device), CALLS),
        }
        times = in_turn(works, setting.repeats, setting.device, setting.deadline)
        ours, theirs = ([s / len(of) for s in times[way]] for way, of in (("packed", weights), ("library", plain)))
        row: Row = {"case": f"{packing.name}, {m} rows", "rows": m, "bytes": weights[0].nbytes, "ran": setting.ran}
        row |= {"errors": {"packed": error}, "agrees": error < (1e-5 if setting.dtype == torch.float32 else 1e-2)}
        row |= {"library_ms": milliseconds(theirs), "packed_ms": milliseconds(ours)}
        row["packed_of_library"] = ratios(ours, theirs)
        print("  " + line(row), flush=True)
        yield [row]


def drawn(packing: Packing, out: int, width: int, setting: Setting) -> PackedWeight:
    """Draw a weight: any bytes are levels, and those that may belong to scales make numbers of usual sizes."""
    size = out, packing.row_bytes(width)
    numbers = torch.randint(0, 256, size, dtype=torch.uint8, device=setting.device)
    if packing.name == "MXFP4":
        numbers.unflatten(1, (-1, packing.nbytes))[..., 0] = 120  # an exponent
    else:
        numbers &= 0xBB
    return PackedWeight(numbers, packing, setting.dtype).laid_out(by_field=numbers.is_cuda)


def each(way: Work, weights: list[Tensor]) -> None:
    """Multiply by all weights."""
    for weight in weights:
        way(weight)


def line(row: Row) -> str:
    """Write a row: microseconds of each way."""
    took = ", ".join(f"{name} {1000 * row[f'{name}_ms']['median']:.1f}" for name in ("library", "packed"))
    return f"{row['case']:<16} {took} us" + ("" if row["agrees"] else f"; WRONG: {row['errors']}")
