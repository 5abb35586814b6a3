"""StreamingLLM against attention over an explicit list of tokens, at explicit positions."""

import pytest
import torch
from driver import HK, SOFTMAX, D, H, Stream, layers
from engine import new_method, run
from families import VOCAB, tiny_model

from kvcli.models.rope import installed
from kvcli.runtime.attention_hook import attached

SINK, BUDGET = 3, 20


def test_holds_sinks_and_the_last_tokens():
    stream = Stream(15, steps=60)
    for step, _, out in stream.run("streaming", {"budget": BUDGET, "sink": SINK}):
        length = stream.prompt + step + 1
        held = list(range(length))
        if length > BUDGET:
            held = [*range(SINK), *range(length - (BUDGET - SINK), length)]
        k, v = stream.k[:, held].double(), stream.v[:, held].double()
        q = stream.q[step].double().view(k.shape[0], -1, D)
        expected = torch.einsum("hgn,hnd->hgd", (torch.einsum("hgd,hnd->hgn", q, k) * D**-0.5).softmax(-1), v)
        assert torch.allclose(out.double(), expected.reshape(out.shape), rtol=1e-4, atol=1e-5), f"step {step}"


def test_memory_does_not_grow_with_the_context():
    sizes = [
        new_method("streaming", {"budget": BUDGET, "sink": SINK}, layers(), capacity).footprint()
        for capacity in (100, 100_000)
    ]
    assert sizes[0] == sizes[1]


def test_cache_positions_put_the_sinks_right_before_the_window():
    """Rotate everything by hand: sinks at 0.., the window after them, the query last, as the paper counts."""
    model = tiny_model("llama")
    rope = model.model.rotary_emb
    with attached(model), installed(model, [200]) as tables:
        rotary = tables.rotary(200)
        method = new_method(
            "streaming", {"budget": BUDGET, "sink": SINK, "positions": "cache"}, layers(), 200, rotary=rotary
        )
        stream = Stream(33, steps=20)
        rotate = rotary[1].rotate
        everywhere = torch.arange(stream.prompt + stream.steps)
        k = rotate(stream.k, everywhere)
        method.prefill(1, k[:, : stream.prompt], stream.v[:, : stream.prompt], k[:, :0], SOFTMAX)
        for step in range(stream.steps):
            at = stream.prompt + step
            q = rotate(stream.q[step][:, None], torch.tensor([at]))[:, 0]
            out = method.attend(1, q, k[:, at], stream.v[:, at], SOFTMAX)
            held = [*range(SINK), *range(at + 1 - (BUDGET - SINK), at + 1)]
            in_cache = torch.arange(BUDGET)
            k_cache = rotate(stream.k[:, held], in_cache).double()
            q_cache = rotate(stream.q[step][:, None], in_cache[-1:]).double()[:, 0].view(k.shape[0], -1, D)
            scores = torch.einsum("hgd,hnd->hgn", q_cache, k_cache) * D**-0.5
            expected = torch.einsum("hgn,hnd->hgd", scores.softmax(-1), stream.v[:, held].double())
            assert torch.allclose(out.double(), expected.reshape(out.shape), rtol=1e-3, atol=1e-4), f"step {step}"
    assert model.model.rotary_emb is rope


def test_positions_matter_only_once_something_was_dropped():
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(0)).tolist()

    def outs(budget, positions):
        return run(model, "streaming", {"budget": budget, "positions": positions}, [ids], 30)[0].token_ids

    assert outs(128, "cache") == outs(128, "original")
    assert outs(16, "cache") != outs(16, "original")


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize(("window", "turn"), [(7, 0), (30, 13)])
def test_a_prompt_read_by_windows_is_streamed_token_by_token(positions, window, turn):
    """Each of its tokens attends as a step does, one after another; and so do those of a turn behind generated ones."""
    settings = {"budget": BUDGET, "sink": SINK, "positions": positions}
    with attached(tiny_model("llama")), installed(tiny_model("llama"), [200]) as tables:
        rotary = tables.rotary(200)
        read, stepped = (
            new_method("streaming", {**settings, "prefill_window": size}, layers(), 200, rotary=rotary)
            for size in (window, 0)
        )
        generator = torch.Generator().manual_seed(window)
        q, k, v = (torch.randn(heads, 90, D, generator=generator) for heads in (H, HK, HK))
        expected = torch.stack([stepped.attend(1, q[:, at], k[:, at], v[:, at], SOFTMAX) for at in range(90)], 1)
        assert read.prefill_window == window
        assert stepped.prefill_window is None
        outs, at = [], 0
        while at < 90:
            size = 1 if 40 <= at < 40 + turn else min(window, 90 - at, 40 - at if at < 40 else 90)
            part = slice(at, at + size)
            if size == 1:
                outs.append(read.attend(1, q[:, at], k[:, at], v[:, at], SOFTMAX)[:, None])
            else:
                outs.append(read.attend_window(1, q[:, part], k[:, part], v[:, part], SOFTMAX))
            at += size
    assert torch.allclose(torch.cat(outs, 1), expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(read.attended(1), stepped.attended(1))
