"""ActQKV, InfLLM and Q-LLM again, from their formulas, in float64 and plain loops, sharing no code with them."""

import math

THETA = 10000.0


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def flat(heads):
    return [x for head in heads for x in head]


def norm(a):
    return math.sqrt(dot(a, a))


def turn(x, position):
    """Rotate x by `position` positions, pairs (c, c + d/2), as Llama does."""
    half = len(x) // 2
    out = [0.0] * len(x)
    for c in range(half):
        angle = position * THETA ** (-2 * c / len(x))
        out[c] = x[c] * math.cos(angle) - x[c + half] * math.sin(angle)
        out[c + half] = x[c + half] * math.cos(angle) + x[c] * math.sin(angle)
    return out


def softmax(values):
    top = max(values)
    exps = [math.exp(value - top) for value in values]
    return [value / sum(exps) for value in exps]


def entropy(scores):
    return -sum(p * math.log(p) for p in softmax(scores))


def moments(vectors):
    """Two passes: mean, and unbiased variance (zero for one vector), of each channel."""
    n, width = len(vectors), len(vectors[0])
    mean = [sum(vector[c] for vector in vectors) / n for c in range(width)]
    squares = [sum((vector[c] - mean[c]) ** 2 for vector in vectors) for c in range(width)]
    return mean, [square / max(1, n - 1) for square in squares]


def weighted_probe(vectors, mean, variance):
    bias = [
        sum((q - m) ** 2 / (s + 1e-6) for q, m, s in zip(vector, mean, variance, strict=True)) for vector in vectors
    ]
    if not sum(bias):
        bias = [1.0] * len(vectors)
    return [sum(b * vector[c] for b, vector in zip(bias, vectors, strict=True)) / sum(bias) for c in range(len(mean))]


class Shares:
    """The cut-off over all layers, one step after the other."""

    def __init__(self, layers, blocks, least, most):
        self.blocks, self.least, self.most = blocks, least, most
        self.layers = layers
        self.seen = [[] for _ in range(layers)]
        self.left = 0

    def take(self, layer, theta, candidates):
        if layer == 0:
            self.left = self.layers * self.blocks
        if all(self.seen):
            means = [sum(thetas[-100:]) / len(thetas[-100:]) for thetas in self.seen]
            part = theta / (theta + sum(means[layer + 1 :])) * self.left
        else:
            part = self.left / (self.layers - layer)
        given = max(min(candidates, self.least), min(min(candidates, self.most), round(part)))
        self.left -= given
        self.seen[layer].append(theta)
        return given


