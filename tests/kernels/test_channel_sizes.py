"""Sizes of channels: what rounding loses with them and without, and what they are measured by."""

import torch

from kvcli.kernels.quant import TOKENS, BlockFormat, channel_sizes

HK, D, N = 2, 64, 3000


def turned(theta=500.0, seed=0):
    """Keys [Hk, n, d] that RoPE has turned: a few pairs of channels are large in every token, one of them slowly so."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(HK, N, D, generator=generator)
    k[..., [3, 22]] += 40
    angles = torch.arange(N)[:, None] * theta ** (-torch.arange(D // 2) / (D // 2))
    low, high = k.chunk(2, -1)
    return torch.cat((low * angles.cos() - high * angles.sin(), low * angles.sin() + high * angles.cos()), -1)


def error(k, sizes):
    """How far keys are off for queries that ask the small channels as much as the large ones."""
    form = BlockFormat.of("int4", 2, 1, D)
    rounded = form.rounded(k[:, :, None], sizes=None if sizes is None else sizes[:, None, None])[:, :, 0]
    return ((rounded - k) / channel_sizes(k)[:, None]).square().mean().sqrt()


def test_small_channels_survive_beside_large_ones():
    k = turned()
    assert error(k, channel_sizes(k)) < 0.3 * error(k, None)


def test_a_channel_that_becomes_large_later_has_the_size_of_its_pair():
    """Sizes channel by channel, of the first tokens, would be too small for what turns into them."""
    k = turned(theta=5e4)
    sizes = channel_sizes(k)
    assert torch.equal(sizes[:, : D // 2], sizes[:, D // 2 :])
    alone = torch.exp2(k[:, :TOKENS].abs().mean(1).log2().round())
    assert error(k[:, TOKENS:], sizes) < 0.7 * error(k[:, TOKENS:], alone)


def test_only_the_first_tokens_count():
    k = turned()
    assert torch.equal(channel_sizes(k), channel_sizes(torch.cat((k[:, :TOKENS], 100 * k), 1)))


def test_sizes_are_powers_of_two_and_never_nothing():
    k = turned()
    k[0], k[1, :, 5] = 0, 0
    sizes = channel_sizes(k.to(torch.bfloat16))
    assert sizes.dtype == torch.float32
    assert torch.equal(torch.exp2(sizes.log2().round()), sizes)
    assert (sizes > 0).all()
    assert sizes[1, 5] > sizes[1].mean() / 100
