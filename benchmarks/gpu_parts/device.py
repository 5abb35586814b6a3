"""The device by itself: which it is, whether every Triton kernel is right on it, and what it can do at most.

Nothing here needs more than torch, Triton and NumPy.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import ratios, spread
from torch import Tensor
from torch.nn import functional

from gpu_parts.clock import captured, freed, in_turn
from gpu_parts.frame import Ended, Found, Row, Rows, in_processes
from gpu_parts.setting import Setting
from kvcli.kernels.page_table import MissList, PagedKV, SlotLayout
from kvcli.kernels.recall import PROGRAMS, HostLayout, HostPages, gather_pages, gather_pages_ref
from kvcli.memory.host_pool import PIECE_BYTES
from kvcli.memory.pinned import pinned_allocator


def machine(setting: Setting, found: Found) -> Iterator[Rows]:  # noqa: ARG001
    """Yield one row for the device; fails where there is none."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    row: Row = {"case": "machine", "host_bytes": memory, "cores": os.cpu_count()}
    if setting.device.type == "cuda":
        of = torch.cuda.get_device_properties(setting.device)
        row |= {
            "device": of.name,
            "device_bytes": of.total_memory,
            "multiprocessors": of.multi_processor_count,
            "capability": f"{of.major}.{of.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    else:
        row["device"] = "CPU: references, no kernels"
    print(f"  {row['device']}, {row['host_bytes'] / 2**30:.0f} GiB of host memory", flush=True)
    yield [row]


sys.path.append(str(Path(__file__).parents[2] / "tests"))

LIMIT = 90.0  # seconds for one case in all its types and sizes


def kernels(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row for each kernel: whether it agrees with its reference, and the largest relative error.

    The cases are those of the tests, at odd and at real sizes. Each is compiled and run in a process of its own,
    several side by side: it is compiling that takes the time. What differed before is checked again.
    """
    from triton_cases import CASES

    left = [case for case in CASES if not found.has(case.name, agrees=True)]
    works = {case.name: partial(check, case, setting) for case in left}
    at_once = 1 if setting.smoke else min(12, os.cpu_count() or 1)
    for name, message in in_processes(works, LIMIT, at_once):
        if isinstance(message, Ended) and message.error is None:
            continue
        row = {"case": name, "agrees": False, "problem": message.error} if isinstance(message, Ended) else message[0]
        outcome = f"agrees, error {row['error']:.1e}" if row["agrees"] else f"DIFFERS: {row['problem']}"
        print(f"  {name:<42} {outcome}", flush=True)
        yield [row]


def check(case: Any, setting: Setting) -> Iterator[Rows]:
    """Compare one case in all types and sizes; `checked` counts the comparisons."""
    from triton_cases import ODD, REAL, TOLERANCE, compare

    torch.set_num_threads(1)  # of the references: as many cases run side by side as there are cores, nearly
    worst, problems, checked = 0.0, [], 0
    for sizes in (ODD,) if setting.smoke else (ODD, REAL):
        for dtype in TOLERANCE:
            outcome = compare(case, dtype, setting.device, sizes)
            checked, worst = checked + 1, max(worst, outcome.error)
            if outcome.problem:
                which = "odd" if sizes is ODD else "real"
                problems.append(f"{str(dtype).removeprefix('torch.')} at {which} sizes: {outcome.problem}")
    yield [
        {
            "case": case.name,
            "agrees": not problems,
            "exactly": case.exact,
            "error": worst,
            "checked": checked,
            "problem": "; ".join(problems),
            "ran": setting.ran,
        }
    ]


HEADS, D = 8, 128
CALLS = 4
DRAWN = 1 << 26  # numbers drawn at once
PIECES = 8  # of host pools


class GatherLoad(NamedTuple):
    """Lists of misses, one a layer, of pages that lie anywhere in the pool."""

    host: HostPages
    rows: PagedKV
    misses: list[MissList]

    @property
    def nbytes(self) -> int:
        """Bytes that all the lists together bring."""
        _, size, d = self.host.block_shape
        blocks = sum(int(part.counts.sum()) for part in self.misses)
        return blocks * 2 * size * d * self.rows.k.element_size()

    def run(self, programs: int) -> None:
        """Bring everything."""
        for part in self.misses:
            gather_pages(self.host, part, self.rows, programs)

    def arrives(self) -> bool:
        """Tell whether the kernel puts what the last list names where it belongs."""
        expected = self.rows._replace(k=torch.zeros_like(self.rows.k), v=torch.zeros_like(self.rows.v))
        actual = self.rows._replace(k=torch.zeros_like(self.rows.k), v=torch.zeros_like(self.rows.v))
        gather_pages_ref(self.host, self.misses[-1], expected)
        gather_pages(self.host, self.misses[-1], actual)
        return torch.equal(actual.k, expected.k) and torch.equal(actual.v, expected.v) and bool(actual.k.any())


LINEARS, WIDTH = 8, 4096  # weights of linear layers, too many for the device's caches together
CHAIN = 1000  # kernels one after another


def rates(setting: Setting, found: Found) -> Iterator[Rows]:
    """Yield a row for each rate, bytes a second; and the time of a kernel that does nothing.

    Rates count bytes read and written on the device, and bytes moved across the bus. The gather is timed as a decode
    step uses it, a kernel for each of many layers in one CUDA graph, every page from another place of a large pool;
    plain copies are timed beside it in every round, and the ratio is taken within the round.
    """
    if not found.has(*COPIES):
        yield plain_copies(setting)
    if not found.has("linear of one row", "kernel of a graph"):
        yield least_times(setting)
    if setting.device.type == "cuda" and not found.has("pinning"):
        yield [shown(pinning(setting))]
        freed(setting.device)
    pool = pinned(setting, setting.pool // setting.dtype.itemsize)
    for layout in ("hnd", "nhd"):
        for part in (1.0, 0.2):
            if not found.has(name_of_gather(layout, part)):
                yield gathers(setting, pool, layout, part)


def pinned(setting: Setting, numbers: int) -> Tensor:
    """Make random numbers in host memory, pinned in huge pages as KV is; drawn on the device, which is faster at it."""
    if setting.device.type == "cuda":
        host = pinned_allocator(setting.device).allocate((numbers,), setting.dtype).result()
    else:
        host = torch.empty(numbers, dtype=setting.dtype)
    for part in host.split(DRAWN):
        part.copy_(torch.randn(len(part), device=setting.device, dtype=setting.dtype))
    return host


COPIES = "device copy", "host to device", "device to host"


def plain_copies(setting: Setting) -> Rows:
    """Copy within the device and to and from pinned memory."""
    numbers = setting.buffer // setting.dtype.itemsize
    source = torch.randn(numbers, device=setting.device, dtype=setting.dtype)
    target, host = torch.empty_like(source), pinned(setting, numbers)
    works = (
        lambda: target.copy_(source),
        lambda: target.copy_(host, non_blocking=True),
        lambda: host.copy_(source, non_blocking=True),
    )
    times = in_turn(
        {name: (work, CALLS) for name, work in zip(COPIES, works, strict=True)},
        *(setting.repeats, setting.device, setting.deadline),
    )
    rows = []
    for name, seconds in times.items():
        moved = (2 if name == "device copy" else 1) * source.nbytes
        rows.append(shown({"case": name, "bytes": moved, "bytes_per_s": spread([moved / taken for taken in seconds])}))
    return rows


def least_times(setting: Setting) -> Rows:
    """Time a linear layer of one row, bound by its weights, and a kernel that does nothing: what predictions stand on.

    Both in a CUDA graph, one after another.
    """
    width, chain = (64, 10) if setting.smoke else (WIDTH, CHAIN)
    weights = torch.randn(LINEARS, width, width, device=setting.device, dtype=setting.dtype)
    x, one = torch.randn(1, width, device=setting.device, dtype=setting.dtype), torch.zeros(1, device=setting.device)

    def linears() -> None:
        for weight in weights:
            functional.linear(x, weight)

    def nothing() -> None:
        for _ in range(chain):
            one.add_(1)

    works = {"linear": (captured(linears, setting.device), CALLS), "chain": (captured(nothing, setting.device), CALLS)}
    times = in_turn(works, setting.repeats, setting.device, setting.deadline)
    rate = spread([weights.nbytes / taken for taken in times["linear"]])
    taken = spread([taken / chain for taken in times["chain"]])
    print(f"  {'kernel of a graph':<40} {1e6 * taken['median']:8.2f} us", flush=True)
    return [
        shown({"case": "linear of one row", "bytes": weights.nbytes, "bytes_per_s": rate}),
        {"case": "kernel of a graph", "seconds": taken},
    ]


def pinning(setting: Setting) -> Row:
    """Pin memory as the host pools of a prompt do, one piece after another, never used before."""
    memory, kept, seconds = pinned_allocator(setting.device), [], []
    for _ in range(PIECES):
        started = time.perf_counter()
        kept.append(memory.allocate((PIECE_BYTES,), torch.uint8).result())
        seconds.append(time.perf_counter() - started)
    return {
        "case": "pinning",
        "bytes": PIECES * PIECE_BYTES,
        "bytes_per_s": spread([PIECE_BYTES / taken for taken in seconds]),
    }


def name_of_gather(layout: HostLayout, part: float) -> str:
    """Name a gather."""
    return f"gather {layout}, {part:.0%} of the pages missing"


def gathers(setting: Setting, pool: Tensor, layout: HostLayout, part: float) -> Rows:
    """Gather `part` of the selected pages of every head, with several numbers of programs, beside plain copies."""
    recall = recall_of(setting, pool, layout, part)
    same = pool[: recall.nbytes // setting.dtype.itemsize]
    target = torch.empty_like(same, device=setting.device)
    works: dict[str, Any] = {"plain": captured(lambda: target.copy_(same, non_blocking=True), setting.device)}
    for programs in sorted({PROGRAMS, *((8, 16, 32, 64, 128) if not setting.smoke else ())}):
        works[str(programs)] = captured(lambda programs=programs: recall.run(programs), setting.device)
    times = in_turn(
        {name: (work, CALLS) for name, work in works.items()}, setting.repeats, setting.device, setting.deadline
    )
    return [
        shown(
            {
                "case": name_of_gather(layout, part),
                "layout": layout,
                "missing": part,
                "programs": int(name),
                "default": int(name) == PROGRAMS,
                "bytes": recall.nbytes,
                "bytes_per_s": spread([recall.nbytes / taken for taken in seconds]),
                "of_plain": ratios(times["plain"], seconds),
                "arrives": recall.arrives(),
            }
        )
        for name, seconds in times.items()
        if name != "plain"
    ]


def recall_of(setting: Setting, pool: Tensor, layout: HostLayout, part: float) -> GatherLoad:
    """Lay pages over the pool, and draw which of them each of several layers misses."""
    slots = SlotLayout(
        setting.page, setting.sink // setting.page, (setting.budget - 2 * setting.sink) // setting.page, 1
    )
    shape = (HEADS, 2, setting.page, D) if layout == "hnd" else (2, setting.page, HEADS, D)
    pages = pool[: len(pool) // (HEADS * 2 * setting.page * D) * (HEADS * 2 * setting.page * D)].view(-1, *shape)
    host = HostPages.of([[pages]], layout, setting.device)
    generator = torch.Generator().manual_seed(0)
    layers = 32 if not setting.smoke else 2
    count = max(1, min(round(part * slots.selected), len(pages)))
    misses = []
    for _ in range(layers):
        drawn = torch.randint(len(pages), (1, HEADS, count), generator=generator, dtype=torch.int32)
        listed = MissList.empty(1, HEADS, slots.selected, setting.device)
        for target, values in zip(listed[:2], (drawn, torch.arange(count).expand(1, HEADS, count)), strict=True):
            target.fill_(-1)
            target[..., :count] = values
        listed.counts.fill_(count)
        misses.append(listed)
    kv = torch.empty(1, 2, HEADS, slots.total * setting.page, D, dtype=setting.dtype, device=setting.device)
    lengths = torch.tensor([slots.total * setting.page], dtype=torch.int32, device=setting.device)
    resident = torch.full((1, HEADS, slots.selected), -1, dtype=torch.int32, device=setting.device)
    return GatherLoad(host, PagedKV(kv[:, 0], kv[:, 1], lengths, slots, resident), misses)


def shown(row: Row) -> Row:
    """Print a rate, and pass it on."""
    rate = {name: value / 1e9 for name, value in row["bytes_per_s"].items()}
    line = f"  {row['case']:<40} {rate['median']:8.1f} GB/s ({rate['min']:.1f} to {rate['max']:.1f})"
    if "programs" in row:
        line += f", {row['programs']:>3} programs: {row['of_plain']['median']:.0%} of a plain copy"
        line += "" if row["arrives"] else "; WRONG DATA"
    print(line, flush=True)
    return row
