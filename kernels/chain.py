"""Linear layers one after another on a CPU, for a few rows, in one loop: norms, products, gates and sums.

    norm       y_c = x_c / sqrt(mean_c x_c^2 + eps) * (w_c + shift)
    products   y_i = W_i . x + b_i + z_i          of several weights at once; b and z where there are any
    gate       y_i = silu(W_i . x) * V_i . x
    calls      of other loops, such as attention, block by block

A step reads every weight once. What stands between two products takes a thousandth of their time, and to start a loop
from Python, or threads, some hundred times longer than that. So a whole chain is one call that starts its threads once.
A thread takes a share of a stage when it has done one, and goes on to the next stage when all shares are done. It waits
only for shares that a running thread has taken, so that any number of threads comes to the end.

A weight's own loop multiplies some of its rows, in any format: `kvcli.kernels.gemv` and `kvcli.kernels.packed_linear`
have them. They are called by their addresses, so that the loop here is compiled once for all formats. So are loops of
attention (`kvcli.kernels.decode_attention`) and of speculation (`kvcli.kernels.speculation`).

Shapes: x [m, in] fp32, W [out, in]; m is a few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels._llvm import at_address, call_at, exp, fetch_and_add, fetched, let_others_run
from kvcli.kernels._numba import ARITHMETIC, compiled, compiled_at, inlined, prange, use_threads

ROWS = 32  # rows of a weight per thread at once
_LINE = 16  # numbers of a cache line
_INPUTS = 4  # at most


class Matrix(NamedTuple):
    """A weight [rows, columns] with its own loop, and a bias [rows] if there is one.

    `loop(m)` makes the loop for m rows of x, and returns its address; with `powers` only for powers of two.
    """

    loop: Callable[[int], int]
    weight: Any  # an array; the loop is given its address
    rows: int
    columns: int
    powers: bool
    bias: Any = None


class Normalised(NamedTuple):
    """Normalise the rows `x`."""

    x: str
    out: str
    weight: Tensor
    eps: float
    shift: float


class Products(NamedTuple):
    """Multiply `x` by weights, the results next to each other, and add `plus`."""

    x: str
    out: str
    matrices: Sequence[Matrix]
    plus: str | None = None


class Gate(NamedTuple):
    """Multiply `x` by two weights, and the second result by silu of the first."""

    x: str
    out: str
    gate: Matrix
    up: Matrix


class TurnedHeads(NamedTuple):
    """Normalise heads of `size` numbers, which lie in the rows `x` from column `first` on, and rotate them, in place.

    `norm` is a weight [size], eps and shift; `turn` is partner, column and sign [size] of a `Rotation` by the inputs
    "cos" and "sin" [m, width].
    """

    x: str
    first: int
    heads: int
    size: int
    norm: tuple[Tensor, float, float] | None
    turn: tuple[Tensor, Tensor, Tensor] | None
    width: int


class Called(NamedTuple):
    """Call a loop for each of its blocks, for one row `x`; any thread may do any block.

    The loop gets the addresses of what it is told, of x and of the result `out` of `width` numbers, and the number of
    its block (`called_loop`). What it is told is row `told` of what `Chain` is given at every step, and number `blocks`
    of that row counts the blocks. A loop without a result has no `out`.
    """

    x: str
    loop: int
    told: int
    blocks: int
    out: str | None = None
    width: int = 0


Stage = Normalised | Products | Gate | TurnedHeads | Called
_NORM, _PRODUCTS, _GATE, _HEADS, _CALLED = range(5)

# What a stage is to the loop: numbers, places among the inputs and results, and addresses of what does not move.
_KIND, _X, _OUT, _PLUS, _WEIGHT, _BLOCKS, _WIDTH, _FIRST, _SIZE, _CHANNELS, _ANGLES, _COS, _SIN, _FIELDS = range(14)


@inlined
def floats(place: Any, *shape: Any) -> Any:
    """View fp32 numbers at an address."""
    return at_address(place, np.float32(0), shape)


def loop_of_rows(function: Callable[..., None], arithmetic: Any = ARITHMETIC) -> int:
    """Compile the loop of a weight, and return its address.

    It gets the addresses of weight, x and out, the first and last of the weight's rows, those of its columns and of a
    row of `out`, the column of `out` for the weight's first row, and the rows of x.
    """
    return compiled_at(function, 9, arithmetic)


def called_loop(function: Callable[[int, int, int, int], None]) -> int:
    """Compile the loop of a `Called` stage, and return its address."""
    return compiled_at(function, 4)


@inlined
def _multiply(matrix: Any, x: Any, out: Any, first: Any, last: Any, stride: Any, at: Any, rows: Any) -> None:
    """Multiply x by some rows of a weight, and add its bias."""
    loop, weight, _, columns, bias = matrix
    call_at(loop, (weight, x, out, first, last, columns, stride, at, rows))
    if bias:
        added, target = floats(bias, last), floats(out, rows, stride)
        for m in range(rows):
            for i in range(first, last):
                target[m, at + i] += added[i]


@inlined
def _matrix(matrices: Any, index: Any) -> Any:
    row = matrices[index]
    return row[0], row[1], row[2], row[3], row[4]


@inlined
def _rows(stage: Any, matrices: Any, places: Any, held: Any, rows: Any, begin: Any, end: Any) -> None:
    """Multiply by blocks of `ROWS` rows of a stage's weights, from `begin` to `end`; rows side by side in one call."""
    x, out, index, width = places[stage[_X]], places[stage[_OUT]], stage[_WEIGHT], stage[_WIDTH]
    if stage[_KIND] == _GATE:
        first, last = begin * ROWS, min(end * ROWS, width)
        _multiply(_matrix(matrices, index), x, held, first, last, 2 * width, 0, rows)
        _multiply(_matrix(matrices, index + 1), x, held, first, last, 2 * width, width, rows)
        both, gated = floats(held, rows, 2 * width), floats(out, rows, width)
        for m in range(rows):
            for i in range(first, last):
                s = both[m, i]
                less = -s if s > np.float32(-88) else np.float32(88)  # beyond that, e^88 is practically infinite
                gated[m, i] = s / (np.float32(1) + exp(less)) * both[m, width + i]
        return
    at, own = 0, 0
    while own < end:
        count = matrices[index, 2]
        blocks = (count + ROWS - 1) // ROWS
        first, last = max(begin - own, 0) * ROWS, min((end - own) * ROWS, count)
        if first < last:
            _multiply(_matrix(matrices, index), x, out, first, last, width, at, rows)
            if stage[_PLUS] >= 0:
                added, target = floats(places[stage[_PLUS]], rows, width), floats(out, rows, width)
                for m in range(rows):
                    for i in range(at + first, at + last):
                        target[m, i] += added[m, i]
        own += blocks
        at += count
        index += 1


