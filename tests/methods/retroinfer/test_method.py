"""RetroInfer against a slow re-derivation in float64 and plain loops, sharing no code with it."""

import math

import pytest
import torch
from driver import HK, D, Stream
from engine import run
from families import VOCAB, tiny_model
from oracle import best, dot, group, same, softmax
from pydantic import ValidationError

from kvcli.kernels.page_table import EMPTY
from kvcli.methods.retroinfer.method import RetroInferConfig

SINK, WINDOW, UPDATE, BUDGET = 3, 6, 7, 30
SETTINGS = {"budget": BUDGET, "sink": SINK, "window": WINDOW, "update": UPDATE, "dense_layers": 1}
SETTINGS |= {"cluster": 4, "segment": 24, "rounds": 4, "estimation": 0.3, "cached": 0.3}
ROOM, STEPS = BUDGET - SINK - WINDOW, 50


def mean(rows):
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def unit(x):
    return [value / math.sqrt(dot(x, x)) for value in x]


def kmeans(keys, count, rounds):
    """Clusters of the keys, as lists of their numbers."""
    middle = mean(keys)
    x = [unit([a - b for a, b in zip(key, middle, strict=True)]) for key in keys]
    centres = [x[int((i + 0.5) * len(x) / count)] for i in range(count)]
    for turn in range(rounds + 1):
        nearest = [best([dot(row, centre) for centre in centres], 1)[0] for row in x]
        members = [[i for i, cluster in enumerate(nearest) if cluster == c] for c in range(count)]
        if turn < rounds:
            centres = [unit(mean([x[i] for i in own])) if own else centres[c] for c, own in enumerate(members)]
    return members


