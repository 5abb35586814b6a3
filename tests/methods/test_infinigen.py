"""InfiniGen against a slow re-derivation in float64, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, SOFTMAX, D, H, Stream, layers
from engine import new_method, run
from families import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, tiny_model
from oracle import G, attention, best, dot, group, same
from safetensors.torch import save_file

from kvcli.errors import KvcliError
from kvcli.kernels.page_table import EMPTY

BUDGET = 30
SETTINGS = {"budget": BUDGET, "alpha": 0.8, "columns": 0.4, "rows": 50}
VARIANTS = [{}, {"sink": 3, "window": 6}, {"columns": 1.0, "alpha": 3.0}, {"alpha": 0.0}, {"alpha": 50.0, "rows": 7}]
STEPS = 60


class Oracle:
    """One layer, step after step: what its heads choose with a query told before, and what they hold."""

    def __init__(self, stream, settings, skew=None):
        self.stream, self.settings = stream, settings
        self.sink, self.window = settings.get("sink", 0), max(1, settings.get("window", 0))
        first = range(self.sink, BUDGET - self.window) if stream.prompt <= BUDGET else ()
        self.held = [set(first) for _ in range(HK)]
        self.misses = self.requested = 0
        self.axes = [self.strongest(head, None if skew is None else skew[head]) for head in range(HK)]
        self.short_keys = [
            [[dot(key, axis) for axis in self.axes[head]] for key in stream.k[head].double().tolist()]
            for head in range(HK)
        ]

    def strongest(self, head, skew):
        """The columns of the skew, as rows, that are largest in the prompt's last queries and its keys."""
        prompt, rows = self.stream.prompt, self.settings["rows"]
        queries = self.stream.prompt_q[head * G : head * G + G, max(0, prompt - rows) :].double().flatten(0, 1)
        keys = self.stream.k[head, :prompt].double()
        axes = torch.linalg.svd(queries)[2] if skew is None else skew.T
        strength = [
            sum(abs(dot(row, axis)) for row in queries.tolist()) / len(queries)
            + sum(abs(dot(row, axis)) for row in keys.tolist()) / len(keys)
            for axis in axes.tolist()
        ]
        count = int(self.settings["columns"] * D)
        return [axes[i].tolist() for i in best(strength, count)]

    def scores(self, head, q, candidates):
        """The greatest score of the group for each token, by the few columns alone."""
        rows = []
        for query in group(q, head):
            short = [dot(query, axis) for axis in self.axes[head]]
            rows.append([dot(short, self.short_keys[head][token]) / math.sqrt(D) for token in candidates])
        return [max(column) for column in zip(*rows, strict=True)]

    def step(self, step, told):
        length = self.stream.prompt + step + 1
        if length <= BUDGET:
            return attention(self.stream, self.stream.q[step], [range(length)] * HK)
        candidates = range(self.sink, length - self.window)
        scores = [self.scores(head, told, candidates) for head in range(HK)]
        near = [sum(score >= max(row) - self.settings["alpha"] for score in row) for row in scores]
        count = min(sum(near) // HK, BUDGET - self.sink - self.window)
        tokens = []
        for head in range(HK):
            chosen = {candidates[i] for i in best(scores[head], count)}
            self.misses += len(chosen - self.held[head])
            self.requested += len(chosen)
            self.held[head] = chosen
            tokens.append([*range(self.sink), *chosen, *range(length - self.window, length)])
        return attention(self.stream, self.stream.q[step], tokens)


def predicted(stream, settings):
    """Feed a stream to one layer, telling it before each step a query that resembles the one to come."""
    method = new_method("infinigen", settings, layers(), stream.prompt + stream.steps)
    generator = torch.Generator().manual_seed(stream.prompt)
    k, v = stream.k[:, : stream.prompt].clone(), stream.v[:, : stream.prompt].clone()
    method.prefill(1, k, v, stream.prompt_q[:, max(0, stream.prompt - method.query_rows) :], SOFTMAX)
    for step in range(stream.steps):
        at = stream.prompt + step
        told = stream.q[step] + 0.3 * torch.randn(H, D, generator=generator)
        method.context.counters.next_step()
        method.take_next_query(1, told)
        yield step, told, method, method.attend(1, stream.q[step], stream.k[:, at], stream.v[:, at], SOFTMAX)


@pytest.mark.parametrize("prompt", [61, 22])  # retrieving from the first step; growing out of the budget
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_step_matches_the_oracle(prompt, variant):
    settings = {**SETTINGS, **variant}
    stream = Stream(prompt, steps=STEPS, seed=prompt)
    oracle = Oracle(stream, settings)
    for step, told, method, out in predicted(stream, settings):
        assert same(out, oracle.step(step, told)), f"step {step}"
        if prompt + step + 1 > BUDGET:
            held = [{*tokens} - {EMPTY} for tokens in method.retrieval[1].resident.tolist()]
            assert held == oracle.held, f"tokens held after step {step}"
    steps = sum(prompt + step + 1 > BUDGET for step in range(STEPS))
    assert method.statistics() == {
        "tokens_chosen_mean": oracle.requested / (steps * HK),
        "layer_steps_foretold": steps,
    }
    if variant == {}:
        assert steps * HK < oracle.requested < steps * HK * (BUDGET - 1)
    cache = method.context.counters.cache()
    assert cache.pages_requested == oracle.requested
    assert 0 < cache.misses == oracle.misses
    assert cache.bytes_to_device == oracle.misses * 2 * D * 4
    assert cache.bytes_to_host == (prompt + STEPS) * HK * 2 * D * 4


def test_a_layer_that_was_told_nothing_chooses_with_its_own_query():
    stream = Stream(50, steps=40, seed=3)
    oracle = Oracle(stream, SETTINGS)
    for step, method, out in stream.run("infinigen", SETTINGS):  # noqa: B007 - read afterwards
        assert same(out, oracle.step(step, stream.q[step])), f"step {step}"
    assert method.statistics()["layer_steps_foretold"] == 0


def test_the_skew_comes_from_a_calibration_file_where_there_is_one(tmp_path):
    skew = torch.linalg.qr(torch.randn(HK, D, D, generator=torch.Generator().manual_seed(1)).double())[0]
    save_file({"layer.1": skew.float().contiguous()}, tmp_path / "skew.safetensors")
    stream = Stream(50, steps=30, seed=2)
    oracle = Oracle(stream, SETTINGS, skew)
    for step, told, _, out in predicted(stream, {**SETTINGS, "skew": str(tmp_path / "skew.safetensors")}):
        assert same(out, oracle.step(step, told)), f"step {step}"


def test_a_calibration_of_another_model_is_refused(tmp_path):
    save_file({f"layer.{layer}": torch.eye(8).repeat(KV_HEADS, 1, 1) for layer in range(LAYERS)}, tmp_path / "skew")
    with pytest.raises(KvcliError, match=rf"skew file .*has shape \[2, 8, 8\], not \[2, {HEAD_DIM}, {HEAD_DIM}\]"):
        run(tiny_model("llama"), "infinigen", {**SETTINGS, "skew": str(tmp_path / "skew")}, [[5]], 1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_in_a_model_every_layer_but_the_first_is_told(family):
    model = tiny_model(family)
    ids = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (71, 40)]
    together = run(model, "infinigen", SETTINGS, ids, 30)
    for sequence, prompt in zip(together, ids, strict=True):
        (alone,) = run(model, "infinigen", SETTINGS, [prompt], 30)
        assert sequence.token_ids == alone.token_ids
        assert sequence.method.statistics() == alone.method.statistics()
        steps = 29  # the first token comes from the prefill
        retrieving = len(sequence.method.retrieval)
        assert sequence.method.statistics()["layer_steps_foretold"] == steps * retrieving


def test_the_first_layer_may_retrieve_by_itself():
    (sequence,) = run(tiny_model("llama"), "infinigen", {**SETTINGS, "dense_layers": 0}, [list(range(3, 60))], 20)
    assert sequence.method.statistics()["layer_steps_foretold"] == 19 * (LAYERS - 1)
