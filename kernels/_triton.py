"""What the Triton kernels have in common: the import, where they run, how they are launched and checked.

Triton comes with torch on Linux. Where it is absent the references do all the work and nothing here needs it.

Kernels keep to rules that hold for the compiler and for its interpreter (`TRITON_INTERPRET=1`) alike: floats are cast
to fp32 right after they are loaded, and to the type of the output when they are stored; data decides branches and loops
only as scalars; offsets that can pass 2^31 elements are int64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "interpreted",
    "jit",
    "last_to_arrive",
    "launch",
    "multiprocessors",
    "power_of_two",
    "require",
    "require_whole",
    "round_to_tf32",
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
"""Whether kernels run on the CPU too: for tests, which set `TRITON_INTERPRET=1` and this."""


def jit(function: Callable[..., Any]) -> Any:
    """Make a kernel, or a function that kernels call; compiled when it is first launched."""
    return function if triton is None else triton.jit(function)


@jit
def last_to_arrive(arrived: tl.tensor, programs: tl.tensor) -> tl.tensor:
    """Count a program in at `arrived`, and tell whether it is the last of `programs`; the count is zero again then.

    What all of them have stored before is there for the last one to load. The barrier puts the stores of a program's
    threads before the one thread that counts; its addition releases them to the device, and acquires what those that
    counted earlier have released; the result reaches the other threads by shared memory and a barrier more, after which
    their loads find it. Nobody else comes, so that the last one may set the count back; the next kernel that finds it
    so is one that waits for this one. Kernels that run beside each other need counts of their own.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == programs - 1
    tl.store(arrived, 0, mask=last)
    return last


@jit
def round_to_tf32(x: tl.tensor) -> tl.tensor:
    """Round to 10 bits of mantissa, half up; the tensor cores would cut the rest off, and sums would come short."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


def takes(x: Tensor) -> bool:
    """Tell whether kernels run where this tensor is, and know its type; otherwise the reference is to be called."""
    return triton is not None and (x.is_cuda or on_cpu) and x.dtype != torch.float64


def interpreted() -> bool:
    """Tell whether kernels are interpreted, which multiplies matrices of fp32 alone."""
    return bool(triton.knobs.runtime.interpret)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 2, **constants: Any) -> None:
    """Run `grid` programs of a kernel on the current stream, with `constants` as its tl.constexpr arguments.

    The first launch with new constants or types compiles and loads the kernel: make it before capturing a CUDA graph.
    """
    # Fused multiply-add is stated because triton 3.9 warns where it is not.
    kernel[grid](*args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=True)


def multiprocessors(x: Tensor) -> int:
    """Count the multiprocessors of the tensor's device; for the interpreter, a few."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


def power_of_two(n: int) -> int:
    """Give the least power of two that is not below n >= 1: the size of a block that holds n."""
    return 1 << (n - 1).bit_length()


def rows_at_once(rows: int, width: int, elements: int) -> int:
    """Give a power of two of rows, `width` wide each, that make a block of at most `elements`; at least one."""
    return max(1, min(power_of_two(rows), elements // width))


def require(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """Raise ValueError where a tensor is not what a kernel reads: its shape, its dtype, rows without gaps."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, not {tuple(shape)}")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype}, not {dtype}")
    if x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} has gaps in its last dimension: strides {x.stride()}")


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Tell whether offsets into two tensors of one shape are the same; the stride of a single element means nothing."""
    return all(n == 1 or x == y for n, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def require_whole(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """Do as `require`, for a tensor that has to be contiguous."""
    require(name, x, shape, dtype)
    if not x.is_contiguous():
        raise ValueError(f"{name} is not contiguous: strides {x.stride()}")
