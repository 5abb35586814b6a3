"""Kernels of block retrieval against float64 and against loops."""

import pytest
import torch
from block_oracle import entropy, moments, weighted_probe

from kvcli.kernels.activation_probe import activation_probe
from kvcli.kernels.block_scores import cosine_scores, density, dot_scores
from kvcli.kernels.far_near_attention import Far, far_near_attention, far_near_attention_ref
from kvcli.kernels.moments import merge_moments, moments_of
from kvcli.kernels.softmax import Softmax

H, HK, D = 6, 2, 16


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("m", "n", "f"), [(1, 1, 0), (1, 37, 5), (7, 7, 0), (7, 23, 41), (13, 14, 1)])
def test_far_and_near_attention_match_the_reference(m, n, f, sinks, softcap):
    q, p, k, v = noise(H, m, D), noise(H, m, D, seed=1), noise(HK, n, D), noise(HK, n, D, seed=2)
    far = Far(p, noise(HK, f, D, seed=3), noise(HK, f, D, seed=4))
    softmax = Softmax(0.7, softcap, noise(H) if sinks else None)
    out, mass = far_near_attention(q, k, v, far, softmax)
    exact = softmax._replace(sinks=softmax.sinks.double() if sinks else None)
    expected, expected_mass = far_near_attention_ref(
        q.double(), k.double(), v.double(), Far(*(x.double() for x in far)), exact
    )
    assert torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(mass.double(), expected_mass, rtol=1e-4, atol=1e-5)


def test_far_and_near_reference_is_the_definition():
    m, n, f, scale = 3, 8, 4, 0.5
    q, p, k, v = (
        x.double() for x in (noise(H, m, D), noise(H, m, D, seed=1), noise(HK, n, D), noise(HK, n, D, seed=2))
    )
    far_k, far_v, sinks = noise(HK, f, D, seed=3).double(), noise(HK, f, D, seed=4).double(), noise(H).double()
    out, mass = far_near_attention_ref(q, k, v, Far(p, far_k, far_v), Softmax(scale, None, sinks))
    wanted = torch.zeros(n, dtype=torch.float64)
    for h in range(H):
        kv = h // (H // HK)
        for i in range(m):
            at = n - m + i
            logits = [scale * q[h, i] @ k[kv, j] for j in range(at + 1)]
            logits += [scale * p[h, i] @ far_k[kv, j] for j in range(f)] + [sinks[h]]
            weights = torch.stack(logits).softmax(0)[:-1]
            values = torch.cat((v[kv, : at + 1], far_v[kv]))
            assert torch.allclose(out[h, i], weights @ values)
            wanted[:at] += weights[:at]
    assert torch.allclose(mass, wanted)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_merged_moments_are_those_of_two_passes(offset):
    parts = [noise(n, 11, seed=n) * (1 + n) + offset for n in (1, 7, 1, 64, 3)]
    merged = moments_of(parts[0])
    seen = parts[0]
    for part in parts[1:]:
        merged, seen = merge_moments(merged, moments_of(part)), torch.cat((seen, part))
        mean, variance = moments(seen.double().tolist())
        assert merged.seen == len(seen)
        assert torch.allclose(merged.mean.double(), torch.tensor(mean, dtype=torch.float64), rtol=1e-5, atol=1e-5)
        assert torch.allclose(merged.variance.double(), torch.tensor(variance, dtype=torch.float64), rtol=1e-4)


def test_half_precision_is_summed_in_full():
    assert moments_of(noise(5, 3).bfloat16()).m2.dtype == torch.float32


@pytest.mark.parametrize("n", [1, 2, 9])
def test_probe_weighs_by_distance_from_the_mean(n):
    queries = noise(n, 12)
    mean, variance = moments(queries.double().tolist())
    expected = weighted_probe(queries.double().tolist(), mean, variance)
    probe = activation_probe(queries, moments_of(queries))
    assert torch.allclose(probe.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)


def test_probe_follows_the_outlier():
    queries = 0.01 * noise(50, 12) + 1
    queries[17] = -torch.arange(12.0)
    assert torch.allclose(activation_probe(queries, moments_of(queries)), queries[17], rtol=0.05, atol=0.1)
    assert torch.allclose(queries.mean(0), torch.ones(12), atol=0.3)  # while a plain mean hardly notices it


def test_scores_repeat_keys_for_their_groups():
    probe, keys = noise(H, D), noise(9, HK, D)
    repeated = keys.double().repeat_interleave(H // HK, 1).flatten(1)
    flat = probe.double().flatten()
    assert torch.allclose(dot_scores(probe, keys).double(), repeated @ flat, rtol=1e-4, atol=1e-4)
    expected = torch.nn.functional.cosine_similarity(repeated, flat[None])
    assert torch.allclose(cosine_scores(probe, keys).double(), expected, rtol=1e-4, atol=1e-5)
    assert cosine_scores(probe, 0 * keys).abs().max() == 0
    assert len(dot_scores(probe, keys[:0])) == len(cosine_scores(probe, keys[:0])) == 0


def test_density_is_the_entropy_of_the_softmax():
    scores = noise(13)
    assert float(density(scores)) == pytest.approx(entropy(scores.tolist()), rel=1e-5)
