"""The time in which loops are compiled is known, and who waits for it is told once."""

import time

import numpy as np
from engine import run
from families import VOCAB, tiny_model
from numba import njit

from kvcli.kernels._numba import compiling
from kvcli.runtime.decode import BlockingStepper

PROMPT = [token % (VOCAB - 3) + 3 for token in range(40)]


def new_loop():
    """A loop of two parts that nothing has compiled yet."""

    @njit
    def part(x):
        return x + 1.0

    @njit
    def loop(x):
        return part(x) * 2.0

    return loop


def test_compiling_is_timed_and_told_once():
    told, before, begun = [], compiling.seconds, time.perf_counter()
    with compiling.telling(lambda: told.append(1)):
        for _ in range(2):
            loop = new_loop()
            loop(np.ones(3))
    taken = time.perf_counter() - begun
    assert told == [1]
    assert 0 < compiling.seconds - before <= taken  # what is compiled within another counts once
    before = compiling.seconds
    loop(np.ones(3))
    assert compiling.seconds == before
    new_loop()(np.ones(3))
    assert told == [1]


def test_a_step_that_waits_for_it_is_not_longer_for_that(monkeypatch):
    original, slept = BlockingStepper.step, []

    def step(self, batch):
        if not slept:
            slept.append(1)
            compiling.on_start(None)
            time.sleep(0.5)
            compiling.on_end(None)
        return original(self, batch)

    monkeypatch.setattr(BlockingStepper, "step", step)
    (sequence,) = run(tiny_model("llama"), "full", {}, [PROMPT], 4)
    assert max(sequence.decode_ms) < 400
    assert 500 <= sequence.compile_ms < 900
