"""Attention kernels against a float64 softmax over an explicit mask."""

from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from kvcli.kernels import _triton
from kvcli.kernels import block_attention as block
from kvcli.kernels import block_attention as tile_attention
from kvcli.kernels import prefill_attention as prefill
from kvcli.kernels.block_attention import SCORES_AT_ONCE, block_attention, block_attention_ref, merge_blocks
from kvcli.kernels.decode_attention import decode_attention, decode_attention_ref
from kvcli.kernels.prefill_attention import prefill_attention, prefill_attention_ref
from kvcli.kernels.softmax import Softmax

VARIANTS = {
    "plain": (None, False),
    "softcap": (5.0, False),
    "sinks": (None, True),
    "softcap and sinks": (5.0, True),
}


def inputs(heads, kv_heads, m, n, d, dtype=torch.float32, variant="plain"):
    torch.manual_seed(heads * n + d)
    q, k, v = (torch.randn(h, t, d).to(dtype) for h, t in ((heads, m), (kv_heads, n), (kv_heads, n)))
    softcap, sinks = VARIANTS[variant]
    return q, k, v, Softmax(d**-0.5, softcap, torch.randn(heads) if sinks else None)


def explicit(q, k, v, softmax, mask):
    """Attention head by head in float64: q [H, m, d], k and v [Hk, n, d], mask [m, n] -> [H, m, d]."""
    out = []
    for head in range(q.shape[0]):
        kv = head * k.shape[0] // q.shape[0]
        scores = q[head].double() @ k[kv].double().T * softmax.scale
        if softmax.softcap is not None:
            scores = torch.tanh(scores / softmax.softcap) * softmax.softcap
        scores[~mask] = float("-inf")
        if softmax.sinks is not None:
            scores = torch.cat((scores, softmax.sinks[head].double().expand(len(scores), 1)), 1)
        out.append(scores.softmax(1)[:, : k.shape[1]] @ v[kv].double())
    return torch.stack(out)


def relative_rms(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "d"),
    [(6, 2, 1, 16), (4, 4, 37, 64), (8, 1, 130, 80), (14, 2, 65, 128), (4, 2, 32_781, 16)],
)
def test_decode(heads, kv_heads, n, d, variant):
    q, k, v, softmax = inputs(heads, kv_heads, 1, n, d, variant=variant)
    expected = explicit(q, k, v, softmax, torch.ones(1, n, dtype=torch.bool))[:, 0]
    for attend in (decode_attention, decode_attention_ref):
        assert relative_rms(attend(q[:, 0], k, v, softmax), expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_in_half_precision(dtype):
    q, k, v, softmax = inputs(6, 2, 1, 51, 64, dtype)
    expected = explicit(q, k, v, softmax, torch.ones(1, 51, dtype=torch.bool))[:, 0]
    out = decode_attention(q[:, 0], k, v, softmax)
    assert out.dtype == dtype
    assert relative_rms(out, expected) < 1e-2


def test_decode_reads_strided_keys_and_nothing_beyond_them():
    q, k, v, softmax = inputs(6, 2, 1, 20, 16)
    slots = torch.full((29, 2, 16), float("nan"))  # [tokens, Hk, d], poisoned past the 20 valid rows
    slots[:20] = k.transpose(0, 1)
    out = decode_attention(q[:, 0], slots[:20].transpose(0, 1), v, softmax)
    assert torch.equal(out, decode_attention(q[:, 0], k, v, softmax))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [None, 1, 13, 500])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 7), (33, 90), (1, 90), (300, 700)])
def test_prefill(m, n, window, variant):
    q, k, v, softmax = inputs(6, 2, m, n, 16, variant=variant)
    mask = torch.ones(m, n, dtype=torch.bool).tril(n - m)
    if window is not None:
        mask = mask.triu(n - m - window + 1)
    expected = explicit(q, k, v, softmax, mask)
    for attend in (prefill_attention, prefill_attention_ref):
        assert relative_rms(attend(q, k, v, softmax, window), expected) < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("m", [1, 3, 8])
