"""Calls of every Triton kernel at any size, with their references: shared by the tests and the compile check."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcli.kernels import append, topk
from kvcli.kernels import append as filled
from kvcli.kernels import append as write_small
from kvcli.kernels import block_attention as tiles
from kvcli.kernels import decode_attention as decode
from kvcli.kernels import eviction as replace
from kvcli.kernels import eviction as room
from kvcli.kernels import host_tokens as whole
from kvcli.kernels import near_best as near
from kvcli.kernels import norm_rope as add_norm
from kvcli.kernels import norm_rope as moving
from kvcli.kernels import norm_rope as norm
from kvcli.kernels import norm_rope as rotating
from kvcli.kernels import norm_rope as silu
from kvcli.kernels import packed_linear as packed
from kvcli.kernels import page_scores as choose
from kvcli.kernels import page_scores as scores
from kvcli.kernels import page_scores as summary
from kvcli.kernels import page_table as resolve
from kvcli.kernels import paged_attention as slot
from kvcli.kernels import prefill_attention as prefill
from kvcli.kernels import query_similarity as similarity
from kvcli.kernels import recall as gather
from kvcli.kernels import recall as gather_small
from kvcli.kernels import token_scores as projecting
from kvcli.kernels import token_scores as tokens
from kvcli.kernels._triton import power_of_two
from kvcli.kernels.page_table import PagedKV, SlotLayout, active, page_count, row_positions
from kvcli.kernels.quant import BlockFormat
from kvcli.kernels.recall import HostPages
from kvcli.kernels.softmax import Softmax
from kvcli.methods.fier import kernels as one_bit
from kvcli.methods.fier import kernels as one_bit_scoring
from kvcli.methods.shadowkv import kernels as leaving
from kvcli.methods.shadowkv import kernels as rebuild
from kvcli.methods.tokenselect import kernels as kept_queries
from kvcli.methods.twilight import kernels as four_bit
from kvcli.methods.twilight import kernels as tokens_kept

NAN = float("nan")
# Relative RMS. Under the interpreter a cast to bf16 cuts off what the device rounds.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Sizes(NamedTuple):
    """How large a case is: `lengths` of the batch's sequences, Hk, G, d, and the slots of a layer."""

    lengths: tuple[int, ...]
    hk: int
    g: int
    d: int
    layout: SlotLayout

    @property
    def b(self) -> int:
        return len(self.lengths)

    @property
    def pages(self) -> int:
        """Room for the longest sequence and one page more."""
        return max(self.lengths) // self.layout.size + 2


# One sequence takes no part, one has not outgrown its slots and has just filled a page, two have outgrown them.
ODD = Sizes(lengths=(0, 12, 41, 52), hk=2, g=3, d=20, layout=SlotLayout(size=4, sink=2, selected=3, window=2))
# Tokens one by one, indexed eight at a time.
TOKENS = SlotLayout(size=1, sink=2, selected=20, window=3, group=8)
# Latents, one KV head of which so many query heads read that a program does not hold them all; those of DeepSeek-V3.
LATENT = ODD._replace(hk=1, g=20, d=576)
REAL = Sizes(lengths=(4096, 9000), hk=8, g=4, d=128, layout=SlotLayout(size=32, sink=16, selected=32, window=16))
REAL_LATENT = REAL._replace(hk=1, g=128, d=576)


