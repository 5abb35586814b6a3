"""What the oracles of the retrieval methods share: attention and its parts in float64, in plain loops over lists."""

import math

import torch
from driver import HK, D, H

G = H // HK


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(values):
    exps = [math.exp(value - max(values)) for value in values]
    return [value / sum(exps) for value in exps]


def best(scores, count):
    """Indices of the `count` largest, of equals the lower."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def group(q, head):
    """The queries of one KV head's group, from q [H, d]."""
    return q[head * G : head * G + G].double().tolist()


def attention(stream, q, tokens):
    """Attention with q [H, d], each KV head to its own tokens of the stream (lists) -> [H, d]."""
    out = []
    for head in range(HK):
        keys, values = (kv[head, sorted(tokens[head])].double().tolist() for kv in (stream.k, stream.v))
        for query in group(q, head):
            weights = softmax([dot(query, key) / math.sqrt(D) for key in keys])
            out.append([dot(weights, channel) for channel in zip(*values, strict=True)])
    return torch.tensor(out, dtype=torch.float64)


def same(out, expected):
    return torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-5)
