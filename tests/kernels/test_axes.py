"""Principal axes and skewed columns against torch's SVD and plain loops in float64."""

import pytest
import torch

from kvcli.kernels.key_bases import (
    centred_moments,
    principal_axes,
    prompt_skew,
    second_moments,
    skew_of,
    strongest_columns,
)

HK, G, D, R, S = 2, 3, 10, 41, 57


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaning(*shape, seed=0):
    """Vectors with a mean and with channels of very different size."""
    return noise(*shape, seed=seed) / torch.arange(1, shape[-1] + 1) @ noise(D, D, seed=9) + 0.5


def orthonormal(axes):
    return torch.allclose(axes.transpose(1, 2) @ axes, torch.eye(axes.shape[-1]).expand_as(axes), atol=1e-5)


@pytest.mark.parametrize("centred", [False, True])
def test_axes_are_the_right_singular_vectors_by_falling_value(centred):
    x = leaning(HK, S, D)
    axes = principal_axes((centred_moments if centred else second_moments)(x))
    assert orthonormal(axes)
    for head in range(HK):
        cloud = x[head].double()
        _, _, vectors = torch.linalg.svd(cloud - cloud.mean(0) if centred else cloud)
        for i in range(D):
            assert abs(float(vectors[i] @ axes[head, :, i].double())) == pytest.approx(1, abs=1e-4)


def test_moments_of_pieces_add_up():
    x = leaning(HK, S, D)
    assert torch.allclose(sum(second_moments(piece) for piece in x.split(13, 1)), second_moments(x), rtol=1e-4)


@pytest.mark.parametrize("n", [1, 3])
def test_fewer_vectors_than_channels_give_a_whole_basis(n):
    assert orthonormal(principal_axes(second_moments(leaning(HK, n, D))))
    assert orthonormal(principal_axes(centred_moments(leaning(HK, n, D))))


def test_a_skew_changes_no_score_and_orders_its_columns():
    q, k = leaning(HK * G, R, D, seed=1), leaning(HK, S, D, seed=2)
    skew = prompt_skew(q, k)
    assert orthonormal(skew)
    for head in range(HK):
        group = q[head * G : head * G + G].reshape(-1, D)
        assert torch.allclose((group @ skew[head]) @ (k[head] @ skew[head]).T, group @ k[head].T, atol=1e-3)
        carried = (group @ skew[head]).norm(dim=0) * (k[head] @ skew[head]).norm(dim=0)
        assert carried.tolist() == sorted(carried.tolist(), reverse=True)
    assert torch.equal(skew, skew_of(second_moments(q.view(HK, -1, D)), second_moments(k)))


@pytest.mark.parametrize("count", [1, 4, D])
def test_the_strongest_columns_are_those_of_the_largest_mean_magnitudes(count):
    q, k = noise(HK * G, R, D, seed=3), 2 * noise(HK, S, D, seed=4)
    skew = prompt_skew(noise(HK * G, R, D, seed=5), k)
    columns = strongest_columns(skew, q, k, count)
    assert columns.shape == (HK, D, count)
    for head in range(HK):
        strength = []
        for c in range(D):
            axis = skew[head, :, c].double()
            of_q = [abs(float(row.double() @ axis)) for h in range(head * G, head * G + G) for row in q[h]]
            of_k = [abs(float(row.double() @ axis)) for row in k[head]]
            strength.append(sum(of_q) / len(of_q) + sum(of_k) / len(of_k))
        best = sorted(range(D), key=lambda c: -strength[c])[:count]
        found = {tuple(column) for column in columns[head].T.tolist()}
        assert found == {tuple(skew[head, :, c].tolist()) for c in best}
