"""Blocks of quantised pages: bounds of the error, bytes, and numbers that strain them."""

import pytest
import torch

from kvcli.kernels.quant import BlockFormat

SHAPES = [(2, 32, 128), (1, 8, 64), (2, 1, 80), (2, 1, 18)]
FORMATS = [BlockFormat.of(held, *shape) for held in ("int8", "k8v4", "int4") for shape in SHAPES]


def through(form, parts, dtype=torch.float32):
    blocks = torch.empty(len(parts[0]), form.bytes, dtype=torch.uint8)
    form.quantise(parts, blocks)
    out = torch.full((len(blocks), form.parts, form.size, form.d), float("nan"), dtype=dtype)
    form.dequantise(blocks, out)
    return out


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_no_number_is_further_off_than_half_a_step_of_its_group(form):
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(5, form.size, form.d, generator=generator) * 3 + 7 for _ in range(form.parts)]
    parts[0][..., 5] *= 50  # a channel that is large in every token
    for part, (x, y) in enumerate(zip(parts, through(form, parts).unbind(1), strict=True)):
        grouped = form.grouped(x, part)
        step = (grouped.amax((-3, -1), keepdim=True) - grouped.amin((-3, -1), keepdim=True)) / (
            2 ** form.bits[part] - 1
        )
        rounded = 2**-11 * x.abs().max()  # of a scale and a zero in fp16
        assert ((form.grouped(y, part) - grouped).abs() <= 0.5 * step + 2 * rounded).all()
        assert torch.equal(form.rounded(x, part), y)


@pytest.mark.parametrize("held", ["k8v4", "int4"])
def test_a_large_channel_of_values_in_4_bits_costs_only_those_next_to_it(held):
    form, x = BlockFormat.of(held, 2, 8, 256), torch.randn(5, 8, 256, generator=torch.Generator().manual_seed(1))
    x[..., 5] *= 50
    off = (form.rounded(x, 1) - x).abs().amax((0, 1))
    assert off[32:].max() < 0.3  # half a step of 32 numbers of a normal distribution
    assert off[:32].max() > 1


def test_bytes_of_a_page_of_the_8b_shape():
    assert BlockFormat.of("auto", 2, 32, 128) is None
    assert BlockFormat.of("int8", 2, 32, 128).bytes == 2 * 4096 + 128 * 4 + 32 * 4
    assert BlockFormat.of("int4", 2, 32, 128).bytes == 2 * 2048 + 128 * 4 + 4 * 32 * 4
    assert BlockFormat.of("k8v4", 2, 32, 128).bytes == 4096 + 2048 + 128 * 4 + 4 * 32 * 4
    assert BlockFormat.of("k8v4", 1, 32, 128) == BlockFormat.of("int4", 1, 32, 128)
    assert BlockFormat.of("int8", 2, 1, 128).bytes == 288
    assert BlockFormat.of("k8v4", 2, 1, 18).scales_at == 18 + 9 + 1
    assert all(form.bytes % 16 == 0 for form in FORMATS)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_equal_numbers_and_large_ones_come_back_and_no_number_stays_none(form):
    flat = torch.full((1, form.size, form.d), 0.1)
    assert torch.allclose(through(form, [flat] * form.parts), flat, rtol=1e-3)
    large = torch.full_like(flat, 1e6)
    large[..., :1] = -1e6
    assert through(form, [large] * form.parts).abs().max() <= 1.001 * 65504
    none = flat.clone()
    none[0, 0, 0] = float("nan")
    assert through(form, [none] * form.parts, torch.bfloat16)[0, :, 0, 0].isnan().all()
