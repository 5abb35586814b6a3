"""Objects get back what they held: alone, and by a walk that nobody has to tell about new attributes."""

import json
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from kvcli.kv.cache import DenseCache, Tiers
from kvcli.memory.host_pool import HostPagePool
from kvcli.memory.state import Settled, branched, capture
from kvcli.runtime.checkpoint.restoring import Restoring

TIERS = Tiers.for_device(torch.device("cpu"), torch.float32)


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


@dataclass(frozen=True)
class Fixed:
    value: object


class Holder:
    not_state = ("left",)

    def __init__(self):
        self.fixed = Fixed(object())
        self.left = object()
        self.numbers = [1.5, float("inf")]
        self.log = []
        self.queue = deque(maxlen=3)
        self.rows = torch.zeros(4, 2)
        self.view = self.rows[1:3]
        self.by_layer = {}
        self.pair = None
        self.again = 0

    def settled(self):
        return [Settled(self.log, 0, len(self.log))]

    def restored(self):
        self.again += 1


def give_back(fresh, *states):
    """Put states, of which each was captured after the one before, into a fresh object."""
    restoring = Restoring(fresh, json.loads(json.dumps(states[-1].tree)), TIERS)
    for state in states:
        for part in state.added:
            restoring.put(part)
    for part in states[-1].changing:
        restoring.put(part)
    restoring.finish()
    return fresh


def test_values_of_all_kinds_come_back():
    held, fresh = Holder(), Holder()
    held.log += [1, 2]
    held.queue.extend([1, 2, 3, 4])
    held.rows[:] = torch.arange(8).view(4, 2)
    held.by_layer[3] = held.rows[2]
    held.pair = Pair(torch.tensor([True, False]), 7)
    left, fixed = fresh.left, fresh.fixed
    give_back(fresh, capture(held))
    assert (fresh.left, fresh.fixed) == (left, fixed)
    assert fresh.numbers == held.numbers
    assert fresh.log == [1, 2]
    assert (list(fresh.queue), fresh.queue.maxlen) == ([2, 3, 4], 3)
    assert torch.equal(fresh.rows, held.rows)
    assert isinstance(fresh.pair, Pair)
    assert fresh.pair.first.tolist() == [True, False]
    assert fresh.again == 1


def test_tensors_that_share_memory_share_it_afterwards():
    held, fresh = Holder(), Holder()
    held.by_layer[3] = held.rows[2]
    rows = fresh.rows
    give_back(fresh, capture(held))
    fresh.rows[2] = 5
    assert fresh.rows is rows
    assert fresh.view[1].tolist() == fresh.by_layer[3].tolist() == [5, 5]


def test_random_numbers_go_on():
    held = {"generator": torch.Generator().manual_seed(1)}
    torch.rand(3, generator=held["generator"])
    fresh = give_back({"generator": torch.Generator()}, capture(held))
    assert torch.equal(torch.rand(5, generator=fresh["generator"]), torch.rand(5, generator=held["generator"]))


def test_what_has_settled_is_captured_once():
    held, fresh = (DenseCache(2, 4, 10, TIERS) for _ in range(2))
    held.load(*torch.randn(2, 2, 6, 4))
    first = capture(held)
    held.append(*torch.randn(2, 2, 4))
    second = capture(held, first.settled)
    assert [part.values.shape[2] for part in (*first.added, *second.added)] == [6, 1]
    assert not second.changing
    give_back(fresh, first, second)
    assert fresh.length == 7
    assert torch.equal(fresh.kv[:, :, :7], held.kv[:, :, :7])


def test_a_branch_shares_memory_of_which_it_only_adds_to():
    held = {"cache": DenseCache(2, 4, 10, TIERS), "slots": torch.zeros(3)}
    held["cache"].load(*torch.randn(2, 2, 6, 4))
    mine = held["cache"].kv.clone()[:, :, :6]
    branch = branched(held, {})
    branch["cache"].append(*torch.randn(2, 2, 4))
    branch["slots"].fill_(1)
    assert branch["cache"].k.data_ptr() == held["cache"].k.data_ptr()
    assert (held["cache"].length, branch["cache"].length) == (6, 7)
    assert torch.equal(held["cache"].kv[:, :, :6], mine)
    assert not held["slots"].any()


def test_branches_of_a_pool_write_to_the_same_memory():
    """Copies of it would each allocate the rest, in one more piece than the pool that they were made from."""
    held = HostPagePool(2, 4, 8, 6, TIERS)
    held.write(0, *torch.randn(2, 2, 3, 8, 4))
    branch = branched(branched(held, {}), {})
    branch.write(3, *torch.randn(2, 2, 1, 8, 4))
    assert [piece.data_ptr() for piece in branch.pieces] == [piece.data_ptr() for piece in held.pieces]
    assert (held.written, branch.written) == (3, 4)


def test_a_branch_copies_memory_that_changes_beyond_what_has_settled():
    class Partly:
        def __init__(self):
            self.rows = torch.zeros(4, 2)
            self.view = self.rows[1:]

        def settled(self):
            return [Settled(self.rows, 0, 1, 3)]

    held = Partly()
    branch = branched(held, {})
    branch.view.fill_(1)
    assert branch.rows[1:].all(), "views of one tensor stay views of one"
    assert not held.rows.any()


def test_what_could_be_state_and_cannot_be_kept_is_refused():
    held = Holder()
    held.by_layer[1] = {object()}
    with pytest.raises(TypeError, match=r"by_layer\.1: is a set state"):
        capture(held)


def test_an_object_of_other_attributes_is_refused():
    held = Holder()
    held.more = 1
    with pytest.raises(ValueError, match="other attributes: more"):
        give_back(Holder(), capture(held))
    with pytest.raises(ValueError, match="a Holder in the place of a DenseCache"):
        give_back(Holder(), capture(DenseCache(2, 4, 10, TIERS)))


@pytest.mark.parametrize("layout", [torch.zeros(2, 3, dtype=torch.int16), torch.zeros(2, 3, 4, dtype=torch.uint8)])
def test_a_tensor_of_another_layout_is_refused(layout):
    """What an attribute meant before its layout changed would be read as what it means now."""
    held, fresh = DenseCache(2, 4, 10, TIERS), DenseCache(2, 4, 10, TIERS)
    held.kv = layout
    with pytest.raises(ValueError, match="dimensions in the place of float32 of 4"):
        give_back(fresh, capture(held))