def test_a_few_newest_tokens_read_earlier_ones_by_the_loops(m, variant, monkeypatch):
    """Three rows of two heads are filled up to eight."""
    ran = []
    monkeypatch.setattr(
        prefill, "block_attention", lambda *args, **kinds: ran.append(args) or block_attention(*args, **kinds)
    )
    q, k, v, softmax = inputs(4, 2, m, 3000, 16, variant=variant)
    found = prefill_attention(q, k, v, softmax)
    assert relative_rms(found, prefill_attention_ref(q.double(), k.double(), v.double(), softmax)) < 1e-5
    assert all(args[1].shape[1] == m for args in ran), "only the square on the diagonal"


def test_rows_at_once_change_nothing(monkeypatch):
    q, k, v, softmax = inputs(4, 2, 30, 30, 16, variant="softcap")
    whole = block_attention(q[:2], k, v, softmax, causal=True)
    monkeypatch.setattr("kvcli.kernels.block_attention.SCORES_AT_ONCE", 7 * 2 * 30)
    parts = block_attention(q[:2], k, v, softmax, causal=True)
    assert SCORES_AT_ONCE > 7 * 2 * 30
    for a, b in zip(whole, parts, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cuts", [(0, 40), (0, 11, 40), (0, 11, 12, 31, 40)])
def test_merged_blocks_are_attention_over_their_union(cuts):
    q, k, v, softmax = inputs(2, 2, 5, 40, 16)
    parts = [slice(*ends) for ends in pairwise(cuts)]
    out, lse = merge_blocks(*(block_attention_ref(q, k[:, part], v[:, part], softmax) for part in parts))
    expected, expected_lse = block_attention_ref(q.double(), k, v, softmax)
    assert relative_rms(out, expected) < 1e-5
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5)


def test_powers_of_two():
    assert [block.powers_of_two(n) for n in (0, 1, 12, 37)] == [[], [1], [8, 4], [32, 4, 1]]


class Operators:
    """What torch's operators return, lse of cuDNN's with a dimension more; `calls` names who attended to how much."""

    def __init__(self, softmax):
        self.softmax, self.calls = softmax, []

    def cudnn(self, q, k, v, bias, stats, dropout, causal, debug, *, scale):
        assert stats
        out, lse = self.attend("cudnn", q, k, v, causal, scale)
        return out[None], lse[None, ..., None], None

    def flash(self, q, k, v, dropout, causal, debug, *, scale):
        out, lse = self.attend("flash", q, k, v, causal, scale)
        return out[None], lse[None], None

    def attend(self, name, q, k, v, causal, scale):
        assert scale == self.softmax.scale
        self.calls.append((name, k.shape[2]))
        return block_attention_ref(q[0], k[0], v[0], self.softmax, causal=causal)


@pytest.mark.parametrize(
    ("m", "n", "causal", "with_cudnn", "calls"),
    [
        (8, 47, False, True, [("cudnn", 32), ("cudnn", 8), ("cudnn", 4), ("cudnn", 2), ("flash", 1)]),
        (8, 40, False, True, [("cudnn", 32), ("cudnn", 8)]),
        (8, 15, False, True, [("cudnn", 8), ("flash", 7)]),  # too few keys for plans of short stretches
        (8, 7, False, True, [("flash", 7)]),
        (7, 46, False, True, [("flash", 46)]),  # the last, shorter chunk of a prompt
        (8, 46, False, False, [("flash", 46)]),
        (24, 24, True, True, [("flash", 24)]),
    ],
)
def test_fused_attention_plans_few_shapes(monkeypatch, m, n, causal, with_cudnn, calls):
    q, k, v, softmax = inputs(2, 2, m, n, 16)
    operators = Operators(softmax)
    monkeypatch.setattr(block, "PLANNED_ROWS", 8)
    monkeypatch.setattr(block, "PLANNED_KEYS", 8)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", operators.cudnn)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", operators.flash)
    out, lse = block._fused(q, k, v, softmax.scale, causal, with_cudnn)
    expected, expected_lse = block_attention_ref(q.double(), k, v, softmax, causal=causal)
    assert relative_rms(out, expected) < 1e-5
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5)
    assert operators.calls == calls


