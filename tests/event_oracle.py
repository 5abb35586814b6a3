"""EM-LLM again, from its paper, in float64 and plain loops: where events begin, and what is recalled of them."""

import math
import statistics

from block_oracle import Layer, dot, flat


class Segments:
    """Boundaries by surprise, refined on a graph, of all layers (section 3.2 and algorithm 1)."""

    def __init__(self, settings):
        self.settings, self.surprises, self.known = settings, [], 0
        self.starts = [settings["sink"]]
        self.last = None  # probabilities behind the newest token, while the next one is the prompt's
        self.moved = 0

    def read(self, ids, probabilities, layers):
        """Take tokens and what was expected behind each."""
        first, candidates = len(self.surprises), []
        for token, behind in zip(ids, probabilities, strict=True):
            before = self.surprises[-self.settings["window"] :]
            self.surprises.append(0.0 if self.last is None else -math.log(self.last[token]))
            if len(before) > 1:
                bar = statistics.mean(before) + self.settings["gamma"] * statistics.stdev(before)
                if self.surprises[-1] > bar:
                    candidates.append(len(self.surprises) - 1)
            self.last = behind
        stop = first + len(ids)
        for candidate in candidates:
            while candidate - self.starts[-1] >= self.settings["max_event"]:
                self.starts.append(self.starts[-1] + self.settings["max_event"])
            if candidate - self.starts[-1] >= self.settings["min_event"]:
                self.starts.append(self.refine(candidate, stop, layers))
        self.known = stop

    def refine(self, boundary, stop, layers):
        """Of all ends that the event can have, the one at which the graph around it splits best."""
        metric, start = self.settings["refine"], self.starts[-1]
        if metric == "none":
            return boundary
        half = (boundary - start) // 2
        nodes = range(max(layers[0].first, start - half), min(stop, boundary + half))
        keys = {t: [flat(layer.plain(layer.k[t], t)) for layer in layers] for t in nodes}
        weight = {(i, j): sum(map(dot, keys[i], keys[j])) for i in nodes for j in nodes}
        total, degree = sum(weight.values()), {i: sum(weight[i, j] for j in nodes) for i in nodes}

        def goodness(end):
            sides = [[t for t in nodes if t < end], [t for t in nodes if t >= end]]
            inner = [sum(weight[i, j] for i in side for j in side) for side in sides]
            if metric == "conductance":
                return -(sum(weight[i, j] for i in sides[0] for j in sides[1]) / min(inner))
            return sum(
                within - sum(degree[i] for i in side) ** 2 / total for within, side in zip(inner, sides, strict=True)
            ) / (2 * total)

        ends = [end for end in range(start + self.settings["min_event"], boundary + 1) if end in nodes]
        best = max(ends, key=lambda end: (goodness(end), -end), default=boundary)
        self.moved += best != boundary
        return best


class EventLayer(Layer):
    """A layer whose blocks are events."""

    def __init__(self, index, settings, segments, scale, rope=True):
        super().__init__(index, "infllm", {**settings, "page_size": 1}, rope, scale)
        self.segments, self.settings, self.first, self.queue = segments, settings, 0, []

    def tokens(self, block):
        return range(*self.segments.starts[block : block + 2])

    def window(self, q, k, v):
        start = len(self.k)
        self.let_go(start)
        vectors = [flat(self.plain(x, start + i)) for i, x in enumerate(q)]
        self.find([sum(column) / len(vectors) for column in zip(*vectors, strict=True)], start - self.first)
        first, out = self.first, []
        for i, heads in enumerate(q):
            self.append(k[i], v[i])
            out.append(self.attend(heads, start + i, first))
        return out

    def step(self, q, k, v):
        self.append(k, v)
        length = self.segments.known = len(self.k)
        self.segments.last = None
        self.let_go(length)
        self.find(flat(self.plain(q, length - 1)), length - self.first)
        return self.attend(q, length - 1, self.first)

    def let_go(self, length):
        """What has left the local window and is a whole event is represented and goes to the host."""
        starts, longest = self.segments.starts, self.settings["max_event"]
        if length - self.local < self.sink:
            return
        while True:
            at = len(self.block_keys)
            if at + 1 == len(starts) and starts[at] + longest <= self.segments.known:
                starts.append(starts[at] + longest)
            if at + 1 == len(starts) or starts[at + 1] > length - self.local:
                break
            best = sorted(self.tokens(at), key=lambda t: (-self.mass[t], t))[: self.r]
            keys = [flat(self.plain(self.k[t], t)) for t in best]
            self.block_keys.append([sum(column) / self.r for column in zip(*keys, strict=True)])
            for t in self.tokens(at):
                if t - self.sink < len(self.slots):
                    self.slots[t - self.sink] = t
        self.first = starts[len(self.block_keys)]

    def find(self, probe, near):
        """The similarity buffer, then the contiguity buffer, of what the budget leaves (section 3.3)."""
        room, count = self.settings["budget"] - min(self.sink, self.first) - near, len(self.block_keys)
        if sum(len(self.tokens(b)) for b in range(count)) <= room:
            self.chosen = list(range(count))
        else:
            scores, beside = self.score(probe), int(self.settings["contiguity"] * room)
            similar = self.fill(sorted(range(count), key=lambda b: (-scores[b], b)), room - beside)
            around = [near for b in similar for near in (b + 1, b - 1) if 0 <= near < count]
            waiting = []
            for b in around + self.queue:
                if b not in similar and b not in waiting:
                    waiting.append(b)
            self.queue = self.fill(waiting, beside)
            self.chosen = similar + self.queue
        wanted = sorted(t for b in self.chosen for t in self.tokens(b))
        missing = [t for t in wanted if t not in self.slots]
        free = [i for i, t in enumerate(self.slots) if t not in wanted]
        for slot, t in zip(free, missing, strict=False):
            self.slots[slot] = t
        if len(self.chosen) < count or missing:
            self.requested += len(wanted)
            self.misses += len(missing)

    def fill(self, events, room):
        taken = []
        for event in events:
            room -= len(self.tokens(event))
            if room < 0:
                return taken
            taken.append(event)
        return taken
