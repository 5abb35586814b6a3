"""CPU loops: compiled by numba on first use, and cached on disk.

They serve where torch has no function that reads its input at memory speed: a decode step reads every weight and every
key for one or a few rows. They take fp32 only. Where numba is absent, or has no threads that may be used next to
torch's, the equivalent torch functions do the work.

Loops add in an order that does not depend on the number of threads. Sums may be split into parallel ones, and products
added without rounding in between; no other arithmetic is relaxed, so that non-finite numbers stay so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import numba
    import numba.core.event
    import numba.extending
    import numba.np.ufunc.omppool
    from numba import prange
except ImportError:
    numba, prange = None, range  # type: ignore[assignment, misc]

carray: Any = getattr(numba, "carray", None)

LEAST = 1 << 15
"""Numbers in the largest input from which a loop pays for its loading, which takes some 50 ms per process."""

WORTH_A_THREAD = 1 << 16
"""Numbers per thread at least: 10 us or so, while waiting for other threads can take longer."""

ARITHMETIC: Any = {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
IN_ORDER: Any = {**ARITHMETIC, "fastmath": {"contract", "nsz"}}
"""The same, but numbers are added in the written order."""

__all__ = [
    "ARITHMETIC",
    "IN_ORDER",
    "Compiling",
    "carray",
    "compiled",
    "compiled_at",
    "compiling",
    "flat",
    "in_order",
    "inlined",
]
__all__ += ["intrinsic", "prange", "run", "run_alone", "serial", "serves", "use_threads"]


class Compiling(object if numba is None else numba.core.event.Listener):  # type: ignore[misc]
    """How long loops were compiled in this process; `tell` is called whenever that begins, unless it is None.

    A loop is compiled once on a machine and kept. It is loaded from there in a few milliseconds, which do not count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tell: Callable[[], None] | None = None
        self._begun: list[float] = []  # a loop's parts are compiled within it

    def on_start(self, _: Any) -> None:
        """Note that a loop or a part of one begins to be compiled."""
        if not self._begun and self.tell is not None:
            self.tell()
        self._begun.append(time.perf_counter())

    def on_end(self, _: Any) -> None:
        """Note that the newest one is compiled."""
        begun = self._begun.pop()
        if not self._begun:
            self.seconds += time.perf_counter() - begun

    @contextmanager
    def telling(self, tell: Callable[[], None]) -> Iterator[None]:
        """Call `tell` once, when a loop is compiled within."""

        def once() -> None:
            self.tell = None
            tell()

        before, self.tell = self.tell, once
        try:
            yield
        finally:
            self.tell = before


compiling = Compiling()
if numba is not None:
    numba.core.event.register("numba:compile", compiling)  # type: ignore[no-untyped-call]


def kept_in() -> Path | None:
    """Return the directory that keeps compiled loops: NUMBA_CACHE_DIR, beside the sources, or the user's cache.

    None if no process keeps them for another, or if there are none.
    """
    path = None if numba is None else getattr(compiled(lambda x: x).stats, "cache_path", None)
    return None if path is None else Path(path)


def compiled(function: Callable[..., Any], arithmetic: Any = ARITHMETIC) -> Any:
    """Compile a loop whose `prange` runs over threads."""
    if numba is None:
        return function
    kind: Any = {"parallel": True, "nogil": True, **arithmetic}
    try:
        return numba.njit(cache=True, **kind)(function)
    except RuntimeError:  # no place on disk to cache it
        return numba.njit(**kind)(function)


def serial(function: Callable[..., Any], arithmetic: Any = ARITHMETIC) -> Any:
    """Compile a loop for one thread, to be run by `run_alone`."""
    return compiled(function, {**arithmetic, "parallel": False})


def compiled_at(function: Callable[..., None], arguments: int, arithmetic: Any = ARITHMETIC) -> int:
    """Compile a loop for one thread that takes integers only, as many as `arguments`; return its address.

    Other loops call it there. It stays until the process ends.
    """
    made, signature = serial(function, arithmetic), numba.void(*[numba.int64] * arguments)
    made.compile(signature)
    found = made.get_compile_result(signature)
    _made.append(made)
    address: int = found.library.get_pointer_to_function(found.fndesc.llvm_cfunc_wrapper_name)
    return address


_made: list[Any] = []
"""Loops that are called by their address."""


def in_order(function: Callable[..., Any]) -> Any:
    """Compile a loop that adds in the written order; otherwise LLVM would vectorise look-ups, which is slower."""
    return compiled(function, IN_ORDER)


def serves(*tensors: Tensor, dtype: torch.dtype = torch.float32, numbers: int = 0) -> bool:
    """Return whether loops take these tensors: of `dtype`, on a CPU, last dimension without gaps, not all small.

    `numbers`: how many numbers a loop reads, if more than the tensors have.
    """
    if numba is None or torch.compiler.is_compiling():
        return False
    most = numbers
    for x in tensors:  # called some hundred times per step
        count = x.numel()
        most = max(most, count)
        # Neither parameters, which may want gradients, nor empty tensors.
        if type(x) is not Tensor or count == 0 or x.dtype != dtype or not x.is_cpu or x.stride(-1) != 1:
            return False
    return most >= LEAST


_set = threading.local()
"""The number of threads last set in numba, for each thread."""


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a part of loops, which is inlined into each of them.

    Only loops may call it: a call from Python ends the process. Wrappers for such calls would add a sixth to the time
    that a loop takes to compile.
    """
    kind: Any = {"forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, **ARITHMETIC}
    return function if numba is None else numba.njit(**kind)(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make a part of loops from a function that emits compiler instructions."""
    return function if numba is None else numba.extending.intrinsic(function)


@cache
def _most_threads() -> int:
    """Start numba's threads and return their number; undo that this sets OpenMP's number for torch as well."""
    before = torch.get_num_threads()
    most: int = numba.get_num_threads()
    torch.set_num_threads(before)
    return most


def _leave_threads_to_the_parent() -> None:
    """Disable loops in a forked process: threads stay in the parent, and requesting them would end the process."""
    global numba
    if _most_threads.cache_info().currsize:
        numba = None  # type: ignore[assignment]


os.register_at_fork(after_in_child=_leave_threads_to_the_parent)


def run(loop: Any, numbers: int, *arguments: Any) -> None:
    """Run a loop that reads `numbers` numbers, with as many threads as torch uses.

    Tensors are passed as arrays, also those in tuples.
    """
    use_threads(numbers)
    loop(*_arrays(arguments))


def use_threads(numbers: int) -> int:
    """Let loops that read `numbers` numbers use as many threads as torch, fewer for little; return how many."""
    threads = min(torch.get_num_threads(), _most_threads(), 1 + numbers // WORTH_A_THREAD)
    if getattr(_set, "threads", 0) != threads:
        numba.set_num_threads(threads)
        _set.threads = threads
    return threads


def run_alone(loop: Any, *arguments: Any) -> Any:
    """Run a loop on one thread, and return its result."""
    return loop(*_arrays(arguments))


def _arrays(given: tuple[Any, ...]) -> list[Any]:
    return [x.numpy() if isinstance(x, Tensor) else tuple(_arrays(x)) if isinstance(x, tuple) else x for x in given]


def flat(x: Tensor) -> Tensor:
    """View everything between the first and the last number of x as one row, which a loop knows to have no gaps."""
    span = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):  # no generator: this runs for every loop
        span += (size - 1) * stride
    return x.as_strided((span,), (1,))
