"""Landmarks, outliers and scores of chunks against loops in float64."""

import math

import pytest
import torch

from kvcli.methods.shadowkv.cache import chunk_landmarks, landmark_scores, outlier_chunks

HK, G, D, N, C = 2, 3, 6, 7, 5
SCALE = 0.3


def keys(seed=0):
    return torch.randn(HK, N, C, D, generator=torch.Generator().manual_seed(seed))


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_landmark_is_the_mean_and_fit_the_smallest_cosine(dtype):
    k = keys().to(dtype)
    landmarks, fit = chunk_landmarks(k)
    assert landmarks.dtype == fit.dtype == torch.float32
    for head in range(HK):
        for chunk in range(N):
            tokens = k[head, chunk].double().tolist()
            mean = [sum(column) / C for column in zip(*tokens, strict=True)]
            cosines = [dot(mean, token) / math.hypot(*mean) / math.hypot(*token) for token in tokens]
            assert landmarks[head, chunk].tolist() == pytest.approx(mean, rel=1e-5, abs=1e-6)
            assert float(fit[head, chunk]) == pytest.approx(min(cosines), rel=1e-4, abs=1e-6)


def test_keys_that_are_zero_make_no_nan():
    landmarks, fit = chunk_landmarks(torch.zeros(HK, N, C, D))
    assert torch.equal(fit, torch.zeros(HK, N))
    assert torch.equal(landmarks, torch.zeros(HK, N, D))


@pytest.mark.parametrize("count", [0, 1, 3, N])
def test_outliers_fit_worst_and_of_equals_are_the_lower(count):
    fit = torch.tensor([[0.9, 0.1, 0.5, 0.5, 0.9, 0.1, 0.5], [0.2] * N])
    found = outlier_chunks(fit, count)
    assert found.shape == (HK, count)
    for row, chunks in zip(fit.tolist(), found.tolist(), strict=True):
        assert sorted(chunks) == sorted(sorted(range(N), key=lambda j: (row[j], j))[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_the_largest_weight_over_the_group_without_outliers(dtype):
    landmarks = 2 * keys(1)[:, :, 0].to(dtype)
    q = torch.randn(HK * G, D, generator=torch.Generator().manual_seed(2)).to(dtype)
    excluded = torch.zeros(HK, N, dtype=torch.bool)
    excluded[0, [1, 4]] = excluded[1, 6] = True
    found = landmark_scores(q, landmarks, excluded, SCALE)
    for head in range(HK):
        candidates = [j for j in range(N) if not excluded[head, j]]
        best = dict.fromkeys(range(N), -1.0)
        for query in q[head * G : head * G + G].double().tolist():
            exps = {j: math.exp(SCALE * dot(query, landmarks[head, j].double().tolist())) for j in candidates}
            for j in candidates:
                best[j] = max(best[j], exps[j] / sum(exps.values()))
        assert found[head].tolist() == pytest.approx(list(best.values()), rel=1e-4)
