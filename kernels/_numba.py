"""What the loops for a CPU have in common: compiled by numba when they are first run, and kept on the disk.

They stand where torch has no function that reads its input at the memory's rate: a decode step reads every weight and
every key for one row or a few. They take fp32 alone; where numba is absent, or has no threads that may be used beside
torch's, the functions of torch that they stand beside do the work.

Loops add in an order that does not depend on the number of threads. Sums may be made of parallel ones, and products
added without rounding in between; nothing else of the arithmetic is loosened, so that what is not finite stays so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
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

LEAST = 1 << 15
"""Numbers in the largest input from which on a loop is worth its loading, which takes each process some 50 ms."""

WORTH_A_THREAD = 1 << 16
"""Numbers that a thread reads at least: 10 us or so, where threads that wait for each other can take longer."""

ARITHMETIC: Any = {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}

__all__ = ["Compiling", "compiled", "compiling", "flat", "in_order", "inlined", "intrinsic"]
__all__ += ["prange", "run", "run_alone", "serial", "serves"]


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


def kept_in() -> str:
    """Name the directory that keeps compiled loops: NUMBA_CACHE_DIR, beside the sources, or the user's cache."""
    probe = compiled(lambda x: x)
    return str(getattr(probe.stats, "cache_path", None) or "this process alone")


def compiled(function: Callable[..., Any], arithmetic: Any = ARITHMETIC) -> Any:
    """Make a loop whose `prange` goes over threads."""
    if numba is None:
        return function
    kind: Any = {"parallel": True, "nogil": True, **arithmetic}
    try:
        return numba.njit(cache=True, **kind)(function)
    except RuntimeError:  # there is no place on the disk to keep it
        return numba.njit(**kind)(function)


def serial(function: Callable[..., Any]) -> Any:
    """Make such a loop for one thread, to be run by `run_alone`."""
    return compiled(function, {**ARITHMETIC, "parallel": False})


def in_order(function: Callable[..., Any]) -> Any:
    """Make such a loop that adds as it is written: else LLVM looks up several numbers at once, which is slower."""
    return compiled(function, {**ARITHMETIC, "fastmath": ARITHMETIC["fastmath"] - {"reassoc"}})


def serves(*tensors: Tensor, dtype: torch.dtype = torch.float32, numbers: int = 0) -> bool:
    """Tell whether loops take these: of a `dtype`, on a CPU, the last dimension without gaps, not all of them small.

    `numbers`: how many a loop looks at, where they are more than those of the tensors.
    """
    if numba is None or torch.compiler.is_compiling():
        return False
    most = numbers
    for x in tensors:  # asked some hundred times a step
        count = x.numel()
        most = max(most, count)
        # No parameter whose gradient is wanted, and nothing without numbers.
        if type(x) is not Tensor or count == 0 or x.dtype != dtype or not x.is_cpu or x.stride(-1) != 1:
            return False
    return most >= LEAST


_set = threading.local()
"""How many threads numba was last told to take, which every thread is told for itself."""


def inlined(function: Callable[..., Any]) -> Any:
    """Make a part of loops, which is compiled with each of them."""
    return function if numba is None else numba.njit(forceinline=True, **ARITHMETIC)(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make a part of loops of what writes the compiler's own instructions."""
    return function if numba is None else numba.extending.intrinsic(function)


@cache
def _most_threads() -> int:
    """Start numba's threads, of which there are so many; that tells OpenMP to take as many for torch, too."""
    before = torch.get_num_threads()
    most: int = numba.get_num_threads()
    torch.set_num_threads(before)
    return most


def _leave_threads_to_the_parent() -> None:
    """Do without loops in a process that was forked off: threads stayed behind, and asking for them would end it."""
    global numba
    if _most_threads.cache_info().currsize:
        numba = None  # type: ignore[assignment]


os.register_at_fork(after_in_child=_leave_threads_to_the_parent)


def run(loop: Any, numbers: int, *arguments: Any) -> None:
    """Run a loop that reads so many `numbers`, with as many threads as torch takes.

    Tensors are given as arrays, those in tuples, too.
    """
    threads = min(torch.get_num_threads(), _most_threads(), 1 + numbers // WORTH_A_THREAD)
    if getattr(_set, "threads", 0) != threads:
        numba.set_num_threads(threads)
        _set.threads = threads
    loop(*_arrays(arguments))


def run_alone(loop: Any, *arguments: Any) -> Any:
    """Run a loop for one thread; gives what it returns."""
    return loop(*_arrays(arguments))


def _arrays(given: tuple[Any, ...]) -> list[Any]:
    return [x.numpy() if isinstance(x, Tensor) else tuple(_arrays(x)) if isinstance(x, tuple) else x for x in given]


def flat(x: Tensor) -> Tensor:
    """View all that lies between the first and the last number of x as one row, which a loop knows to have no gaps."""
    span = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):  # no generator: it is asked for at every loop
        span += (size - 1) * stride
    return x.as_strided((span,), (1,))