@inlined
def _normalise(x: Any, weight: Any, constants: Any, out: Any) -> None:
    total, eps, shift = np.float32(0), constants[0], constants[1]
    for c in range(len(x)):
        total += x[c] * x[c]
    scale = np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)
    for c in range(len(x)):
        out[c] = x[c] * scale * (weight[c] + shift)


@inlined
def _rotate(x: Any, cos: Any, sin: Any, channels: Any, turned: Any) -> None:
    for c in range(len(x)):
        at = np.int64(channels[1, c])
        straight = cos[at] if at >= 0 else np.float32(1)
        crossed = sin[at] * channels[2, c] if at >= 0 else np.float32(0)
        turned[c] = x[c] * straight + x[np.int64(channels[0, c])] * crossed
    for c in range(len(x)):
        x[c] = turned[c]


@inlined
def _head(stage: Any, constants: Any, places: Any, rows: Any, head: Any) -> None:
    size, channels, width = stage[_SIZE], stage[_CHANNELS], stage[_ANGLES]
    x, turned, first = floats(places[stage[_X]], rows, stage[_WIDTH]), np.empty(size, np.float32), stage[_FIRST]
    for m in range(rows):
        own = x[m, first + head * size : first + head * size + size]
        if stage[_WEIGHT]:
            _normalise(own, floats(stage[_WEIGHT], size), constants, own)
        if channels:
            cos, sin = floats(places[stage[_COS]], rows, width), floats(places[stage[_SIN]], rows, width)
            _rotate(own, cos[m], sin[m], floats(channels, 3, size), turned)


@inlined
def _blocks(stage: Any, told: Any) -> Any:
    """Return how many blocks a stage has; any thread may do any of them."""
    return told[stage[_PLUS], stage[_BLOCKS]] if stage[_KIND] == _CALLED else stage[_BLOCKS]


