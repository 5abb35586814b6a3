"""Counters: sums by step, layer and head."""

import gc

from kvcli.telemetry.counters import Count, Counters


def test_counts_by_head_are_counts_of_the_layer_and_leave_the_warmup_out_of_their_own_sums():
    counters = Counters(3)
    counters.warmup = 2
    for step in range(5):
        counters.next_step()
        counters.add_heads(1, Count.PAGES_REQUESTED, [8, 8])
        counters.add_heads(1, Count.MISSES, [step, 2])
        counters.add_heads(2, Count.HEADS_CHECKED, [1, 1])  # nothing was asked for
    layers = counters.cache().layers
    assert [layer.misses for layer in layers] == [0, 20, 0]
    assert layers[1].by_head.misses == [2 + 3 + 4, 2 * 3]
    assert layers[1].by_head.pages_requested == [24, 24]
    assert layers[1].by_head.heads_corrected == [0, 0]
    assert layers[0].by_head is layers[2].by_head is None


def test_before_the_first_step_heads_count_nothing():
    counters = Counters(1)
    counters.add_heads(0, Count.PAGES_REQUESTED, [3])
    assert counters.cache().layers[0].by_head is None
    assert counters.cache().pages_requested == 0


def test_counts_are_not_looked_through_when_garbage_is_collected():
    """A hundred thousand lists would make a step wait for it, again and again."""
    counters = Counters(3)
    for step in range(4):
        counters.next_step()
        counters.add(1, Count.MISSES, step)
        counters.add_all(2, list(range(len(Count))), step)
    gc.collect()
    assert not any(gc.is_tracked(row) for of_step in counters.counts for row in of_step)
    assert [of_step[1][Count.MISSES] for of_step in counters.counts] == [0, 1, 2, 3]
