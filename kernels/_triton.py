"""Shared helpers of Triton kernels: the import, where they run, how they are launched and checked.

Triton comes with torch on Linux. Where it is absent, the references do all the work and nothing here needs it.

Kernels follow rules that hold for the compiler and its interpreter (`TRITON_INTERPRET=1`) alike: floats are cast to
fp32 right after they are loaded, and to the type of the output when they are stored; data decides branches and loops
only as scalars; offsets that can exceed 2^31 elements are int64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ALL_REGISTERS",
    "interpreted",
    "jit",
    "last_to_arrive",
    "launch",
    "multiply",
    "multiply_split",
    "multiprocessors",
    "power_of_two",
    "require",
    "require_whole",
    "rows_at_once",
    "same_strides",
    "takes",
    "tl",
]

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = tl = None


on_cpu = False
"""Whether kernels also run on the CPU: for tests, which set `TRITON_INTERPRET=1` and this."""


def jit(function: Callable[..., Any]) -> Any:
    """Make a kernel, or a function that kernels call; it is compiled on its first launch."""
    return function if triton is None else triton.jit(function)


@jit
def last_to_arrive(arrived: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """Count a program at `arrived`, and return whether it is the last of `programs`; the count is then zero again.

    The last program can load everything that the others have stored before. The barrier orders the stores of a
    program's threads before the one thread that counts. Its addition releases them to the device, and acquires what
    earlier counters have released. The result reaches the other threads by shared memory and another barrier, after
    which their loads see it. No other program arrives afterwards, so the last one may reset the count; the next kernel
    that uses it waits for this one. Kernels that run concurrently need counts of their own.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == programs - 1
    tl.store(arrived, 0, mask=last)
    return last


@jit
def multiply(a: tl.tensor, b: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Multiply matrices of one type, and sum in fp32; `WIDE` if kernels are `interpreted`."""
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit
def multiply_split(a: tl.tensor, b: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Multiply a, in fp32 and at most about 1, with a matrix of any type, on tensor cores where that is a half one.

    fp16 has 11 bits for a. Of bf16, which has 8, there are two numbers that add up to it: 16 bits.
    """
    first = a.to(b.dtype)
    found = multiply(first, b, WIDE)
    if b.dtype == tl.bfloat16:
        found += multiply((a - first.to(tl.float32)).to(tl.bfloat16), b, WIDE)
    return found


def takes(x: Tensor) -> bool:
    """Return whether kernels run where this tensor is, and support its type; otherwise call the reference."""
    return triton is not None and (x.is_cuda or on_cpu) and x.dtype != torch.float64


def interpreted() -> bool:
    """Return whether kernels are interpreted; the interpreter multiplies matrices in fp32 only."""
    return bool(triton.knobs.runtime.interpret)


ALL_REGISTERS = 255
"""Of a thread. The assembler spills a few of them to let more programs run side by side, which is of no use to kernels
of few programs.
"""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    warps: int = 4,
    stages: int = 2,
    registers: int | None = None,
    **constants: Any,
) -> None:
    """Run `grid` programs of a kernel on the current stream, with `constants` as its tl.constexpr arguments.

    The first launch with new constants or types compiles and loads the kernel: make it before capturing a CUDA graph.
    `registers` are those that a thread may take, by default as many as the assembler thinks best.
    """
    # Fused multiply-add is set because triton 3.9 warns otherwise.
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": True}
    kernel[grid](*args, **constants, **options)


def multiprocessors(x: Tensor) -> int:
    """Return the number of multiprocessors of the tensor's device; for the interpreter, a few."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


def power_of_two(n: int) -> int:
    """Return the least power of two that is not below n >= 1: the size of a block that holds n."""
    return 1 << (n - 1).bit_length()


def rows_at_once(rows: int, width: int, elements: int) -> int:
    """Return how many rows, a power of two, `width` wide each, fit into a block of `elements`; at least one."""
    return max(1, min(power_of_two(rows), elements // width))


def require(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """Raise ValueError if a tensor is not what a kernel reads: its shape, its dtype, rows without gaps."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, not {tuple(shape)}")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype}, not {dtype}")
    if x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} has gaps in its last dimension: strides {x.stride()}")


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Return whether offsets into two tensors of one shape are equal; strides of single elements are ignored."""
    return all(n == 1 or x == y for n, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def require_whole(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """Check like `require`, for a tensor that must be contiguous."""
    require(name, x, shape, dtype)
    if not x.is_contiguous():
        raise ValueError(f"{name} is not contiguous: strides {x.stride()}")
