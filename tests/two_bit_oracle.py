"""Keys of two bits per channel in float64 and plain loops: what the oracles of YAKV and vAttention share."""

import math

import torch
from driver import HK, D
from oracle import dot

LEVELS = (-1.51042, -0.45278, 0.45278, 1.51042)  # Max, 1960, table I, with a digit more


def hadamard(x):
    """The transform of 2^m numbers by butterflies, unscaled."""
    if len(x) == 1:
        return x
    half = len(x) // 2
    low, high = hadamard(x[:half]), hadamard(x[half:])
    return [a + b for a, b in zip(low, high, strict=True)] + [a - b for a, b in zip(low, high, strict=True)]


class Codes:
    """What two bits per channel hold of the keys of a stream, as whole keys, and of each KV head's queries."""

    def __init__(self, stream, seed, centred=True):
        self.signs = torch.randint(0, 2, (D, 1), generator=torch.Generator().manual_seed(seed)).mul(2).sub(1)[:, 0]
        self.signs = self.signs.tolist()
        keys = stream.k.double().tolist()
        self.keys, self.centres = [], []
        for head in range(HK):
            prompt = keys[head][: stream.prompt]
            centre = [sum(key[c] for key in prompt) / len(prompt) if centred else 0.0 for c in range(D)]
            self.centres.append(centre)
            self.keys.append([self.held([a - b for a, b in zip(key, centre, strict=True)]) for key in keys[head]])

    def turned(self, x):
        return [y / math.sqrt(D) for y in hadamard([a * b for a, b in zip(x, self.signs, strict=True)])]

    def held(self, key):
        y = self.turned(key)
        size = math.sqrt(dot(y, y) / D)
        return [size * min(LEVELS, key=lambda level: abs(level - each / size)) for each in y]

    def scores(self, query, head, tokens):
        turned = self.turned(query)
        keys, added = self.keys[head], dot(query, self.centres[head])
        return [(dot(turned, keys[token]) + added) / math.sqrt(D) for token in tokens]
