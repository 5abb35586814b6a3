"""Attention over explicit lists of tokens, one head and one token after the other in float64, for tests of eviction."""

import math

import torch
from driver import HK, D, H

G = H // HK


def row(q, keys):
    """Softmax of one query over keys, as a list."""
    scores = [sum(a * b for a, b in zip(q, key, strict=True)) / math.sqrt(D) for key in keys]
    exps = [math.exp(score - max(scores)) for score in scores]
    return [value / sum(exps) for value in exps]


class Oracle:
    """The attention of a stream: of the prompt's queries, and of a step over the tokens that are held."""

    def __init__(self, stream):
        self.stream = stream
        self.k, self.v = stream.k.double().tolist(), stream.v.double().tolist()
        self.prompt_q = stream.prompt_q.double().tolist()
        self.q = [q.double().tolist() for q in stream.q]

    def prompt_row(self, head, position):
        """Weights of the prompt's query at `position` over the tokens up to it."""
        return row(self.prompt_q[head][position], self.k[head // G][: position + 1])

    def step_row(self, head, step, held):
        """Weights of a step's query over the tokens held."""
        return row(self.q[step][head], [self.k[head // G][token] for token in held])

    def output(self, step, held):
        """What a step gives where each KV head holds a list of tokens: [H, D]."""
        out = []
        for head in range(H):
            mine = held[head // G]
            weights, values = self.step_row(head, step, mine), [self.v[head // G][token] for token in mine]
            out.append(
                [sum(w * x for w, x in zip(weights, channel, strict=True)) for channel in zip(*values, strict=True)]
            )
        return torch.tensor(out, dtype=torch.float64)

    def check(self, step, method, out, held, layer=1):
        """Hold a step's output and the tokens that it says it attended to against the lists."""
        length = self.stream.prompt + step + 1
        assert method.attended(layer).tolist() == [[token in mine for token in range(length)] for mine in held]
        assert torch.allclose(out.double(), self.output(step, held), rtol=1e-4, atol=1e-5), f"step {step}"


def best(worth, count):
    """The `count` tokens of most worth (a dict), in order; of equals the first."""
    return sorted(sorted(worth, key=lambda token: (-worth[token], token))[:count])


def window_rows(oracle, head, window):
    """What the prompt's last `window` queries gave the tokens before them: [window][prompt - window]."""
    prompt = oracle.stream.prompt
    return [oracle.prompt_row(head, at)[: prompt - window] for at in range(prompt - window, prompt)]


def voted(oracle, head, budget, window, kernel):
    """The tokens of the prompt that SnapKV keeps for a KV head: its last ones and those that they vote for."""
    prompt = oracle.stream.prompt
    if prompt <= budget:
        return list(range(prompt))
    votes = [0.0] * (prompt - window)
    for query_head in range(head * G, head * G + G):
        sums = [sum(column) for column in zip(*window_rows(oracle, query_head, window), strict=True)]
        for token in range(len(sums)):
            votes[token] += max(sums[max(0, token - kernel // 2) : token + kernel // 2 + 1]) / G
    return [*best(dict(enumerate(votes)), budget - window), *range(prompt - window, prompt)]
