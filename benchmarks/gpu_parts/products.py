"""Products of a few rows: a library's with the kernels around it, and `kvcli.kernels.skinny_linear` in one.

And products with weights packed as in GGUF files, of one row and of a prompt's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from common import ratios
from torch import Tensor
from torch.nn import functional

from gpu_parts.clock import Work, captured, freed, in_turn, milliseconds
from gpu_parts.frame import Found, Row, Rows
from gpu_parts.setting import Setting
from kvcli.kernels.norm_rope import rms_norm, silu_mul
from kvcli.kernels.packed_linear import PACKINGS, PackedWeight, Packing, packed_linear, packed_linear_ref
from kvcli.kernels.skinny_linear import MOST_ROWS, InputNorm, skinny_linear, skinny_linear_ref, starts_early

ROWS = (1, 2, 4, MOST_ROWS)
READ = 512 << 20  # bytes of different weights before one is read again, far more than a cache holds
CALLS = 4


class Product(NamedTuple):
    """A product of a layer of an 8B model: columns of the output and of the input, and what is done beside it."""

    name: str
    out: int
    width: int
    norm: bool = False
    gated: bool = False
    residual: bool = False


PRODUCTS = (
    Product("queries, keys and values", 6144, 4096, norm=True),
    Product("attention output", 4096, 4096, residual=True),
    Product("gate and up", 14_336, 4096, norm=True, gated=True),
    Product("down", 4096, 14_336, residual=True),
    Product("head", 128_256, 4096, norm=True),
)
SMALLER = 64  # times, in a smoke test


def products(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row for each product and number of rows: ms a call of either way, and whether the one kernel is right.

    Calls follow each other in a CUDA graph, each with a weight that no cache holds.
    """
    for product in PRODUCTS:
        missing = [rows for rows in ROWS if not found.has(f"{product.name}, {rows} rows")]
        if missing:
            yield from compared(product, missing, setting)
            freed(setting.device)


def compared(product: Product, rows: list[int], setting: Setting) -> Iterator[Rows]:
    """Time one product with these numbers of rows."""
    smaller = SMALLER if setting.smoke else 1
    out, width = product.out // smaller, product.width // smaller
    numbers = {"device": setting.device, "dtype": setting.dtype}
    height = 2 * out if product.gated else out
    count = 2 if setting.smoke else -(-READ // (height * width * setting.dtype.itemsize))
    weights = [torch.randn(height, width, **numbers) / width**0.5 for _ in range(count)]
    scales = torch.randn(width, **numbers)
    norm = InputNorm(scales, 1e-5) if product.norm else None
    for m in rows:
        x, residual = torch.randn(m, width, **numbers), torch.randn(m, out, **numbers) if product.residual else None

        def by_library(weight: Tensor, x: Tensor = x, residual: Tensor | None = residual) -> Tensor:
            found = functional.linear(x if norm is None else rms_norm(x, *norm), weight)
            found = silu_mul(found) if product.gated else found
            return found if residual is None else found + residual

        one = partial(skinny_linear, x, bias=None, residual=residual, norm=norm, gated=product.gated)
        ways = {"library": by_library, "one_kernel": one}
        if starts_early(x):
            ways["dependent"] = partial(one, dependent=True)
        exact = skinny_linear_ref(x, weights[0], None, residual, norm, product.gated).float()
        errors = {name: ((way(weights[0]).float() - exact).norm() / exact.norm()).item() for name, way in ways.items()}
        works = {name: (captured(partial(each, way, weights), setting.device), CALLS) for name, way in ways.items()}
        times = in_turn(works, setting.repeats, setting.device, setting.deadline)
        row: Row = {"case": f"{product.name}, {m} rows", "rows": m, "bytes": weights[0].nbytes, "ran": setting.ran}
        row |= {"errors": errors, "agrees": max(errors.values()) < (1e-5 if setting.dtype == torch.float32 else 1e-2)}
        for name, taken in times.items():
            row[f"{name}_ms"] = milliseconds([seconds / count for seconds in taken])
            row[f"{name}_of_library"] = ratios(taken, times["library"])
        print("  " + line(row), flush=True)
        yield [row]


PACKED = ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
PACKED_SHAPE = 14_336, 4096  # of a projection of an MLP
PROMPT = 1024  # rows of a piece of a prompt


def packed(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row for each format and number of rows: ms a call of either way, and whether packed weights are right.

    The library multiplies by the same numbers, unpacked beforehand. Calls follow each other as in `products`.
    """
    for name in PACKED:
        rows = (1, MOST_ROWS + 1 if setting.smoke else PROMPT)
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
    names = [name for name in ("library", "one_kernel", "dependent", "packed") if f"{name}_ms" in row]
    took = ", ".join(f"{name} {1000 * row[f'{name}_ms']['median']:.1f}" for name in names)
    return f"{row['case']:<34} {took} us" + ("" if row["agrees"] else f"; WRONG: {row['errors']}")
