"""H2O against a slow re-derivation from the paper, in float64 and plain loops, sharing no code with it."""

import pytest
import torch
from driver import HK, SOFTMAX, D, Stream, layers, storage_bytes
from engine import new_method, run
from eviction_oracle import G, Oracle, best
from families import VOCAB, tiny_model

from kvcli.capacity import memory
from kvcli.inputs.profiles import resolve_profile
from kvcli.models.geometry import geometry_of

STEPS = 110


def held_by(oracle, head, budget, recent):
    """The tokens that a KV head holds at each step, its query's own among them, by the paper's greedy rule."""
    prompt, group = oracle.stream.prompt, range(head * G, head * G + G)
    received = [0.0] * prompt
    for query_head in group:
        for position in range(prompt):
            for token, weight in enumerate(oracle.prompt_row(query_head, position)):
                received[token] += weight / G
    worth = dict(enumerate(received))
    if prompt > budget:
        newest = range(prompt - recent, prompt)
        heavy = best({token: worth[token] for token in range(prompt - recent)}, budget - recent)
        worth = {token: worth[token] for token in [*heavy, *newest]}
    for step in range(oracle.stream.steps):
        now = prompt + step
        if len(worth) == budget:
            old = [token for token in worth if token <= now - recent]
            del worth[min(old, key=lambda token: (worth[token], -token))]
        worth[now] = 0.0
        yield sorted(worth)
        held = list(worth)
        for query_head in group:
            for token, weight in zip(held, oracle.step_row(query_head, step, held), strict=True):
                worth[token] += weight / G


@pytest.mark.parametrize(
    ("prompt", "budget", "recent"),
    [(75, 24, 0.5), (75, 23, 0.0), (61, 17, 1.0), (9, 30, 0.3), (1, 5, 0.5), (40, 1, 0.5)],
)
def test_every_step_matches_the_oracle(prompt, budget, recent):
    stream = Stream(prompt, STEPS, seed=prompt)
    oracle = Oracle(stream)
    expected = zip(*(held_by(oracle, head, budget, int(recent * budget)) for head in range(HK)), strict=True)
    differ = 0
    for (step, method, out), held in zip(
        stream.run("h2o", {"budget": budget, "recent": recent}), expected, strict=True
    ):
        oracle.check(step, method, out, held)
        assert all(len(mine) == min(prompt + step + 1, budget) for mine in held)
        differ += held[0] != held[1]
    assert (differ > STEPS / 2) == (recent < 1 and budget > 1), "KV heads choose for themselves"


def test_two_sequences_side_by_side():
    streams = [Stream(75, 40, seed=1), Stream(33, 40, seed=2)]
    oracles = [Oracle(stream) for stream in streams]
    runs = [stream.run("h2o", {"budget": 20}) for stream in streams]
    expected = [zip(*(held_by(oracle, head, 20, 10) for head in range(HK)), strict=True) for oracle in oracles]
    for together in zip(*runs, *expected, strict=True):
        for oracle, (step, method, out), held in zip(oracles, together[:2], together[2:], strict=True):
            oracle.check(step, method, out, held)


def test_the_chunks_that_a_prompt_is_read_by_make_no_difference():
    model, ids = (
        tiny_model("gpt_oss"),
        torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(1)).tolist(),
    )
    small, whole = (run(model, "h2o", {"budget": 20}, [ids], 30, chunk=chunk)[0] for chunk in (7, 1000))
    assert small.token_ids == whole.token_ids
    for layer, cache in small.method.retrieval.items():
        other = whole.method.retrieval[layer]
        assert torch.equal(cache.positions, other.positions)
        assert torch.allclose(cache.scores, other.scores, rtol=1e-3)
    assert not small.method.sums, "what the reading needed is gone"


def test_memory_is_that_of_the_budget_whatever_the_context():
    footprints = [new_method("h2o", {"budget": 24}, layers(), capacity).footprint() for capacity in (100, 100_000)]
    assert footprints[0] == footprints[1]
    token = 2 * HK * D * 4 + HK * (8 + 4)  # KV, position and score
    assert footprints[0].device == 2 * 24 * token
    profile, model = resolve_profile(method="h2o", overrides={"budget": 24}), tiny_model("llama")
    ids = torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    (sequence,) = run(model, "h2o", {"budget": 24}, [ids], 9)
    geometry = geometry_of(model.config, model.dtype)
    planned = memory.kv_footprint(profile, geometry, sequence.method.context.capacity, model.dtype)
    caches = sequence.method.caches
    tensors = [x for cache in caches for x in vars(cache).values() if isinstance(x, torch.Tensor)]
    assert planned.device == storage_bytes(tensors)


def test_attends_with_what_the_prompt_looked_at():
    """A token that every query of the prompt looks at is still there after a hundred steps that ignore it."""
    stream = Stream(75, STEPS, seed=3)
    direction = torch.nn.functional.normalize(torch.ones(D), dim=0)
    stream.k -= (stream.k @ direction)[..., None] * direction
    stream.k[:, 30] += 9 * direction
    stream.prompt_q += 4 * direction
    for step, method, _ in stream.run("h2o", {"budget": 20}):
        attended = method.attended(1)
        assert attended[:, 30].all()
        assert attended[:, stream.prompt + step - 9 :].all()
    assert SOFTMAX.scale == D**-0.5
