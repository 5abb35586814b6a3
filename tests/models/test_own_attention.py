"""What is noted of modules that attend themselves, and what is refused."""

import math

import pytest
import torch
from torch.nn.functional import dropout, softmax

from kvcli.models.own_attention import BIAS_CHANNELS, mask_marker, run_noted

B, H, N, D, LATER = 2, 3, 5, 4, 7  # the tokens come after others


def mask():
    return mask_marker(batch_size=B, q_length=N, kv_length=N)


def attending(scored=lambda scores, given: scores + given["attention_mask"], keys=lambda k: k.transpose(-1, -2)):
    """A module's forward: `scored` is what it does to its scores."""

    def forward(q, k, v, cache, **given):
        k, v = cache.update(k, v, 0)
        weights = softmax(scored(torch.matmul(q, keys(k)) / math.sqrt(D), given), dim=-1)
        return dropout(weights, 0.5, training=False) @ v, weights

    return forward


def noted(forward, **given):
    """Run it; return its output, and what reached the attention."""
    seen = []

    def attend(q, k, v, scale):
        seen.append((q, k, v, scale))
        return v.transpose(1, 2)

    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, H, N, D)
    positions = torch.arange(LATER, LATER + N).expand(B, -1)
    given = {"attention_mask": mask(), **given}
    return run_noted(forward, "cache", {"q": q, "k": k, "v": v, **given}, positions, attend), seen, (q, k, v)


def test_queries_keys_values_and_scale_are_noted():
    (out, weights), [(q, k, v, scale)], given = noted(
        attending(lambda scores, given: given["attention_mask"] + 2 * scores)
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in zip((q, k, v), given, strict=True))
    assert scale == pytest.approx(2 / math.sqrt(D))
    assert torch.equal(out, v)
    assert weights is None


@pytest.mark.parametrize("shape", [(H, 1, -1), (1, H, 1, -1)])
def test_a_bias_of_keys_is_scored_by_channels_of_them(shape):
    slopes = torch.tensor([0.5, 0.3, 0.007])
    bias = (slopes[:, None] * torch.arange(LATER + N)).view(shape)

    def biased(scores, given):
        return (scores + given["alibi"][..., -N:] + given["attention_mask"]) * 3

    _, [(q, k, _v, scale)], (plain_q, plain_k, _) = noted(attending(biased), alibi=bias)
    assert k.shape[-1] == D + BIAS_CHANNELS
    expected = 3 * (plain_q @ plain_k.mT / math.sqrt(D) + bias.view(H, 1, -1)[..., -N:])
    assert torch.allclose(scale * (q @ k.mT), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (attending(lambda scores, given: scores), "no causal mask"),
        (attending(lambda scores, given: scores + given["attention_mask"] + torch.ones(N)), "runs"),
        (attending(lambda scores, given: scores * torch.ones(N) + given["attention_mask"]), "runs"),
        (attending(lambda scores, given: (scores + given["attention_mask"]).tanh()), "runs tanh on its scores"),
        (attending(lambda scores, given: scores.max(-1, keepdim=True)[0] + given["attention_mask"]), "runs max"),
        (attending(keys=lambda k: k.mT.softmax(-1)), "runs softmax on its keys"),
        (attending(keys=lambda k: (k + 1).mT), "on its keys"),
    ],
)
def test_whatever_is_not_understood_is_an_error(forward, words):
    with pytest.raises(ValueError, match=words):
        noted(forward)


@pytest.mark.parametrize("given", [{"allow_is_bidirectional_skip": True}, {"local_size": 4}])
def test_a_mask_of_another_kind_is_an_error(given):
    with pytest.raises(ValueError, match="its scores and mask of"):
        noted(attending(), attention_mask=mask_marker(B, N, N, allow_is_causal_skip=False, **given))


def test_a_bias_that_differs_within_a_kv_head_is_an_error():
    def forward(q, k, v, cache, attention_mask, alibi):
        k, v = cache.update(k[:, :1], v[:, :1], 0)
        return softmax(q @ k.transpose(2, 3) + alibi + attention_mask, -1) @ v

    with pytest.raises(ValueError, match="one KV head"):
        noted(forward, alibi=torch.ones(H, 1, LATER + N))
