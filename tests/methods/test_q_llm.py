"""Q-LLM against a slow re-derivation (block_oracle.py), and the question's way from a prompt to its blocks."""

import pytest
import torch
from block_oracle import Layer
from driver import HK, SOFTMAX, D, H, by_token, close, layers
from engine import SPARE, in_memory, new_method, profile_of
from families import LAYERS, VOCAB, tiny_model

from kvcli.models.rope import installed
from kvcli.runtime.engine import engine

P = 4
SETTINGS = {
    "budget": 44,  # 2 pages of sinks, 3 local, 6 selected
    "sink": 8,
    "window": 12,
    "page_size": P,
    "prefill_window": 10,
    "representatives": 2,
}


@pytest.fixture(scope="module")
def rotary():
    with installed(tiny_model("llama", layers=1), [400]) as rope:
        yield rope.rotary(400)


@pytest.mark.parametrize(
    ("question", "changed", "kept"),
    [
        (6, {"positions": "capped"}, 6),
        (9, {"positions": "original", "question_weight": 1.0}, 9),
        (20, {"prefill_window": 20}, 12),  # no more than half of the blocks
        (6, {"keep_question": False}, 0),
        (0, {}, 0),
    ],
    ids=str,
)
def test_every_window_and_every_step_match_the_oracle(question, changed, kept, rotary):
    prompt, steps, settings = 93, 40, {**SETTINGS, "positions": "capped", **changed}
    generator = torch.Generator().manual_seed(question)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    method = new_method("q_llm", settings, layers(1), prompt + steps, rotary=rotary)
    expected = Layer(0, "q_llm", settings, True, D**-0.5)
    source = [noise(heads, prompt + steps, D) + 0.3 for heads in (H, HK, HK)]
    if question:
        asked = [noise(heads, 1 + question, D) for heads in (H, HK, HK)]
        method.take_preview(0, *asked, SOFTMAX)
        expected.read_question(*map(by_token, asked), kept)
    size = settings["prefill_window"]
    for start in range(0, prompt, size):
        window = [x[:, start : min(start + size, prompt)] for x in source]
        out = method.attend_window(0, *window, SOFTMAX)
        assert close(out.transpose(0, 1), expected.window(*map(by_token, window))), f"window at {start}"
    method.context.counters.next_step()
    before = expected.requested, expected.misses
    for at in range(prompt, prompt + steps):
        token = [x[:, at] for x in source]
        out = method.attend(0, *token, SOFTMAX)
        assert close(out, expected.step(*(x.double().tolist() for x in token))), f"step {at - prompt}"
    cache, counted = method.retrieval[0], method.context.counters.cache()
    assert cache.kept == kept
    assert cache.selected == 6 - -(-kept // P)
    requested, misses = (
        after - then for after, then in zip((expected.requested, expected.misses), before, strict=True)
    )
    assert (counted.pages_requested, counted.misses) == (HK * requested, HK * misses)
    assert 0 < misses < requested


def test_a_question_is_read_first_and_changes_what_is_retrieved():
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (200,), generator=torch.Generator().manual_seed(5)).tolist()

    def read(question, **changed):
        with engine(in_memory(model), [len(ids) + SPARE]) as ready:
            profile = profile_of("q_llm", {**SETTINGS, **changed})
            method = ready.method(profile, ready.context(len(ids), SPARE, question))
            (logits,) = ready.prefill(ids, [method])
        return logits, method

    plain, without = read([])
    asked, method = read(ids[-6:])
    assert not without.question
    assert set(method.question) == set(range(LAYERS))
    assert method.footprint() == without.footprint(), "the question has room that was planned"
    scored, only = read(ids[-6:], keep_question=False)
    assert {cache.kept for cache in only.caches} == {0}
    assert not torch.allclose(asked, scored)
    assert not torch.allclose(plain, scored)
    neither = {"keep_question": False, "question_weight": 0.0}
    assert torch.equal(read(ids[-6:], **neither)[0], read([], **neither)[0])


def test_a_short_prompt_keeps_all_of_its_blocks_beside_the_question():
    method = new_method("q_llm", {**SETTINGS, "positions": "original"}, layers(1), 28)
    asked = [torch.randn(heads, 7, D, generator=torch.Generator().manual_seed(1)) for heads in (H, HK, HK)]
    method.take_preview(0, *asked, SOFTMAX)
    for _ in range(28):
        method.attend(0, *(torch.ones(heads, D) for heads in (H, HK, HK)), SOFTMAX)
    assert method.attended(0).all()
    assert method.retrieval[0].kept == 6


def test_a_prompt_shorter_than_the_window_has_its_question_at_its_own_end():
    """There are no rotations beyond the sequence's length, and the question is no further away than that."""
    with installed(tiny_model("llama", layers=1), [30]) as rope:
        method = new_method("q_llm", {**SETTINGS, "window": 40, "budget": 80}, layers(1), 30, rotary=rope.rotary(30))
        asked = [torch.randn(heads, 5, D, generator=torch.Generator().manual_seed(1)) for heads in (H, HK, HK)]
        method.take_preview(0, *asked, SOFTMAX)
        q, k, v = (torch.randn(heads, 9, D, generator=torch.Generator().manual_seed(2)) for heads in (H, HK, HK))
        out = method.attend_window(0, q, k, v, SOFTMAX)
    near = Layer(0, "infllm", {**SETTINGS, "window": 40, "budget": 80, "positions": "capped"}, True, D**-0.5)
    assert method.retrieval[0].kept == 4
    assert out.isfinite().all()
    assert not close(out.transpose(0, 1), near.window(*map(by_token, (q, k, v))))
