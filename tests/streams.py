"""Streams that make work late, on purpose: whatever their points allow may happen, and the result must not change."""

import random

from kvcli.runtime.gpu.recorder import Streams


class Late(Streams):
    """Does work of the streams beside the main one in any order that their points allow, as late as they allow.

    `eagerness` is the chance that waiting work is done early. With `heedless`, points of `after` are forgotten: what a
    pipeline looks like that does not name them.
    """

    def __init__(self, seed=0, eagerness=0.3, heedless=False):
        self.random, self.eagerness, self.heedless = random.Random(seed), eagerness, heedless
        self.waiting = []  # (point, stream, work, after)
        self.reached = set()
        self.points = 0
        self.late = 0  # work that was done after something else of the main stream

    def mark(self):
        self._some()
        self.points += 1
        self.reached.add(self.points)  # the main stream's work is done when it is given
        return self.points

    def submit(self, stream, work, after):
        self.points += 1
        self.waiting.append((self.points, stream, work, () if self.heedless else tuple(after)))
        self._some()
        return self.points

    def wait(self, point):
        while point not in self.reached:
            self._one()
        self._some()

    def join(self):
        self.late += len(self.waiting)
        while self.waiting:
            self._one()

    def forget(self):
        self.waiting.clear()

    def _ready(self):
        first = {}
        for entry in self.waiting:
            first.setdefault(entry[1], entry)  # a stream keeps its order
        return [entry for entry in first.values() if self.reached.issuperset(entry[3])]

    def _one(self):
        entry = self.random.choice(self._ready())
        self.waiting.remove(entry)
        entry[2]()
        self.reached.add(entry[0])

    def _some(self):
        while self._ready() and self.random.random() < self.eagerness:
            self._one()