class Oracle:
    """One layer: its clusters, what a step reads and estimates, and what the block cache holds."""

    def __init__(self, stream, settings):
        self.stream, self.settings, self.done = stream, settings, 0
        self.room = settings["budget"] - SINK - WINDOW
        self.k, self.v = (x.double().tolist() for x in (stream.k, stream.v))
        self.clusters = [[] for _ in range(HK)]
        slots = max(self.room, round(settings["cached"] * (stream.prompt + stream.steps)))
        self.slots, self.used = ([[empty] * slots for _ in range(HK)] for empty in (EMPTY, 0))
        self.requested = self.misses = 0
        far = stream.prompt - SINK - WINDOW
        if far >= UPDATE:
            self.add(far)

    def add(self, count):
        segments = max(1, round(count / self.settings["segment"]))
        sizes = [count // segments + (i < count % segments) for i in range(segments)]
        for size in sizes:
            tokens = range(SINK + self.done, SINK + self.done + size)
            for head in range(HK):
                keys = [self.k[head][t] for t in tokens]
                found = kmeans(keys, size // self.settings["cluster"], self.settings["rounds"])
                self.clusters[head] += [[tokens[i] for i in members] for members in found]
            self.done += size

    def zones(self, step, head):
        """The tokens retrieved, and the clusters estimated."""
        clusters, total = self.clusters[head], [0.0] * len(self.clusters[head])
        full = [c for c, members in enumerate(clusters) if members]
        for query in group(self.stream.q[step], head):
            scores = [dot(query, mean([self.k[head][t] for t in clusters[c]])) / math.sqrt(D) for c in full]
            for c, weight in zip(full, softmax(scores), strict=True):
                total[c] += weight
        order, chosen = best(total, len(total)), []
        while order and sum(len(clusters[c]) for c in [*chosen, order[0]]) <= self.room:
            chosen.append(order.pop(0))
        tokens = [t for c in sorted(chosen) for t in clusters[c]]
        return tokens, order[: round(self.settings["estimation"] * len(total))]

    def read(self, step, head, tokens):
        """The block cache takes what it lacks, in the place of what was read least recently."""
        slots, used = self.slots[head], self.used[head]
        for slot, token in enumerate(slots):
            if token in tokens:
                used[slot] = step + 1
        missing = [t for t in tokens if t not in slots]
        oldest = sorted(range(len(slots)), key=lambda slot: (used[slot], slot))
        for slot, token in zip(oldest, missing, strict=False):
            slots[slot], used[slot] = token, step + 1
        self.requested += len(tokens)
        self.misses += len(missing)

    def step(self, step):
        """The output [H, d], and for each KV head the tokens that it reads."""
        length, out, read = self.stream.prompt + step + 1, [], []
        if length - SINK - self.done == WINDOW + UPDATE:
            self.add(UPDATE)
        for head in range(HK):
            k, v = self.k[head], self.v[head]
            tokens, estimated = self.zones(step, head) if self.done else ([], [])
            self.read(step, head, tokens)
            exact = [*range(min(SINK, length)), *tokens, *range(min(SINK + self.done, length), length)]
            read.append(exact)
            stand_ins = [self.clusters[head][c] for c in estimated if self.clusters[head][c]]
            keys = [k[t] for t in exact] + [mean([k[t] for t in members]) for members in stand_ins]
            values = [v[t] for t in exact] + [mean([v[t] for t in members]) for members in stand_ins]
            times = [1] * len(exact) + [len(members) for members in stand_ins]
            for query in group(self.stream.q[step], head):
                exps = [n * math.exp(dot(query, key) / math.sqrt(D)) for n, key in zip(times, keys, strict=True)]
                out.append([dot(exps, channel) / sum(exps) for channel in zip(*values, strict=True)])
        return torch.tensor(out, dtype=torch.float64), read


@pytest.mark.parametrize("prompt", [75, 12])  # clustered when it is read; with the first update
@pytest.mark.parametrize("variant", [{}, {"estimation": 0.0, "cached": 0.0}, {"segment": 1000, "rounds": 0}], ids=str)
def test_every_step_matches_the_oracle(prompt, variant):
    settings = {**SETTINGS, **variant}
    stream = Stream(prompt, steps=STEPS, seed=prompt)
    oracle = Oracle(stream, settings)
    for step, method, out in stream.run("retroinfer", settings):
        expected, read = oracle.step(step)
        assert same(out, expected), f"output of step {step}"
        length = prompt + step + 1
        assert method.attended(1).tolist() == [[t in tokens for t in range(length)] for tokens in read]
        assert all(len(tokens) < BUDGET + UPDATE for tokens in read)
        if oracle.done:
            assert [{*row} for row in method.retrieval[1].resident.tolist()] == [{*row} for row in oracle.slots]
    cache = method.context.counters.cache()
    assert cache.pages_requested == oracle.requested
    assert 0 < cache.misses == oracle.misses < oracle.requested
    assert cache.bytes_to_device == oracle.misses * 2 * D * 4
    assert cache.bytes_to_host == (prompt + STEPS) * HK * 2 * D * 4
    said = method.statistics()
    assert said["clusters"] == len(oracle.clusters[0])
    assert 0 < said["tokens_retrieved_mean"] <= ROOM


@pytest.mark.parametrize("room", [1, 4])  # for hardly any cluster; for one in some KV heads
def test_a_head_for_which_no_cluster_fits_has_its_steady_zone_and_estimates(room):
    settings = {**SETTINGS, "budget": SINK + WINDOW + room}
    stream = Stream(75, steps=STEPS, seed=3)
    oracle, counts = Oracle(stream, settings), set()
    for step, _, out in stream.run("retroinfer", settings):
        expected, read = oracle.step(step)
        assert same(out, expected), f"output of step {step}"
        counts |= {len(tokens) - (stream.prompt + step + 1 - oracle.done) for tokens in read}
    assert 0 in counts


def test_what_is_estimated_is_never_more_than_it_is():
    """By Jensen's inequality; with all clusters estimated or read, no attention is lost on keys that are alike."""
    stream = Stream(75, steps=20, seed=1)
    stream.k[:, SINK:70] = stream.k[:, SINK : SINK + 1] + 0.05 * stream.k[:, SINK:70]
    whole, full = ([out for _, _, out in stream.run(name, settings)] for name, settings in CASES)
    part = [out for _, _, out in stream.run("retroinfer", {**SETTINGS, "estimation": 0.0})]
    errors = [sum(float((a - b).abs().mean()) for a, b in zip(outs, full, strict=True)) for outs in (whole, part)]
    assert errors[0] < 0.1 * errors[1]


CASES = (("retroinfer", {**SETTINGS, "estimation": 1.0}), ("full", {}))


def test_a_model_reads_everything_while_it_fits():
    ids = [torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(2)).tolist()]
    model, wanted = tiny_model("qwen3"), {**SETTINGS, "budget": 200, "dense_layers": 0}
    found, expected = (run(model, *each, ids, 30)[0].token_ids for each in (("retroinfer", wanted), ("full", {})))
    assert found == expected


@pytest.mark.parametrize("wrong", [{"update": 15}, {"segment": 31}, {"budget": 68}], ids=str)
def test_settings_that_hold_no_cluster_are_refused(wrong):
    RetroInferConfig(update=16, segment=32, budget=69)
    with pytest.raises(ValidationError, match="must be at least"):
        RetroInferConfig(**wrong)
