"""Clusters by direction: those that are there are found, and sums are those of their members."""

import torch

from kvcli.methods.retroinfer.kernels import cluster_sums, spherical_kmeans


def test_bundles_of_directions_are_found_whatever_the_lengths():
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(2, 8, 8, generator=generator))[0][:, :4]
    axes = torch.cat((axes, -axes), 1)  # so that their mean is zero
    own = torch.arange(8).repeat_interleave(16)  # so that one begins in each
    length = 1 + torch.rand(2, 128, 1, generator=generator)
    keys = length * (axes[:, own] + 0.05 * torch.randn(2, 128, 8, generator=generator))
    found = spherical_kmeans(keys + 3, 8, 10)
    for head in found:
        together = head[:, None] == head
        assert torch.equal(together, own[:, None] == own)


def test_more_clusters_than_directions_leave_some_empty_and_sums_are_those_of_members():
    keys = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [-2.0, 0.0]]])
    found = spherical_kmeans(keys, 4, 3)
    assert len(found.unique()) == 2
    assert found[0, 0] == found[0, 1] != found[0, 2] == found[0, 3]
    sums = cluster_sums(keys, found, 4)[0]
    assert sums[found[0, 0]].tolist() == [3, 0]
    assert sums[found[0, 2]].tolist() == [-3, 0]
    assert sums.abs().sum() == 6
