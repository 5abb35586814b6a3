"""Linear layers one after another on a CPU, for a few rows, in one loop: norms, products, gates and sums.

    norm       y_c = x_c / sqrt(mean_c x_c^2 + eps) * (w_c + shift)
    products   y_i = W_i . x + b_i + z_i          of several weights at once; b and z where there are any
    gate       y_i = silu(W_i . x) * V_i . x

A step reads every weight once. What stands between two products takes a thousandth of their time, and to start a loop
from Python some hundred times longer than that: so a whole chain is one call, and its threads meet at each product.

A weight's own loop multiplies some of its rows, in any format: `kvcli.kernels.gemv` and `kvcli.kernels.packed_linear`
have them. They are called by their addresses, so that the loop here is compiled once for all formats.

Shapes: x [m, in] fp32, W [out, in]; m is a few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels._llvm import at_address, call_at, exp
from kvcli.kernels._numba import compiled, compiled_at, inlined, prange, use_threads

ROWS = 32  # rows of a weight per thread at once
_LINE = 16  # numbers of a cache line
_INPUTS = 3  # at most


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


Stage = Normalised | Products | Gate | TurnedHeads
_NORM, _PRODUCTS, _GATE, _HEADS = range(4)

# What a stage is to the loop: numbers, places among the inputs and results, and addresses of what does not move.
_KIND, _X, _OUT, _PLUS, _WEIGHT, _BLOCKS, _WIDTH, _SIZE, _CHANNELS, _ANGLES, _COS, _SIN, _FIELDS = range(13)


@inlined
def floats(place: Any, *shape: Any) -> Any:
    """View fp32 numbers at an address."""
    return at_address(place, np.float32(0), shape)


def loop_of_rows(function: Callable[..., None]) -> int:
    """Compile the loop of a weight, and return its address.

    It gets the addresses of weight, x and out, the first and last of the weight's rows, those of its columns and of a
    row of `out`, the column of `out` for the weight's first row, and the rows of x.
    """
    return compiled_at(function, 9)


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
def _block(stage: Any, matrices: Any, places: Any, held: Any, rows: Any, block: Any) -> None:
    """Do the part of a stage that belongs to one thread: some rows of a weight."""
    x, out, index, width = places[stage[_X]], places[stage[_OUT]], stage[_WEIGHT], stage[_WIDTH]
    if stage[_KIND] == _GATE:
        first, last = block * ROWS, min(block * ROWS + ROWS, width)
        _multiply(_matrix(matrices, index), x, held, first, last, 2 * width, 0, rows)
        _multiply(_matrix(matrices, index + 1), x, held, first, last, 2 * width, width, rows)
        both, gated = floats(held, rows, 2 * width), floats(out, rows, width)
        for m in range(rows):
            for i in range(first, last):
                s = both[m, i]
                less = -s if s > np.float32(-88) else np.float32(88)  # beyond that, e^88 is practically infinite
                gated[m, i] = s / (np.float32(1) + exp(less)) * both[m, width + i]
        return
    at = 0
    while block >= (matrices[index, 2] + ROWS - 1) // ROWS:
        block -= (matrices[index, 2] + ROWS - 1) // ROWS
        at += matrices[index, 2]
        index += 1
    first, last = block * ROWS, min(block * ROWS + ROWS, matrices[index, 2])
    _multiply(_matrix(matrices, index), x, out, first, last, width, at, rows)
    if stage[_PLUS] >= 0:
        added, target = floats(places[stage[_PLUS]], rows, width), floats(out, rows, width)
        for m in range(rows):
            for i in range(at + first, at + last):
                target[m, i] += added[m, i]


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
def _heads(stage: Any, constants: Any, places: Any, rows: Any) -> None:
    first, size, channels, width = stage[_OUT], stage[_SIZE], stage[_CHANNELS], stage[_ANGLES]
    x, turned = floats(places[stage[_X]], rows, stage[_WIDTH]), np.empty(size, np.float32)
    for m in range(rows):
        for h in range(stage[_BLOCKS]):
            own = x[m, first + h * size : first + h * size + size]
            if stage[_WEIGHT]:
                _normalise(own, floats(stage[_WEIGHT], size), constants, own)
            if channels:
                cos, sin = floats(places[stage[_COS]], rows, width), floats(places[stage[_SIN]], rows, width)
                _rotate(own, cos[m], sin[m], floats(channels, 3, size), turned)


@compiled
def _run(stages: Any, matrices: Any, constants: Any, begins: Any, inputs: Any, results: Any, rows: Any) -> None:
    places = np.empty(len(inputs) + len(begins), np.int64)  # addresses of inputs and results
    for at in range(len(inputs)):
        places[at] = inputs[at]
    for at in range(len(begins)):
        places[len(inputs) + at] = results + 4 * rows * begins[at]
    held = places[len(places) - 1]
    for s in range(len(stages)):
        stage = stages[s]
        if stage[_KIND] == _NORM:
            x, out = floats(places[stage[_X]], rows, stage[_WIDTH]), floats(places[stage[_OUT]], rows, stage[_WIDTH])
            for m in range(rows):
                _normalise(x[m], floats(stage[_WEIGHT], stage[_WIDTH]), constants[s], out[m])
        elif stage[_KIND] == _HEADS:
            _heads(stage, constants[s], places, rows)
        else:
            for block in prange(stage[_BLOCKS]):
                _block(stage, matrices, places, held, rows, np.int64(block))


class Chain:
    """Stages, each of which reads one of up to three inputs or the result of an earlier stage, by its name.

    `returned` results are given back. Weights, biases and norms must stay where they are in memory.
    """

    def __init__(self, inputs: Sequence[str], stages: Sequence[Stage], returned: Sequence[str]):
        self._matrices, self._kept = list[Matrix](), list[Any]()
        self._stages = np.zeros((len(stages), _FIELDS), np.int64)
        self._constants = np.zeros((len(stages), 2), np.float32)
        self._held, self._widths = 0, dict[str, int]()  # of results
        self._names = [*inputs, *[""] * (_INPUTS - len(inputs))]
        for at, stage in enumerate(stages):
            self._add(self._stages[at], self._constants[at], stage)
        self._powers = any(matrix.powers for matrix in self._matrices)
        self._numbers = sum(matrix.rows * matrix.columns for matrix in self._matrices)
        begins, self._row = list[int](), 0  # numbers of a row of all results, one after another
        for width in [*self._widths.values(), self._held]:
            begins.append(self._row)
            self._row += -(-width // _LINE) * _LINE
        named = dict(zip(self._widths, begins, strict=False))
        self._begins, self._returned = np.array(begins), [(named[name], self._widths[name]) for name in returned]
        self._loops: dict[int, Any] = {}

    def _add(self, fields: Any, constants: Any, stage: Stage) -> None:
        fields[_X], fields[_OUT], fields[_PLUS] = self._names.index(stage.x), len(self._names), -1
        fields[_WEIGHT] = len(self._matrices)
        if isinstance(stage, TurnedHeads):
            fields[_KIND], fields[_OUT], fields[_BLOCKS], fields[_SIZE] = _HEADS, stage.first, stage.heads, stage.size
            fields[_WIDTH], fields[_ANGLES], fields[_WEIGHT] = self._widths[stage.x], stage.width, 0
            if stage.norm is not None:
                fields[_WEIGHT], constants[:] = self._address(stage.norm[0]), stage.norm[1:]
            if stage.turn is not None:
                fields[_CHANNELS] = self._address(torch.stack([table.float() for table in stage.turn]))
                fields[_COS], fields[_SIN] = self._names.index("cos"), self._names.index("sin")
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
        fields[_WIDTH] = self._widths[stage.out] = width
        self._names.append(stage.out)

    def _address(self, table: Tensor) -> int:
        self._kept.append(kept := table.detach().contiguous())
        return kept.data_ptr()

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Run, given the inputs [m, ..] in their order; return what is asked for [m, ..]."""
        m = inputs[0].shape[0]
        rows = 1 << (m - 1).bit_length() if self._powers else m
        given = [x.contiguous() if rows == m else functional.pad(x, (0, 0, 0, rows - m)) for x in inputs]
        matrices = self._loops.get(rows)
        if matrices is None:
            matrices = self._loops[rows] = self._for(rows)
        results = inputs[0].new_empty(rows * self._row)
        places = (*[x.data_ptr() for x in given], 0, 0)[:_INPUTS]  # so many: the loop is compiled for their number
        use_threads(self._numbers)
        _run(self._stages, matrices, self._constants, self._begins, places, results.data_ptr(), rows)
        return [results.as_strided((m, width), (width, 1), rows * begin) for begin, width in self._returned]

    def _for(self, rows: int) -> Any:
        """Return what loops need to know of all weights, for so many rows of x."""
        known = np.zeros((len(self._matrices), 5), np.int64)
        for row, matrix in zip(known, self._matrices, strict=True):
            bias = 0 if matrix.bias is None else matrix.bias.ctypes.data
            row[:] = matrix.loop(rows), matrix.weight.ctypes.data, matrix.rows, matrix.columns, bias
        return known