class Layer:
    """One layer of one sequence; q, k and v come post-RoPE as nested lists: [heads][d] of each token."""

    def __init__(self, index, kind, settings, rope, scale, shares=None):
        self.index, self.kind, self.rope, self.scale, self.shares = index, kind, rope, scale, shares
        self.size, self.r = settings["page_size"], settings["representatives"]
        self.sink, self.local = settings["sink"] // self.size, settings["window"] // self.size
        self.selected = settings["budget"] // self.size - self.sink - self.local
        self.capped = settings["positions"] == "capped"
        self.weight = settings.get("question_weight", 4.0)
        self.slots = [None] * (shares.most if shares else self.selected)
        self.k, self.v, self.mass = [], [], []
        self.block_keys = []  # of the blocks behind the sinks, one after another
        self.queries = []  # all of the prompt's so far, un-rotated, heads concatenated
        self.question = None
        self.kept = []  # keys, values and position of a question's tokens that stay
        self.chosen = []
        self.requested = self.misses = 0
        self.entropies = []

    def first_near(self, length):
        return max(0, -(-length // self.size) - self.local) * self.size

    def plain(self, heads, position):
        """Un-rotated heads."""
        return [turn(x, -position) for x in heads] if self.rope else heads

    def ask(self, queries):
        """A question of its own, at positions from 1 on."""
        vectors = [flat(self.plain(q, 1 + i)) for i, q in enumerate(queries)]
        self.question = weighted_probe(vectors, *moments(vectors))

    def read_question(self, q, k, v, most):
        """Q-LLM: a question behind the prompt's first token; `most` of its last tokens stay in the place of blocks."""
        group, mass = len(q[0]) // len(k[0]), [0.0] * len(q)
        for i, heads in enumerate(q):
            for h, query in enumerate(heads):
                weights = softmax([dot(query, k[j][h // group]) * self.scale for j in range(i + 1)])
                for j in range(i):
                    mass[j] += weights[j]
        best = sorted(range(1, len(q)), key=lambda t: (-mass[t], t))[: self.r]
        vectors = [flat(self.plain(q[t], t)) for t in best]
        self.question = [self.weight * sum(column) / len(vectors) for column in zip(*vectors, strict=True)]
        self.kept = [(k[t], v[t], t) for t in range(1, len(q))][-most:] if most else []
        self.selected -= -(-len(self.kept) // self.size)
        self.slots = self.slots[: self.selected]

    def window(self, q, k, v):
        start = len(self.k)
        vectors = [flat(self.plain(x, start + i)) for i, x in enumerate(q)]
        self.queries += vectors
        if self.kind != "actqkv":
            probe = [sum(vector[c] for vector in vectors) / len(vectors) for c in range(len(vectors[0]))]
            scores = self.score(probe)
        else:
            scores = self.score(weighted_probe(vectors, *moments(self.queries)))
            if self.question is not None:
                extra = self.score(self.question)
                scores = [a + self.weight * b for a, b in zip(scores, extra, strict=True)]
        self.choose(scores, self.selected)
        first = self.first_near(start)
        out = []
        for i, heads in enumerate(q):
            self.append(k[i], v[i])
            out.append(self.attend(heads, start + i, first))
        self.retire()
        return out

    def step(self, q, k, v):
        self.append(k, v)
        self.retire()
        position = len(self.k) - 1
        scores = self.score(flat(self.plain(q, position)))
        wanted = self.selected
        if len(scores) > self.selected and self.kind == "actqkv":
            self.entropies.append(entropy(scores))
            wanted = self.shares.take(self.index, self.entropies[-1], len(scores))
        self.choose(scores, wanted)
        return self.attend(q, position, self.first_near(position + 1))

    def append(self, k, v):
        self.k.append(k)
        self.v.append(v)
        self.mass.append(0.0)

    def retire(self):
        """Represent every block that has left the local window."""
        while (self.sink + len(self.block_keys) + 1) * self.size <= self.first_near(len(self.k)):
            block = self.tokens(len(self.block_keys))
            best = sorted(block, key=lambda t: (-self.mass[t], t))[: self.r]
            keys = [flat(self.plain(self.k[t], t)) for t in best]
            number = len(self.block_keys)
            self.block_keys.append([sum(key[c] for key in keys) / self.r for c in range(len(keys[0]))])
            if number < len(self.slots):
                self.slots[number] = number

    def tokens(self, block):
        first = (self.sink + block) * self.size
        return range(first, first + self.size)

    def score(self, probe):
        """Probe [H * d] against each block key, its KV heads repeated for their groups."""
        if self.kind == "lm_infinite":
            return list(range(len(self.block_keys)))  # the newest
        scores = []
        if self.kind == "q_llm" and self.question is not None:
            probe = [a + b for a, b in zip(probe, self.question, strict=True)]
        for key in self.block_keys:
            heads_k, d = len(self.k[0]), len(self.k[0][0])
            group = len(probe) // len(key)
            repeated = flat(key[h * d : h * d + d] * group for h in range(heads_k))
            value = dot(probe, repeated)
            scores.append(value if self.kind in ("infllm", "q_llm") else value / norm(probe) / norm(repeated))
        return scores

    def choose(self, scores, wanted):
        if len(scores) <= self.selected:
            self.chosen = list(range(len(scores)))
            return
        self.chosen = sorted(range(len(scores)), key=lambda b: (-scores[b], b))[:wanted]
        missing = sorted(set(self.chosen) - set(self.slots))
        free = [i for i, block in enumerate(self.slots) if block not in self.chosen]
        for slot, block in zip(free, missing, strict=False):
            self.slots[slot] = block
        self.requested += wanted
        self.misses += len(missing)

    def attend(self, q, position, first):
        """One query, all heads: near tokens from `first` on, and the far ones."""
        near = list(range(first, position + 1))
        far = list(range(min(self.sink * self.size, first))) + [t for b in self.chosen for t in self.tokens(b)]
        away = [(self.k[t], self.v[t], t) for t in far] + self.kept
        group = len(q) // len(self.k[0])
        out = []
        for h, query in enumerate(q):
            kv = h // group
            logits = [dot(query, self.k[t][kv]) * self.scale for t in near]
            for k, _, t in away:
                if self.capped and self.rope:
                    asked = turn(turn(query, -position), self.local * self.size - 1)
                    logits.append(dot(asked, turn(k[kv], -t)) * self.scale)
                else:
                    logits.append(dot(query, k[kv]) * self.scale)
            weights = softmax(logits)
            for t, weight in zip(near[:-1], weights, strict=False):
                self.mass[t] += weight
            values = [self.v[t][kv] for t in near] + [v[kv] for _, v, _ in away]
            out.append([sum(w * value[c] for w, value in zip(weights, values, strict=True)) for c in range(len(query))])
        return out
