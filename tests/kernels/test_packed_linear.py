"""Packed weights against `gguf`'s own unpacking in float64; the Triton form is in `triton_cases`."""

import copy
from itertools import product

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import nn
from torch.nn import functional

from kvcli.conformance.crossed import crossed
from kvcli.kernels import _numba, packed_linear
from kvcli.kernels.packed_linear import (
    MOST_ROWS,
    PACKINGS,
    PackedWeight,
    gated_with,
    products_with,
    suits_loops,
    unpack_ref,
    unpack_rows,
)

ROWS, COLUMNS = 70, 768
OF_K = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the halves of blocks are that `gguf` does not make: anything else may be any bytes."""


def drawn(name, rows=ROWS, columns=COLUMNS, seed=0):
    """Bytes of a weight, and its numbers in float64."""
    packing, random = PACKINGS[name], np.random.default_rng(seed)
    kind = GGMLQuantizationType[name]
    if name in OF_K:
        blocks = random.integers(0, 256, (rows, columns // packing.size, packing.nbytes), dtype=np.uint8)
        for at in OF_K[name]:
            halves = random.standard_normal((*blocks.shape[:2], 1)).astype(np.float16)
            blocks[..., at : at + 2] = halves.view(np.uint8)
        packed = blocks.reshape(rows, -1)
    else:
        numbers = random.standard_normal((rows, columns)).astype(np.float32)
        packed = quants.quantize(numbers, kind).view(np.uint8).reshape(rows, -1)
    wide = torch.from_numpy(quants.dequantize(packed, kind).astype(np.float64))
    return PackedWeight(torch.from_numpy(packed.copy()), packing, torch.float32), wide


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.fixture(params=["loops", "torch"])
def by(request, monkeypatch):
    """Who multiplies: loops, for which nothing is too small, or functions of torch."""
    if request.param == "loops":
        if _numba.numba is None:
            pytest.skip("numba is not there")
        monkeypatch.setattr(_numba, "LEAST", 1)
    else:
        monkeypatch.setattr(_numba, "LEAST", 1 << 60)
    return request.param


@pytest.mark.parametrize("name", PACKINGS)
def test_sizes_are_those_of_the_format(name):
    assert PACKINGS[name][1:3] == GGML_QUANT_SIZES[GGMLQuantizationType[name]]


@pytest.mark.parametrize("name", PACKINGS)
def test_unpacked_numbers_are_exactly_those_of_the_format(name, by):
    weight, wide = drawn(name)
    assert torch.equal(unpack_ref(weight.packed, weight.packing).double(), wide)
    out = torch.full(wide.shape, torch.nan)
    assert torch.equal(unpack_rows(weight.packed, weight.packing, out).double(), wide)
    assert torch.equal(weight.unpack(), wide.float())


@pytest.mark.skipif(_numba.numba is None, reason="numba is not there")
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "MXFP4"])
def test_numbers_are_the_same_without_look_ups_in_registers(name, monkeypatch):
    """As on a processor without AVX-512. These loops are not kept, since others would take them for their own."""
    monkeypatch.setattr(_numba, "LEAST", 1)
    monkeypatch.setattr(packed_linear, "permutes", lambda: False)
    monkeypatch.setattr(packed_linear, "compiled", _numba.numba.njit(parallel=True))
    monkeypatch.setattr(packed_linear, "_unpacking", packed_linear._unpacking.__wrapped__)
    weight, wide = drawn(name)
    out = torch.full(wide.shape, torch.nan)
    assert torch.equal(unpack_rows(weight.packed, weight.packing, out).double(), wide)


HELD_BELOW = ("Q4_0", "Q4_1", "Q6_K", "Q8_0")  # with several rows: their loops are compiled for so many
SEVERAL = [3, MOST_ROWS, MOST_ROWS + 3, 2 * MOST_ROWS + 1]
SEVERAL_ROWS = crossed([name for name in PACKINGS if name not in HELD_BELOW], SEVERAL, turns=4)
SEVERAL_ROWS += [pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in product(HELD_BELOW, SEVERAL)]


@pytest.mark.parametrize(("name", "rows"), [*((name, 1) for name in PACKINGS), *SEVERAL_ROWS])
def test_products_are_those_of_the_numbers(name, rows, by):
    weight, wide = drawn(name)
    x, bias = noise(rows, COLUMNS), noise(ROWS, seed=1)
    assert error(functional.linear(x, weight), x.double() @ wide.T) < 1e-6
    assert error(functional.linear(x[None], weight, bias)[0], x.double() @ wide.T + bias) < 1e-6
    found = functional.linear(x.bfloat16(), weight)
    assert found.dtype == torch.bfloat16
    assert error(found, x.bfloat16().double() @ wide.T) < 1e-2


@pytest.mark.skipif(_numba.numba is None, reason="numba is not there")
@pytest.mark.parametrize("name", [name for name in PACKINGS if name not in HELD_BELOW])
def test_a_row_alone_has_the_products_that_it_has_beside_others(name, monkeypatch):
    """Loops for one row and for several add in one order, and round every product as often."""
    monkeypatch.setattr(_numba, "LEAST", 1)
    weight, _ = drawn(name)
    x = noise(3, COLUMNS)
    assert torch.equal(functional.linear(x[:1], weight), functional.linear(x, weight)[:1])


@pytest.mark.skipif(_numba.numba is None, reason="numba is not there")
@pytest.mark.parametrize("name", PACKINGS)
def test_products_are_added_in_the_order_that_is_written(name, monkeypatch):
    """A compiler that may reorder sums would make another number of them whenever a loop changes."""
    monkeypatch.setattr(_numba, "LEAST", 1)
    weight, wide = drawn(name)
    x = torch.randint(-64, 65, (1, COLUMNS), generator=torch.Generator().manual_seed(0)) / 16
    sums = torch.zeros(ROWS, 4, 16)
    for at in range(0, COLUMNS, 16):
        part = sums[:, at // 16 % 4]
        part.copy_((wide[:, at : at + 16] * x[:, at : at + 16].double() + part.double()).float())
    total = sums[:, 0] + sums[:, 1] + sums[:, 2] + sums[:, 3]
    for half in (8, 4, 2, 1):
        total = total[:, :half] + total[:, half : 2 * half]
    assert torch.equal(functional.linear(x.float(), weight), total.T)


@pytest.mark.skipif(_numba.numba is None, reason="numba is not there")
@pytest.mark.parametrize("name", ["Q4_1", "Q4_K"])
def test_how_many_rows_are_multiplied_at_once_changes_no_number(name, monkeypatch):
    """One by one as on a processor with few registers, and several."""
    monkeypatch.setattr(_numba, "LEAST", 1)
    weight, _ = drawn(name)
    x, found = noise(1, COLUMNS), []
    for wide in (True, False):
        monkeypatch.setattr(packed_linear, "has_wide_registers", lambda wide=wide: wide)
        monkeypatch.setattr(packed_linear, "_multiplying", packed_linear._multiplying.__wrapped__)
        found.append(products_with([weight])(x))
        monkeypatch.undo()
        monkeypatch.setattr(_numba, "LEAST", 1)
    assert torch.equal(*found)


def test_loops_are_for_whole_lots(monkeypatch):
    monkeypatch.setattr(_numba, "LEAST", 1)
    weight, wide = drawn("F16", columns=40)
    assert not suits_loops(weight)
    x = noise(2, 40)
    assert error(functional.linear(x, weight), x.double() @ wide.T) < 1e-6


@pytest.mark.skipif(_numba.numba is None, reason="numba is not there")
@pytest.mark.parametrize("rows", [1, 5])
def test_several_weights_are_read_in_one_go(rows):
    weights = [drawn(name, size) for name, size in (("Q4_0", 70), ("Q4_0", 33), ("Q6_K", 5), ("Q8_0", 64))]
    x = noise(rows, COLUMNS)
    wanted = torch.cat([x.double() @ wide.T for _, wide in weights], -1)
    assert error(products_with([weight for weight, _ in weights])(x), wanted) < 1e-6


@pytest.mark.skipif(_numba.numba is None, reason="numba is not there")
def test_a_gate_is_applied_where_its_products_are_made():
    (gate, wide), (up, other) = drawn("Q5_1", seed=1), drawn("Q5_1", seed=2)
    x = noise(3, COLUMNS)
    gates = x.double() @ wide.T
    wanted = functional.silu(gates) * (x.double() @ other.T)
    assert error(gated_with(gate, up)(x), wanted) < 1e-6
    assert torch.equal(gated_with(gate, up)(-1e4 * x).isnan(), torch.zeros(3, ROWS, dtype=torch.bool))


def test_many_rows_are_multiplied_by_tiles(by, monkeypatch):
    monkeypatch.setattr(packed_linear, "TILE", 32 * COLUMNS)
    weight, wide = drawn("Q5_K", 100)
    x = noise(20, COLUMNS)
    assert error(functional.linear(x, weight), x.double() @ wide.T) < 1e-6


def test_gradients_reach_the_input(by):
    weight, wide = drawn("Q4_0")
    x = noise(2, COLUMNS).requires_grad_()
    functional.linear(x, weight).sum().backward()
    assert error(x.grad, wide.sum(0).expand(2, -1)) < 1e-6


def test_what_is_no_number_stays_so(by):
    weight, wide = drawn("Q8_0", 40)
    weight.packed[3, :2] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # a scale
    x = noise(2, COLUMNS)
    x[1, 5] = torch.inf
    found = functional.linear(x, weight)
    assert found[:, 3].isnan().all()
    assert not found[1].isfinite().any()
    rest = [row for row in range(40) if row != 3]
    assert error(found[0, rest], x[0].double() @ wide[rest].T) < 1e-6


def test_to_torch_it_is_a_weight(by):
    weight, wide = drawn("Q4_1")
    assert (tuple(weight.shape), weight.dtype, weight.is_floating_point()) == ((ROWS, COLUMNS), torch.float32, True)
    assert weight.nbytes == weight.packed.nbytes == ROWS * COLUMNS // 32 * 20
    linear = nn.Linear(COLUMNS, ROWS, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    assert isinstance(linear.weight, PackedWeight)
    x = noise(4, COLUMNS)
    with torch.inference_mode():
        assert error(linear(x), x.double() @ wide.T) < 1e-6
        assert error(copy.deepcopy(linear).to(torch.bfloat16)(x.bfloat16()), x.double() @ wide.T) < 1e-2
    assert torch.equal(weight[2:5].double(), wide[2:5])
    assert torch.equal((weight + 1).double(), wide.float().add(1).double())
    assert "Q4_1" in repr(weight)


def test_rows_are_looked_up(by):
    weight, wide = drawn("Q6_K")
    table = nn.Embedding(ROWS, COLUMNS, device="meta")
    table.weight = nn.Parameter(weight, requires_grad=False)
    ids = torch.tensor([[3, 0, ROWS - 1], [3, 5, 5]])
    assert torch.equal(table(ids).double(), wide[ids])


def test_a_row_is_whole_blocks():
    with pytest.raises(ValueError, match="no whole number"):
        PACKINGS["Q4_K"].row_bytes(128)


@pytest.mark.parametrize("name", PACKINGS)
def test_rows_by_field_have_the_same_numbers(name):
    """Loops leave them alone; several matrices, and one of them, are laid out alike."""
    weight, wide = drawn(name)
    moved = weight.laid_out(by_field=True)
    assert moved.packing.by_field == (PACKINGS[name].size > 1)
    assert not (moved.packing.by_field and suits_loops(moved))
    assert torch.equal(moved.unpack(), wide.float())
    assert torch.equal(moved.laid_out(by_field=False).packed, weight.packed)
    x = noise(3, COLUMNS)
    assert error(functional.linear(x, moved), x.double() @ wide.T) < 1e-6
    several = PackedWeight(torch.stack((weight.packed, weight.packed.flip(0))), weight.packing, torch.float32)
    for each in (several, several.laid_out(by_field=True)):
        assert torch.equal(each[1].unpack(), wide.flip(0).float())
        assert torch.equal(each.unpack(), torch.stack((wide, wide.flip(0))).float())