@inlined
def _do(stage: Any, constants: Any, matrices: Any, places: Any, told: Any, rows: Any, begin: Any, end: Any) -> None:
    kind, x, out, width = stage[_KIND], places[stage[_X]], places[stage[_OUT]], stage[_WIDTH]
    if kind == _NORM:
        given, normed = floats(x, rows, width), floats(out, rows, width)
        for m in range(rows):
            _normalise(given[m], floats(stage[_WEIGHT], width), constants, normed[m])
    elif kind == _HEADS:
        for head in range(begin, end):
            _head(stage, constants, places, rows, head)
    elif kind == _CALLED:
        for block in range(begin, end):
            call_at(stage[_WEIGHT], (told[stage[_PLUS]].ctypes.data, x, out, block))
    else:
        _rows(stage, matrices, places, places[len(places) - 1], rows, begin, end)


_SHARES = 16  # numbers per stage: two cache lines, one for the shares taken, one for those done
_TURNS = 1024  # of waiting, some microseconds, before others may run


@inlined
def _work(
    stages: Any, matrices: Any, constants: Any, places: Any, told: Any, rows: Any, threads: Any, shares: Any, _: Any
) -> None:
    """Go through all stages, and do the shares that no other thread has taken."""
    for s in range(len(stages)):
        blocks = _blocks(stages[s], told)
        count = min(blocks, threads)
        share = fetch_and_add(shares, s * _SHARES, 1)
        while share < count:
            begin, end = np.int64(share * blocks // count), np.int64((share + 1) * blocks // count)
            _do(stages[s], constants[s], matrices, places, told, rows, begin, end)
            fetch_and_add(shares, s * _SHARES + _SHARES // 2, 1)
            share = fetch_and_add(shares, s * _SHARES, 1)
        turns = 0
        while fetched(shares, s * _SHARES + _SHARES // 2) < count:
            turns += 1
            if turns % _TURNS == 0:
                let_others_run()


@compiled
def _run(stages: Any, matrices: Any, constants: Any, told: Any, given: Any, rows: Any, threads: Any) -> None:
    inputs, results, begins = given
    places = np.empty(len(inputs) + len(begins), np.int64)  # addresses of inputs and results
    for at in range(len(inputs)):
        places[at] = inputs[at]
    for at in range(len(begins)):
        places[len(inputs) + at] = results + 4 * rows * begins[at]
    shares = np.zeros(len(stages) * _SHARES, np.int64)
    for thread in prange(threads):
        _work(stages, matrices, constants, places, told, rows, threads, shares, thread)


_NOTHING_TOLD = np.zeros((0, 0), np.int64)


@compiled
def _over(loop: Any, told: Any, x: Any, out: Any, blocks: Any) -> None:
    for block in prange(blocks):
        call_at(loop, (told.ctypes.data, x, out, block))


def call(loop: int, told: Any, x: Tensor, blocks: int, numbers: int, out: Tensor | None = None) -> None:
    """Call the loop of a `Called` stage for all blocks of x, outside of a chain."""
    use_threads(numbers)
    _over(loop, told, x.data_ptr(), (x if out is None else out).data_ptr(), blocks)


class Chain:
    """Stages, each of which reads one of up to four inputs or the result of an earlier stage, by its name.

    A result of the name of an earlier one, and as wide, takes its place. `returned` results are given back. Weights,
    biases and norms must stay where they are in memory.
    """

    def __init__(self, inputs: Sequence[str], stages: Sequence[Stage], returned: Sequence[str]):
        self._matrices, self._kept = list[Matrix](), list[Any]()
        self._names = [*inputs, *[""] * (_INPUTS - len(inputs))]
        self._held, self._widths = 0, dict[str, int]()  # of results
        self._rows = list[tuple[Any, Any]]()
        for stage in stages:
            self._add(stage)
        self._stages, self._constants = (np.array(rows) for rows in zip(*self._rows, strict=True))
        self._powers = any(matrix.powers for matrix in self._matrices)
        self._numbers = sum(matrix.rows * matrix.columns for matrix in self._matrices)
        begins, self._row = list[int](), 0  # numbers of a row of all results, one after another
        for width in [*self._widths.values(), self._held]:
            begins.append(self._row)
            self._row += -(-width // _LINE) * _LINE
        named = dict(zip(self._widths, begins, strict=False))
        self._begins, self._returned = np.array(begins), [(named[name], self._widths[name]) for name in returned]
        self._loops: dict[int, Any] = {}

    def _add(self, stage: Stage) -> None:
        fields, constants = np.zeros(_FIELDS, np.int64), np.zeros(2, np.float32)
        self._rows.append((fields, constants))
        fields[_X], fields[_PLUS] = self._names.index(stage.x), -1
        fields[_WEIGHT], fields[_BLOCKS] = len(self._matrices), 1
        if isinstance(stage, TurnedHeads):
            fields[_KIND], fields[_FIRST], fields[_BLOCKS], fields[_SIZE] = _HEADS, stage.first, stage.heads, stage.size
            fields[_WIDTH], fields[_ANGLES], fields[_WEIGHT] = self._widths[stage.x], stage.width, 0
            if stage.norm is not None:
                fields[_WEIGHT], constants[:] = self._address(stage.norm[0]), stage.norm[1:]
            if stage.turn is not None:
                fields[_CHANNELS] = self._address(torch.stack([table.float() for table in stage.turn]))
                fields[_COS], fields[_SIN] = self._names.index("cos"), self._names.index("sin")
            return
        if isinstance(stage, Called):
            fields[_KIND], fields[_WEIGHT], fields[_BLOCKS] = _CALLED, stage.loop, stage.blocks
            fields[_PLUS] = stage.told
            fields[_OUT] = fields[_X] if stage.out is None else self._place(stage.out, stage.width)
            return
        if isinstance(stage, Normalised):
            fields[_KIND], width, fields[_WEIGHT] = _NORM, len(stage.weight), self._address(stage.weight)
            constants[:] = stage.eps, stage.shift
        elif isinstance(stage, Products):
            fields[_KIND], width = _PRODUCTS, sum(matrix.rows for matrix in stage.matrices)
            fields[_BLOCKS] = sum(-(-matrix.rows // ROWS) for matrix in stage.matrices)
            self._matrices += stage.matrices
            if stage.plus is not None:
                fields[_PLUS] = self._names.index(stage.plus)
        else:
            fields[_KIND], width = _GATE, stage.gate.rows
            fields[_BLOCKS], self._held = -(-width // ROWS), max(self._held, 2 * width)
            self._matrices += [stage.gate, stage.up]
        fields[_WIDTH], fields[_OUT] = width, self._place(stage.out, width)

    def _place(self, name: str, width: int) -> int:
        """Return where a result of so many numbers a row goes."""
        if name not in self._widths:
            self._names.append(name)
        self._widths[name] = max(width, self._widths.get(name, 0))
        return self._names.index(name)

    def _address(self, table: Tensor) -> int:
        self._kept.append(kept := table.detach().contiguous())
        return kept.data_ptr()

    def __call__(self, *inputs: Tensor, told: Any = _NOTHING_TOLD, numbers: int = 0) -> list[Tensor]:
        """Run, given the inputs [m, ..] in their order; return what is asked for.

        `told` [.., ..] int64 is what `Called` loops are told, which read so many `numbers` besides the weights.
        """
        m = inputs[0].shape[0]
        rows = 1 << (m - 1).bit_length() if self._powers else m
        wide = [x.contiguous() if rows == m else functional.pad(x, (0, 0, 0, rows - m)) for x in inputs]
        matrices = self._loops.get(rows)
        if matrices is None:
            matrices = self._loops[rows] = self._for(rows)
        results = inputs[0].new_empty(rows * self._row)
        places = (*[x.data_ptr() for x in wide], 0, 0, 0)[:_INPUTS]  # so many: the loop is compiled for their number
        threads = use_threads(self._numbers + numbers)
        given = places, results.data_ptr(), self._begins
        _run(self._stages, matrices, self._constants, told, given, rows, threads)
        return [results.as_strided((m, width), (width, 1), rows * begin) for begin, width in self._returned]

    def _for(self, rows: int) -> Any:
        """Return what loops need to know of all weights, for so many rows of x."""
        known = np.zeros((len(self._matrices), 5), np.int64)
        for row, matrix in zip(known, self._matrices, strict=True):
            bias = 0 if matrix.bias is None else matrix.bias.ctypes.data
            row[:] = matrix.loop(rows), matrix.weight.ctypes.data, matrix.rows, matrix.columns, bias
        return known