@pytest.mark.parametrize("variant", ["plain", "sinks"])
@pytest.mark.parametrize(("m", "n", "window"), [(1, 40, 7), (33, 90, 13), (33, 33, 20), (50, 90, 80), (33, 33, None)])
def test_windows_and_diagonals_of_a_prompt_on_a_gpu(monkeypatch, m, n, window, variant):
    """All query heads in one launch."""
    q, k, v, softmax = inputs(6, 2, m, n, 16, variant=variant)
    launches = []

    def flash(q, k, v, cum_q, cum_k, rows, keys, dropout, causal, debug, *, scale, window_size_left, window_size_right):
        """Aligned at the last row and key, as torch's operator is; [1, tokens, heads, d]."""
        launches.append(q.shape[2])
        assert (rows, keys, causal) == (q.shape[1], k.shape[1], True)
        assert window_size_right == (None if window is None else 0)
        left = n if window is None else window_size_left
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows).triu(keys - rows - left)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        out, lse = block_attention_ref(q, k, v, Softmax(scale), mask)
        return out.transpose(0, 1)[None], lse[None], None, None, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    monkeypatch.setattr(block, "_backend", lambda *_, **__: SDPBackend.FLASH_ATTENTION)
    mask = torch.ones(m, n, dtype=torch.bool).tril(n - m).triu(n - m - (window or n) + 1)
    expected = explicit(q, k, v, softmax, mask)
    assert relative_rms(prefill_attention(q, k, v, softmax, window), expected) < 1e-5
    assert launches == [6]


@pytest.mark.parametrize("variant", ["softcap", "softcap and sinks"])
@pytest.mark.parametrize(
    ("m", "n", "window", "chunked"), [(70, 150, None, False), (70, 150, 40, False), (7, 60, 25, True)]
)
def test_a_device_without_a_fused_kernel_stores_no_scores(monkeypatch, m, n, window, chunked, variant):
    """Neither of a prompt, nor of a block with a mask."""
    monkeypatch.setattr(_triton, "on_cpu", True)
    monkeypatch.setattr(tile_attention, "FEWEST", 1)
    monkeypatch.setattr(block, "attention_scores", lambda *_: pytest.fail("all scores are stored"))
    q, k, v, softmax = inputs(6, 2, m, n, 16, variant=variant)
    seen, query = torch.arange(n), torch.arange(n - m, n)[:, None]
    mask = seen <= query
    if window is not None:
        mask &= seen // window == query // window if chunked else seen > query - window
    expected = explicit(q, k, v, softmax, mask)
    assert relative_rms(prefill_attention(q, k, v, softmax, window, chunked), expected) < 1e-5
    out, _ = block_attention(q[:2], k, v, softmax._replace(sinks=None), mask)
    assert relative_rms(out, explicit(q[:2], k, v, softmax._replace(sinks=None), mask)) < 1e-5


def test_windows_by_the_operators_own_rules(monkeypatch):
    monkeypatch.setattr(block, "_backend", lambda *_, **__: SDPBackend.CUDNN_ATTENTION)
    with FakeTensorMode():
        q, k = (torch.empty(heads, t, 128, dtype=torch.bfloat16) for heads, t in ((8, 1024), (2, 5119)))
        out, lse = block.causal_attention(q, k, k, Softmax(0.1), 4096)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:2], torch.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_fused_operators_by_their_own_rules(causal):
    with FakeTensorMode():  # on arguments and results: nothing is computed
        q, k = (torch.empty(2, t, 128, dtype=torch.bfloat16) for t in (4096, 4096 if causal else 60_000))
        out, lse = block._fused(q, k, k, 0.1, causal, with_cudnn=True)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:2], torch.float32)