@dataclass
class Draw:
    """Random inputs, the same for the same seed; `double` gives the reference the same numbers in float64."""

    dtype: torch.dtype
    device: torch.device
    double: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, *shape: int) -> Tensor:
        return self.like(torch.randn(shape, generator=self.generator))

    def like(self, values: Tensor) -> Tensor:
        """Round to the dtype of the case."""
        values = values.to(self.dtype).to(self.device)
        return values.double() if self.double else values

    def fp32(self, values: Tensor) -> Tensor:
        """Give what is fp32 whatever the dtype of the case."""
        return values.to(self.device, torch.float64 if self.double else torch.float32)

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(values).to(self.device, dtype)

    def poisoned(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """What nobody has written yet."""
        return torch.full(shape, NAN, dtype=torch.float64 if self.double else dtype or self.dtype, device=self.device)

    def subsets(self, count: int, *shape: int, of: int) -> Tensor:
        """Distinct numbers below `of` in the last dimension: [*shape, count]."""
        return torch.rand(*shape, of, generator=self.generator).argsort(-1)[..., :count]

    def mask(self, *shape: int) -> Tensor:
        """Flags of which one at least is set and one is not."""
        flags = torch.rand(*shape, generator=self.generator) < 0.6
        flags.view(-1)[0], flags.view(-1)[-1] = False, True
        return flags.to(self.device)


class Call(NamedTuple):
    """Arguments of a call, and the tensors that it writes where it returns nothing."""

    args: tuple[Any, ...]
    written: Sequence[Tensor] = ()


class Case(NamedTuple):
    """A kernel, its reference, and what to call both with. `exact`: same dtype, same numbers.

    Of the variants of one kernel the last is that which uses most of it.
    """

    name: str
    kernel: Callable[..., Any]
    ref: Callable[..., Any]
    make: Callable[[Draw, Sizes], Call]
    exact: bool


class Outcome(NamedTuple):
    """What a kernel does otherwise than its reference, nothing being "", and the largest relative error (RMS)."""

    problem: str
    error: float


CASES: list[Case] = []


def compare(case: Case, dtype: torch.dtype, device: torch.device, sizes: Sizes) -> Outcome:
    """Call kernel and reference with the same numbers; the reference on a CPU, in float64 where rounding is allowed."""
    expected = case.make(Draw(dtype, torch.device("cpu"), double=not case.exact), sizes)
    actual = case.make(Draw(dtype, device), sizes)
    returned = case.ref(*expected.args), case.kernel(*actual.args)
    pairs = zip(expected.written, actual.written, strict=True)
    if not expected.written:
        pairs = zip(*((x if isinstance(x, tuple) else (x,)) for x in returned), strict=True)
    outcomes = [_difference(reference, found, case.exact, TOLERANCE[dtype]) for reference, found in pairs]
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    return Outcome("; ".join(problems), max(outcome.error for outcome in outcomes))


def _difference(reference: Tensor, found: Tensor, exact: bool, tolerance: float) -> Outcome:
    """NaN and infinities have to stand in the same places; the rest is equal where `exact`, else close."""
    if found.shape != reference.shape:
        return Outcome(f"shape {tuple(found.shape)}, not {tuple(reference.shape)}", 0.0)
    if exact and found.dtype != reference.dtype:
        return Outcome(f"{found.dtype}, not {reference.dtype}", 0.0)
    finite = reference.isfinite()
    found, reference = found.cpu().double(), reference.double()
    if not torch.equal(found[~finite].nan_to_num(nan=7), reference[~finite].nan_to_num(nan=7)):
        return Outcome("NaN or infinity where there should be none, or the other way round", 0.0)
    norm = float(reference[finite].norm())
    error = float((found[finite] - reference[finite]).norm()) / (norm or 1.0)
    allowed = 0.0 if exact else tolerance
    return Outcome("" if error <= allowed else f"relative error {error:.1e}, not {allowed:.0e} or less", error)


def case(kernel: Callable[..., Any], ref: Callable[..., Any], variants: Sequence[Any] = (None,), exact: bool = False):
    """Register a maker of calls, which gets each of `variants` unless there is only one."""

    def register(make: Callable[..., Call]) -> Callable[..., Call]:
        for variant in variants:
            bound = make if variant is None else lambda draw, s, variant=variant: make(draw, s, variant)
            name = kernel.__name__ if variant is None else f"{kernel.__name__}-{variant}"
            CASES.append(Case(name, kernel, ref, bound, exact))
        return make

    return register


def rows_of(draw: Draw, s: Sizes, layout: SlotLayout | None = None) -> PagedKV:
    """Slots with NaN wherever there is no token; what outgrew them holds random pages."""
    layout = layout or s.layout
    lengths = torch.tensor(s.lengths, dtype=torch.int32)
    resident = None
    if layout.selected:
        resident = torch.arange(layout.sink, layout.first).repeat(s.b, s.hk, 1)
        for b in active(lengths, layout).nonzero()[:, 0].tolist():
            candidates = int(page_count(lengths, layout)[b]) - layout.sink - layout.window
            resident[b] = layout.sink + draw.subsets(layout.selected, s.hk, of=candidates)
        resident[-1, -1, 1] = -1
        resident = draw.ints(resident)
    lengths = lengths.to(draw.device)
    kv = draw(s.b, 2, s.hk, layout.total * layout.size, s.d)
    empty = row_positions(lengths, layout, resident).expand(s.b, s.hk, -1) < 0
    kv.masked_fill_(empty[:, None, :, :, None], NAN)
    return PagedKV(kv[:, 0], kv[:, 1], lengths, layout, resident)


def host_of(draw: Draw, s: Sizes, host_layout: str, parts: int = 2) -> HostPages:
    """Pools of two pieces a sequence."""
    per_piece, p = -(-s.pages // 2), s.layout.size
    shape = (s.hk, parts, p, s.d) if host_layout == "hnd" else (parts, p, s.hk, s.d)
    pieces = [[draw(per_piece, *shape).cpu(), draw(s.pages - per_piece, *shape).cpu()] for _ in s.lengths]
    if draw.device.type == "cuda":
        pieces = [[piece.pin_memory() for piece in row] for row in pieces]
    return HostPages.of(pieces, host_layout, draw.device)


def quantised_host_of(draw: Draw, s: Sizes, held: str, parts: int = 2) -> HostPages:
    """The same with blocks of bytes."""
    whole = host_of(draw, s, "hnd", parts)
    form = BlockFormat.of(held, parts, s.layout.size, s.d)
    exponents = torch.randint(-4, 5, (s.b, s.hk, s.d), generator=draw.generator)
    sizes = draw.fp32(torch.exp2(exponents)) if form.sized else None
    pieces = []
    for b, row in enumerate(whole.pieces):
        pieces.append([torch.empty(len(piece), s.hk, form.bytes, dtype=torch.uint8) for piece in row])
        for piece, small in zip(row, pieces[-1], strict=True):
            small.fill_(7)
            form.quantise(piece.unbind(2), small, None if sizes is None else sizes[b, :, None].cpu())
    if draw.device.type == "cuda":
        pieces = [[piece.pin_memory() for piece in row] for row in pieces]
    host = HostPages.of(pieces, "hnd", draw.device, (form, torch.float64 if draw.double else draw.dtype), sizes)
    host.held_keys.fill_(NAN)
    return host


def misses_of(draw: Draw, s: Sizes, k: int, pages: int, full: bool = False) -> resolve.MissList:
    """As many misses a head as it happens, none for some."""
    count = torch.randint(0, k + 1, (s.b, s.hk), generator=draw.generator)
    count[0, 0], count[-1, -1] = (k if full else 0), k
    beyond = torch.arange(k) >= count[..., None]
    parts = (draw.subsets(k, s.b, s.hk, of=n).masked_fill(beyond, -1) for n in (pages, k))
    return resolve.MissList(*map(draw.ints, parts), draw.ints(count))


@contextmanager
def _small_blocks(rows: PagedKV) -> Iterator[None]:
    """Let programs hold so few rows where sequences are short that the list is still several programs'."""
    kept = {name: getattr(gather, name) for name in ("BLOCK_ELEMENTS", "QUANTISED_ELEMENTS")}
    try:
        for name in kept if max(rows.lengths) < 64 else ():
            setattr(gather, name, 8 * power_of_two(rows.k.shape[3]))
        yield
    finally:
        for name, elements in kept.items():
            setattr(gather, name, elements)


@functools.wraps(gather.gather_pages)
def _with_few_programs(host: HostPages, misses: resolve.MissList, rows: PagedKV) -> None:
    """Each of them moves several pages."""
    with _small_blocks(rows):
        gather.gather_pages(host, misses, rows, programs=3)


POOLINGS = [f"{how}_{what}" for what, how in itertools.product(("q", "qk", "s"), ("max", "mean"))]


@case(summary.page_summary, summary.page_summary_ref, exact=True)
def _(draw: Draw, s: Sizes) -> Call:
    p = s.layout.size + 1 if s is ODD else s.layout.size
    keys = draw(s.hk, 3 * p + 1, s.d)[:, : 3 * p].unflatten(1, (3, p))
    return Call((keys,))


@case(scores.page_scores, scores.page_scores_ref, POOLINGS)
def _(draw: Draw, s: Sizes, pooling: str) -> Call:
    n = 301 if s is ODD else 4096
    high, low = draw(2, s.hk, n + 2, s.d).sort(0, descending=True).values
    return Call((draw(s.hk * s.g, s.d), torch.stack((high, low), 2)[:, 1:-1], s.d**-0.5, pooling))


@case(scores.page_scores_device, scores.page_scores_device_ref, POOLINGS)
def _(draw: Draw, s: Sizes, pooling: str) -> Call:
    high, low = draw(2, s.b, s.hk, s.pages, s.d).sort(0, descending=True).values
    out = draw.poisoned(s.b, s.hk, s.pages, dtype=torch.float32)
    q, lengths = draw(s.b, s.hk * s.g, s.d), draw.ints(s.lengths)
    args = (q, torch.stack((high, low), 3), lengths, s.layout, 0.3, pooling, out, draw.mask(s.b, s.hk))
    return Call(args, [out])


@case(choose.choose_pages, choose.choose_pages_ref, ["max_s", "mean_qk", "max_s first", "mean_q long"], exact=True)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    """Small whole numbers, so that sums are exact; and a softmax whose weights differ by powers of e."""
    pooling, _, more = variant.partition(" ")
    pages = (choose.ALONE if more == "long" else 0) + s.pages
    bounds = torch.randint(-2, 3, (2, s.b, s.hk, pages, s.d), generator=draw.generator).sort(0, descending=True).values
    q = torch.randint(-1, 2, (s.b, s.hk * s.g, s.d), generator=draw.generator)
    selection = _selection(draw, s, s.pages, True, int(more == "first"))
    summary, lengths = torch.stack(list(draw.like(bounds.float())), 3), draw.ints(s.lengths)
    args = (draw.like(q.float()), summary, lengths, s.layout, 0.125, pooling, selection, draw.mask(s.b, s.hk))
    return Call(args, written_by(selection))


@case(topk.topk_pages, lambda x, k: topk.topk_pages_ref(x, k).sort(-1).values, exact=True)
def _(draw: Draw, s: Sizes) -> Call:
    n, k = (4100, 33) if s is ODD else (32768, 32)
    return Call((draw.fp32(_tied(draw, s.hk, n)), k))


CHOICES = ["short", "wanted", "tokens", "long", "misses", "first", "long misses"]


@case(topk.topk_pages_device, topk.topk_pages_device_ref, CHOICES, exact=True)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    """Long: the pages of a head are several programs', and the sequences end in different ones."""
    pages, lengths = s.pages, list(s.lengths)
    wanted = draw.ints([1 + b % s.layout.selected for b in range(s.b)]) if variant == "wanted" else None
    if variant == "tokens":
        s, pages = s._replace(layout=TOKENS), max(s.lengths)
    if "long" in variant:
        pages = 18_000 if s is ODD else 32_768  # of more than one program
        lengths[-2:] = [4101 * s.layout.size, (pages - 1) * s.layout.size]
    selection = _selection(draw, s, pages, not {"misses", "first"}.isdisjoint(variant.split()), int(variant == "first"))
    found, heads = draw.fp32(_tied(draw, s.b, s.hk, pages)), draw.mask(s.b, s.hk)
    return Call((found, draw.ints(lengths), s.layout, selection, heads, wanted), written_by(selection))


def _selection(draw: Draw, s: Sizes, pages: int, resolves: bool, first: int = 0) -> topk.Selection:
    """Somewhere to write a choice, where it resolves beside a table of other pages, some of them candidates."""
    k = s.layout.selected
    selected = draw.ints(torch.full((s.b, s.hk, k), -7))
    if not resolves:
        return topk.Selection(selected)
    resident = draw.ints(s.layout.sink + draw.subsets(k, s.b, s.hk, of=min(pages - s.layout.sink, 3 * k)))
    resident[1, 0, ::2] = -1
    misses = resolve.MissList.empty(s.b, s.hk, k, draw.device)
    for part in misses:
        part.fill_(-7)
    return topk.Selection(selected, resident, misses, first and max(1, k // 3))


def written_by(selection: topk.Selection) -> list[Tensor]:
    if selection.misses is None:
        return [selection.selected]
    return [selection.selected, selection.resident, *selection.misses]


def _tied(draw: Draw, *shape: int) -> Tensor:
    """Few different numbers of both signs, zeros of both signs and infinities among them."""
    values = torch.tensor([float("-inf"), -7.5, -0.25, -0.0, 0.0, 1e-40, 0.25, 0.5, 3.0, float("inf")])
    return values[torch.randint(0, len(values), shape, generator=draw.generator)]


@case(resolve.resolve_pages_device, resolve.resolve_pages_device_ref, ["all", "some"], exact=True)
def _(draw: Draw, s: Sizes, which: str) -> Call:
    k = 37 if s is ODD else s.layout.selected
    resident, selected = (draw.ints(draw.subsets(k, s.b, s.hk, of=3 * k // 2)) for _ in range(2))
    selected = selected.sort(-1).values
    resident[1, 0, ::3] = -1
    selected[-1, 0, -2:] = -1
    resident[-1, -1] = selected[-1, -1].flip(0)
    misses = resolve.MissList.empty(s.b, s.hk, k, draw.device)
    for part in misses:
        part.fill_(-7)
    heads = draw.mask(s.b, s.hk) if which == "some" else None
    return Call((resident, selected, misses, heads), [resident, *misses])


@case(similarity.correct_heads, similarity.correct_heads_ref, ["mean", "max"], exact=True)
def _(draw: Draw, s: Sizes, pooling: str) -> Call:
    q = draw(s.b, s.hk * s.g, 2, s.d)[:, :, 0]  # with gaps between heads
    previous = q + draw(*q.shape) * torch.arange(0, 2, 2 / s.g, device=draw.device)[: s.g].repeat(s.hk)[:, None]
    previous = previous.to(q.dtype).contiguous()
    retrieved = draw.ints(torch.arange(s.b)[:, None].repeat(1, s.hk) != s.b - 1)
    flags = (draw.ints(torch.ones(s.b, s.hk), torch.bool) for _ in range(3))
    decision = similarity.Decision(*flags, draw.ints(torch.full((s.b, s.hk), -7)), retrieved)
    previous[-1] = NAN
    args = (q, previous, draw.ints(s.lengths), s.layout, 0.8, pooling, decision)
    return Call(args, [previous, *decision])


GATHERED = ["tokens values", "tokens hnd", "tokens nhd", "hnd", "values", "nhd"]


@case(_with_few_programs, gather.gather_pages_ref, GATHERED, exact=True)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    s, form = _of_tokens(s, variant), variant.split()[-1]
    rows = rows_of(draw, s)
    misses = misses_of(draw, s, s.layout.selected, s.pages)
    host = host_of(draw, s, "hnd", parts=1) if form == "values" else host_of(draw, s, form)
    return Call((host, misses, rows), [rows.k, rows.v])


@functools.wraps(whole.bring_tokens)
def _brought_by_few_programs(*args: Any) -> None:
    """Each of them moves several blocks."""
    whole.bring_tokens(*args, programs=3)


def _host_tokens(draw: Draw, s: Sizes, parts: int) -> whole.HostTokens:
    """Room for a few tokens more than a sequence has, which are poisoned, as its newest one is."""
    tokens = []
    for length in s.lengths:
        own = draw(parts, length + 3, s.hk, s.d)
        own[:, max(0, length - 1) :] = NAN
        tokens.append(own)
    return whole.HostTokens.of(tokens, draw.device)


@case(_brought_by_few_programs, whole.bring_tokens_ref, ["keys and values", "latents"], exact=True)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    host = _host_tokens(draw, s, 1 if variant == "latents" else 2)
    out = draw.poisoned(*host.shape[:2], host.longest + 2, *host.shape[2:])
    return Call((host, draw.ints(s.lengths), out, 1), [out])


@case(whole.store_newest, whole.store_newest_ref, ["keys and values", "latents"], exact=True)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    host = _host_tokens(draw, s, 1 if variant == "latents" else 2)
    new = append.NewToken(*draw(2, s.b, s.hk, 2, s.d)[:, :, :, 1])
    return Call((host, new, draw.ints(s.lengths)), list(host.tokens))


def _filled(draw: Draw, s: Sizes, variant: str) -> Call:
    """Bounds are the keys' own numbers; a cuboid is rounded."""
    out = None if "written" in variant or "values" in variant else draw.poisoned(s.b, s.hk, s.pages, 2, s.d)
    parts = 1 if "values" in variant else 2
    host = host_of(draw, s, variant[-3:], parts) if variant[-3:] in ("hnd", "nhd") else None
    written = [piece for row in host.pieces for piece in row] if host is not None else []
    args = (rows_of(draw, s), out, host, "cuboid" in variant)
    return Call(args, written if out is None else [out, *written])


case(filled.take_in_filled_page, filled.take_in_filled_page_ref, ["cuboid"])(_filled)
case(
    filled.take_in_filled_page,
    filled.take_in_filled_page_ref,
    ["bounds", "written hnd", "values hnd", "bounds nhd", "bounds hnd"],
    exact=True,
)(_filled)


QUANTISED = ["int8", "tokens int8", "values int8", "tokens int4", "values int4", "int4", "k8v4", "tokens k8v4"]


def _of_tokens(s: Sizes, variant: str) -> Sizes:
    """Sizes with pages of a single token where the variant says so."""
    return s._replace(layout=SlotLayout(1, 2, 20, 3)) if "tokens" in variant else s


@functools.wraps(gather_small.gather_quantised)
def _quantised_with_few_programs(host: HostPages, misses: resolve.MissList, rows: PagedKV) -> None:
    with _small_blocks(rows):
        gather.gather_pages(host, misses, rows, programs=3)


@case(_quantised_with_few_programs, gather_small.gather_quantised_ref, QUANTISED)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    s = _of_tokens(s, variant)
    rows = rows_of(draw, s)
    misses = misses_of(draw, s, s.layout.selected, s.pages)
    host = quantised_host_of(draw, s, variant.split()[-1], 1 if "values" in variant else 2)
    return Call((host, misses, rows), [rows.k, rows.v])


@functools.wraps(write_small.write_quantised)
def _write_quantised(rows: PagedKV, host: HostPages) -> None:
    filled.take_in_filled_page(rows, host=host)


@case(_write_quantised, write_small.write_quantised_ref, QUANTISED)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    s = _of_tokens(s, variant)
    host = quantised_host_of(draw, s, variant.split()[-1], 1 if "values" in variant else 2)
    held = [] if s.layout.size == 1 else [host.held_keys]
    return Call((rows_of(draw, s), host), [piece for row in host.pieces for piece in row] + held)


ATTENTION = ["plain", "softcap", "sinks", "softcap sinks", "span", "ring", "everything", "append", "append some heads"]
ATTENTION += ["append at", "kept", "tokens", "early append", "in place append", "missing values"]
ATTENTION += ["missing tokens nhd append", "missing some heads hnd append"]


@case(slot.paged_decode_attention, slot.paged_decode_attention_ref, ATTENTION)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    if "missing" in variant:
        s = _of_tokens(s, variant)
    everything = SlotLayout.everything(s.pages, s.layout.size)
    layouts = {"ring": SlotLayout(1, 1, 0, 37), "everything": everything, "append at": everything}
    layouts["early append"] = s.layout._replace(early=True)
    rows = rows_of(draw, s, TOKENS if variant == "tokens" else layouts.get(variant))
    missing = _missing(draw, s, rows, variant) if "missing" in variant and s.d <= slot.WIDEST else None
    if variant == "in place append":
        kv = draw(s.b, 2, s.hk, s.pages * s.layout.size, s.d)
        rows = rows._replace(k=kv[:, 0], v=kv[:, 1], in_place=True)
    q, out = draw(s.b, s.hk * s.g, 2, s.d)[:, :, 1], draw.poisoned(s.b, s.hk * s.g, s.d)
    sinks = draw.fp32(torch.randn(s.hk * s.g, generator=draw.generator)) if "sinks" in variant else None
    softmax = Softmax(s.d**-0.5, 2.5 if "softcap" in variant else None, sinks)
    new = append.NewToken(*draw(2, s.b, s.hk, s.d)) if "append" in variant or variant == "ring" else None
    heads = draw.mask(s.b, s.hk) if "heads" in variant else None
    if variant == "append at":
        at = draw.ints(torch.rand(s.b, s.hk, generator=draw.generator).cpu() * torch.tensor(s.lengths)[:, None])
        new = new._replace(at=at)
        for x in (rows.k, rows.v):
            x.nan_to_num_()
    kept = draw.mask(s.b, s.hk, rows.layout.total * rows.layout.size) if variant == "kept" else None
    args = (q, rows, softmax, out, new, heads, 19 if variant == "span" else None, kept, missing)
    return Call(args, [out, rows.k, rows.v])


def _missing(draw: Draw, s: Sizes, rows: PagedKV, variant: str) -> gather.Missing:
    """Pages that are not in their slots yet: of some heads none, of one all, and none before slots are outgrown."""
    host = host_of(draw, s, "nhd" if "nhd" in variant else "hnd", 1 if "values" in variant else 2)
    misses = misses_of(draw, s, s.layout.selected, s.pages)
    misses.counts.mul_(active(rows.lengths, s.layout)[:, None])
    for b, h in misses.counts.nonzero().tolist():
        for into in misses.slots[b, h, : misses.counts[b, h]].tolist():
            start = (s.layout.sink + into) * s.layout.size
            for x in (rows.k, rows.v)[-host.parts :]:
                x[b, h, start : start + s.layout.size] = NAN
    return gather.Missing(host, misses)


@case(append.append_token, append.append_token_ref, ["at", "slots", "tokens"], exact=True)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    rows = rows_of(draw, s, TOKENS if variant == "tokens" else None)
    at = draw.ints(torch.arange(s.b * s.hk).view(s.b, s.hk)) if variant == "at" else None
    return Call((rows, append.NewToken(*draw(2, s.b, s.hk, s.d), at)), [rows.k, rows.v])


SCORES = ["mean_q", "max_qk", "mean_s", "mean_s together softcap sinks", "max_s excluded some heads"]


@case(tokens.token_scores_device, tokens.token_scores_device_ref, SCORES)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    pooling, _, more = variant.partition(" ")
    if s is ODD:
        s = s._replace(layout=TOKENS)
    keys = draw(s.b, s.hk, max(s.lengths) + 3, s.d)[..., : s.d - 3 if s is ODD else s.d]
    out = draw.fp32(torch.full((s.b, 1 if "together" in more else s.hk, keys.shape[2]), NAN))
    excluded = draw.mask(*keys.shape[:3]) if "excluded" in more else None
    heads = draw.mask(s.b, s.hk) if "heads" in more else None
    sinks = draw.fp32(torch.randn(s.hk * s.g, generator=draw.generator)) if "sinks" in more else None
    softmax = Softmax(0.3, 2.5 if "softcap" in more else None, sinks)
    args = (draw(s.b, s.hk * s.g, s.d), keys, draw.ints(s.lengths), s.layout, softmax, pooling, out, heads, excluded)
    return Call(args, [out])


@case(decode.decode_attention, decode.decode_attention_ref, [1, 150])
def _(draw: Draw, s: Sizes, n: int) -> Call:
    k = draw(n, s.hk, s.d).transpose(0, 1)
    return Call((draw(s.hk * s.g, s.d), k, draw(s.hk, n, s.d), Softmax(s.d**-0.5)))


@case(prefill.prefill_attention, prefill.prefill_attention_ref, ["long", "window", "plain", "softcap", "sinks"])
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    """No kernel of ours, but fused ones that are the device's own."""
    m, n, hk = (7, 33, s.hk) if s is ODD else (1024, 60_000, 1) if variant == "long" else (1024, 4096, 2)
    sinks = draw.fp32(torch.randn(hk * s.g, generator=draw.generator)) if variant == "sinks" else None
    kv = draw(2, hk, n + 5, s.d)[:, :, :n]  # room for what is still to come
    softmax = Softmax(s.d**-0.5, 2.5 if variant == "softcap" else None, sinks)
    return Call((draw(hk * s.g, m, s.d), *kv, softmax, n // 3 if variant == "window" else None))


TILES = ["plain", "masked", "causal softcap", "causal", "masked each softcap", "causal window softcap"]


@case(tiles.tile_attention, tiles.tile_attention_ref, TILES)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    """Queries across two tiles, and keys that end within one; some queries see nothing."""
    m, n, hk = (133, 170, s.hk) if s is ODD else (1024, 4096, 2)
    kv = draw(2, hk, n + 5, s.d)[:, :, :n]
    q = draw(m, hk * s.g, s.d).transpose(0, 1)
    softmax = Softmax(s.d**-0.5, 2.5 if "softcap" in variant else None)
    mask = None
    if "masked" in variant:
        mask = draw.mask(*((hk, m, n) if "each" in variant else (m, n)))
        mask[..., 7, :] = False
    window = n // 3 if "window" in variant else None
    return Call((q, *kv, softmax, "causal" in variant, window, mask))


@case(rebuild.rebuild_missing_keys, rebuild.rebuild_missing_keys_ref, ["none", "part", "pairs", "halves"])
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    c, rank, n, first = (3, 37, 11, 2) if s is ODD else (8, 160, 600, 48)
    k = 7 if s is ODD else 256
    rotation = None
    if variant != "none":
        rotated = s.d // 4 * 2 if variant == "part" else s.d
        angles = torch.arange(n * c)[:, None] * 0.7 ** torch.arange(rotated // 2)
        turn = _turn_pairs if variant == "pairs" else _turn_halves
        tables = [draw.fp32(table(angles)) for table in (torch.cos, torch.sin)]
        if variant == "halves":  # the other models keep each column once
            tables = [torch.cat((table, table), 1) for table in tables]
        rotation = rebuild.Rotation.of(*tables, turn, rotated, s.d)
    out = draw.poisoned(s.b, s.hk, (first + k) * c + 1, s.d)
    misses = misses_of(draw, s, k, n, full=True)
    args = (draw(s.b, n, c, rank), draw(s.b, s.hk, rank, s.d) / rank**0.5, misses, rotation, out, first)
    return Call(args, [out])


@case(leaving.keep_leaving_chunk, leaving.keep_leaving_chunk_ref, ["none", "part", "pairs", "halves"])
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    """One sequence takes no part, one loses no chunk, one has no room for it, and from the last one goes."""
    layout = SlotLayout(3, 4, 0, 3, early=True) if s is ODD else SlotLayout(8, 304, 0, 5, early=True)
    c, rank = layout.size, 37 if s is ODD else 160
    s = s._replace(lengths=(0, 30, 41, 47) if s is ODD else (4095, 9007), layout=layout)
    n = max(s.lengths) // c
    rotation = None if variant == "none" else _tables(draw, s, n * c, variant)
    numbers = [[n // 2] * s.b, [11 if b == 2 else n for b in range(s.b)], [-7] * s.b]
    stored = leaving.StoredChunks(
        draw.poisoned(s.b, n, c, rank), draw.poisoned(s.b, s.hk, n, s.d), *(draw.ints(each) for each in numbers)
    )
    rows = rows_of(draw, s)
    return Call((rows, draw(s.b, s.hk, rank, s.d) / s.d**0.5, rotation, stored), stored)


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate as llama (columns twice) and gpt_oss (columns once) do: channel c goes with c + d/2."""
    if cos.shape[-1] < x.shape[-1]:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate as glm does: channel 2c goes with 2c + 1."""
    cos, sin = (table.repeat_interleave(2, -1) for table in (cos, sin))
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


@case(one_bit.quantise_keys, one_bit.quantise_keys_ref, exact=True)
def _(draw: Draw, s: Sizes) -> Call:
    group = 5 if s is ODD else 32
    return Call((_steps(draw, s.hk, 3 * group + 1, s.d)[:, 1:].unflatten(1, (3, group)),))


@case(one_bit.quantise_filled_group, one_bit.quantise_filled_group_ref, ["pages", "ring"], exact=True)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    layout = SlotLayout(1, 3, 0, 40 if s is ODD else 64) if variant == "ring" else s.layout
    group, (rows, n) = (6 if s is ODD else 8), (rows_of(draw, s, layout), max(s.lengths))
    rows = rows._replace(k=_steps(draw, *rows.k.shape), v=draw(*rows.v.shape))
    codes = draw.ints(torch.full((s.b, s.hk, n // group, group, -(-s.d // 8)), 7), torch.uint8)
    ranges = draw.poisoned(s.b, s.hk, n // group, 2, s.d)
    return Call((rows, codes, ranges), [codes, ranges])


def _steps(draw: Draw, *shape: int) -> Tensor:
    """Even numbers: half a sum of two is then exact in every dtype, however a cast rounds."""
    return draw.like(2.0 * torch.randint(-9, 10, shape, generator=draw.generator))


@case(one_bit_scoring.one_bit_scores, one_bit_scoring.one_bit_scores_ref)
def _(draw: Draw, s: Sizes) -> Call:
    group = 5 if s is ODD else 32
    return Call((draw(s.hk, s.g, s.d), *_quantised(draw, s, s.hk, 7, group)))


ONE_BIT = ["mean_q", "max_qk", "mean_s heads"]


@case(one_bit_scoring.one_bit_scores_device, one_bit_scoring.one_bit_scores_device_ref, ONE_BIT)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    pooling, _, more = variant.partition(" ")
    group, n = (20 if s is ODD else 32), max(s.lengths)
    layout = TOKENS._replace(group=group) if s is ODD else s.layout
    codes, ranges = _quantised(draw, s, s.b, s.hk, n // group + 1, group)
    out = draw.poisoned(s.b, s.hk, codes.shape[2] * group, dtype=torch.float32)
    heads = draw.mask(s.b, s.hk) if more else None
    args = (draw(s.b, s.hk * s.g, s.d), codes, ranges, draw.ints(s.lengths), layout, 0.3, pooling, out, heads)
    return Call(args, [out])


def _quantised(draw: Draw, s: Sizes, *shape: int) -> tuple[Tensor, Tensor]:
    bits = torch.randint(0, 256, (*shape, -(-s.d // 8)), generator=draw.generator)
    bits[..., -1] &= (1 << ((s.d - 1) % 8 + 1)) - 1
    return draw.ints(bits, torch.uint8), draw(*shape[:-1], 2, s.d)


@case(norm.rms_norm, norm.rms_norm_ref)
def _(draw: Draw, s: Sizes) -> Call:
    n = s.hk * s.g * s.d + (3 if s is ODD else 0)
    return Call((draw(2, s.b, n + 8)[..., :n], draw(n), 1e-6, 1.0))


@case(add_norm.add_rms_norm, add_norm.add_rms_norm_ref)
def _(draw: Draw, s: Sizes) -> Call:
    n = s.hk * s.g * s.d + (3 if s is ODD else 0)
    return Call((draw(2, s.b, n + 8)[..., :n], draw(2, s.b, n + 5)[..., :n], draw(n), 1e-6, 1.0))


@case(silu.silu_mul, silu.silu_mul_ref)
def _(draw: Draw, s: Sizes) -> Call:
    return Call((draw(s.b, 1, 2 * (1030 if s is ODD else 14336)),))


@case(rotating.rotate, rotating.rotate_ref, ["part", "pairs", "halves"])
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    """Queries, keys and values side by side, as one product makes them; several tokens."""
    n, rotated = 3, s.d // 4 * 2 if variant == "part" else s.d
    angles = torch.randn(s.b, n, rotated // 2, generator=draw.generator)
    turn = _turn_pairs if variant == "pairs" else _turn_halves
    tables = [draw.like(table(angles)) for table in (torch.cos, torch.sin)]
    named = rebuild.Rotation.of(*(table[0].float() for table in tables), turn, rotated, s.d)
    heads = draw(s.b, n, s.hk * s.g + 2 * s.hk, s.d).transpose(1, 2)
    q, k = heads[:, : s.hk * s.g], heads[:, s.hk * s.g : s.hk * s.g + s.hk]
    sign = draw.fp32(named.sign)
    return Call((q, k, rebuild.Rotation(*tables, named.partner, named.column, sign)), [q, k, heads])


def _tables(draw: Draw, s: Sizes, n: int, variant: str) -> rebuild.Rotation:
    """Tables of n positions, with an attention scaling in them; of some channels alone, or of all."""
    rotated = s.d // 4 * 2 if variant == "part" else s.d
    angles = torch.arange(n)[:, None] * 0.7 ** torch.arange(rotated // 2)
    cos, sin = (draw.fp32(1.25 * table(angles)) for table in (torch.cos, torch.sin))
    turn = _turn_pairs if variant == "pairs" else _turn_halves
    named = rebuild.Rotation.of(torch.ones_like(cos[:1]), torch.zeros_like(sin[:1]), turn, rotated, s.d)
    return rebuild.Rotation(cos, sin, named.partner, named.column, draw.fp32(named.sign))


@case(moving.rotate_newest, moving.rotate_newest_ref, ["part", "pairs", "halves"])
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    x, out = draw(s.b, 2, s.hk * s.g, s.d)[:, 1], draw.poisoned(s.b, s.hk * s.g, s.d, dtype=torch.float32)
    return Call((x, draw.ints(s.lengths), _tables(draw, s, max(s.lengths), variant), out), [out])


@case(moving.move_sinks, moving.move_sinks_ref, ["part", "pairs", "halves"])
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    """Sinks that are not there yet, that stay where they are, and that move."""
    sinks, held = (5, 45) if s is ODD else (16, 2048)
    lengths = [0, 3, 41, 52] if s is ODD else list(s.lengths)
    k = draw(s.b, 2, s.hk, held, s.d)[:, 0]
    unrotated = draw.poisoned(s.b, s.hk, sinks, s.d, dtype=torch.float32)
    unrotated[-1].copy_(draw.fp32(torch.randn(s.hk, sinks, s.d, generator=draw.generator)))
    if s is not ODD:
        unrotated[0].copy_(unrotated[-1])
    args = (k, unrotated, draw.ints(lengths), held, _tables(draw, s, max(lengths), variant))
    return Call(args, [k, unrotated])


@case(projecting.project_heads, projecting.project_heads_ref)
def _(draw: Draw, s: Sizes) -> Call:
    columns = 35 if s is ODD else 38
    basis = draw.fp32(torch.randn(s.b, s.hk, s.d, columns, generator=draw.generator))
    out = draw.poisoned(s.b, 2, s.hk * s.g, columns)[:, 1]
    return Call((draw(s.b, s.hk * s.g, 2, s.d)[:, :, 1], basis, out), [out])


@case(projecting.project_newest, projecting.project_newest_ref)
def _(draw: Draw, s: Sizes) -> Call:
    columns = 35 if s is ODD else 38
    basis = draw.fp32(torch.randn(s.b, s.hk, s.d, columns, generator=draw.generator))
    out = draw.poisoned(s.b, s.hk, max(s.lengths) + 3, columns)
    return Call((draw(s.b, s.hk, 2, s.d)[:, :, 1], basis, draw.ints(s.lengths), out), [out])


@case(near.count_near_best, near.count_near_best_ref, ["most", "alone", "some"], exact=True)
def _(draw: Draw, s: Sizes, variant: str) -> Call:
    """Whole numbers, and what nobody scored is NaN; one sequence has no candidates, in one no head chooses."""
    n = 4101 if s is ODD else 32768
    found = draw.fp32(torch.randint(-9, 10, (s.b, s.hk, n), generator=draw.generator))
    found[..., -40:] = float("-inf")
    heads = torch.ones(s.b, s.hk, dtype=torch.bool, device=draw.device)
    if s is ODD:
        found[0] = float("-inf")
        found[1], heads[1] = NAN, False
    tally = near.NearTally(*(draw.ints([9] * s.b, torch.int64) for _ in range(3)))
    wanted, arrived = draw.ints([-7] * s.b), draw.ints([0] * s.b)
    alpha, most = {"most": (9.0, 20), "alone": (0.0, n), "some": (4.0, n)}[variant]
    return Call((found.float(), heads, alpha, most, wanted, tally, arrived), [wanted, *tally, arrived])


@case(kept_queries.turn_from_kept, kept_queries.turn_from_kept_ref, [-2.0, 2.0, 0.9])
def _(draw: Draw, s: Sizes, theta: float) -> Call:
    """One sequence retrieves for the first time, one asks as before, one asks otherwise, and one does not retrieve."""
    q, query = draw(2, s.b, 2, s.hk * s.g, s.d)[:, :, 1]
    query = query.contiguous()
    query[1 % s.b] = q[1 % s.b] + 0.01
    active = torch.arange(s.b, device=draw.device)[:, None].expand(-1, s.hk) != 3
    counts = [draw.ints([first, 5, 6, 7][: s.b], torch.int64) for first in (8, 0)]
    turned, anew = (draw.ints(torch.ones(s.b, width), torch.bool) for width in (s.hk, 1))
    kept = kept_queries.KeptQuery(query, *counts)
    return Call((q, kept, active.contiguous(), theta, turned, anew), [*kept, turned, anew])


@case(room.make_room, room.make_room_ref, exact=True)
def _(draw: Draw, s: Sizes) -> Call:
    """Equal scores, rows that are empty, and rows that are another sequence's alone."""
    rows = 1100 if s is ODD else 2048
    seen = draw.ints([0, rows // 2, rows + 7, rows + 90][: s.b])
    positions = draw.subsets(rows, s.b, s.hk, of=rows + 80)
    scores = draw.fp32(_tied(draw, s.b, s.hk, rows).nan_to_num(posinf=4.0, neginf=-9.0))
    at = draw.ints(torch.full((s.b, s.hk), -7))
    most = draw.ints([rows - 3 if b == 2 else rows for b in range(s.b)], torch.int64)
    positions = draw.ints(positions, torch.int64).contiguous()
    return Call((positions, scores.float(), seen, most, 20, at), [positions, at])


@case(replace.replace_page, replace.replace_page_ref, exact=True)
def _(draw: Draw, s: Sizes) -> Call:
    """One sequence takes no part, one begins no page, one has a slot for it, one has none."""
    size, slots, window = (4, 9, 3) if s is ODD else (16, 128, 32)
    kv, counted = draw(s.b, 2, s.hk, slots * size, s.d), (0, 3 * size, 4 * size + 1, 13 * size + 1)
    stamps, pages = (
        draw.ints(torch.randint(0, 5, (s.b, s.hk, slots), generator=draw.generator), torch.int64) for _ in "12"
    )
    numbers = [[2] * s.b, [slots - (b == 3) for b in range(s.b)]]
    most = (draw.ints(x, torch.int64) for x in numbers)
    lengths = [counted[-s.b :][b] if s is ODD else slots * size * b + 1 for b in range(s.b)]
    counts = replace.PageCounts(*most, draw.ints(lengths), *(draw.ints([-7] * s.b) for _ in "12"))
    held = replace.StampedPages(kv[:, 0], kv[:, 1], draw(s.b, s.hk, slots, 2, s.d), stamps, pages)
    return Call((held, counts, window), [*held, counts.held, counts.full])


@case(four_bit.quantise_newest, four_bit.quantise_newest_ref, exact=True)
def _(draw: Draw, s: Sizes) -> Call:
    """Steps of a power of two, and halves among the codes; in one head all channels are equal."""
    k = draw.like(torch.randint(0, 31, (s.b, s.hk, s.d), generator=draw.generator) / 2.0)
    k[..., 0], k[..., 1] = 0.0, 15.0
    k[-1, 0] = 0.75
    codes = draw.ints(torch.full((s.b, s.hk, max(s.lengths), -(-s.d // 2)), 7), torch.uint8)
    ranges = draw.poisoned(s.b, s.hk, max(s.lengths), 2)
    return Call((k, draw.ints(s.lengths), codes, ranges), [codes, ranges])


@case(tokens_kept.keep_nucleus, tokens_kept.keep_nucleus_ref, ["0.5 wide", 0.5, 0.9, 1.0], exact=True)
def _(draw: Draw, s: Sizes, variant: str | float) -> Call:
    """Scores of many tokens are equal, and their weights powers of two; of many rows a program sees a part."""
    p, s = float(str(variant).split()[0]), s._replace(layout=s.layout._replace(group=1))
    if "wide" in str(variant) and s.d == ODD.d:
        s = s._replace(lengths=(0, 12, 610, 2399), layout=SlotLayout(size=4, sink=2, selected=147, window=2))
    rows, n = rows_of(draw, s), s.pages * s.layout.size
    codes = draw.ints(torch.zeros(s.b, s.hk, n, -(-s.d // 2)), torch.uint8)
    codes[..., 0] = draw.ints(torch.randint(0, 8, (s.b, s.hk, n), generator=draw.generator), torch.uint8)
    ranges = draw.like(torch.stack((torch.ones(s.b, s.hk, n), torch.zeros(s.b, s.hk, n)), -1))
    q = draw.like(torch.ones(s.b, s.hk * s.g, s.d))
    tally = tokens_kept.NucleusTally(*(draw.ints([9] * s.b, torch.int64) for _ in range(5)))
    kept = draw.ints(torch.zeros(s.b, s.hk, s.layout.total * s.layout.size), torch.bool)
    arrived = draw.ints(torch.zeros(s.b, s.hk * s.g))
    args = (q, rows, codes, ranges, Softmax(0.6931471805599453), p, draw.mask(s.b, s.hk), kept, tally, arrived)
    return Call(args, [kept, *tally, arrived])


def packed_gemv(x: Tensor, weight: packed.PackedWeight) -> Tensor:
    """A few rows, for which `packed_linear` has a kernel of their own."""
    return packed.packed_linear(x, weight)


def packed_row(x: Tensor, weight: packed.PackedWeight) -> Tensor:
    """One row, which the same kernel reads as it is; several are put in the order of its threads."""
    return packed.packed_linear(x, weight)


LAID_OUT = [*packed.PACKINGS, *(f"{name} by field" for name, packing in packed.PACKINGS.items() if packing.size > 1)]


def packed_weight_of(draw: Draw, s: Sizes, variant: str) -> packed.PackedWeight:
    """Any bytes are levels; those that may belong to scales make numbers of usual sizes."""
    packing = packed.PACKINGS[variant.partition(" ")[0]]
    rows, columns = (21, 768) if s is ODD else (4096, 16 * s.d)
    drawn = torch.randint(0, 256, (rows, packing.row_bytes(columns)), generator=draw.generator, dtype=torch.uint8)
    if packing.name == "MXFP4":  # a byte of exponent, then levels: sums are numbers of half precision, too
        drawn.unflatten(1, (-1, packing.nbytes))[..., 0].bitwise_and_(0x0F).bitwise_or_(0x70)
    else:
        drawn = drawn & 0xBB if packing.size > 1 else drawn & 0xBF | 0x30
    weight = packed.PackedWeight(drawn.to(draw.device), packing, torch.float32)
    return weight.laid_out(by_field="by field" in variant)


@case(packed_gemv, packed.packed_linear_ref, LAID_OUT)
def _(draw: Draw, s: Sizes, name: str) -> Call:
    weight = packed_weight_of(draw, s, name)
    return Call((draw(3, weight.shape[1]) / 64, weight))  # exactly: sums are numbers of half precision


@case(packed_row, packed.packed_linear_ref, [name for name in LAID_OUT if "by field" in name])
def _(draw: Draw, s: Sizes, name: str) -> Call:
    weight = packed_weight_of(draw, s, name)
    return Call((draw(1, weight.shape[1]) / 64, weight))


@case(packed.packed_linear, packed.packed_linear_ref, LAID_OUT)
def _(draw: Draw, s: Sizes, name: str) -> Call:
    weight = packed_weight_of(draw, s, name)
    return Call((draw(20, weight.shape[1]) / 64, weight))


@case(packed.unpack_rows, packed.unpack_ref, LAID_OUT, exact=True)
def _(draw: Draw, s: Sizes, name: str) -> Call:
    weight = packed_weight_of(draw, s, name)
    return Call((weight.packed, weight.packing))
