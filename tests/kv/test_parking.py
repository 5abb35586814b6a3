"""Tensors that are on the device only while their layer is read."""

import pytest
import torch

from kvcli.kv import parking
from kvcli.kv.cache import DenseCache, Tiers
from kvcli.kv.parking import Parking

TIERS = Tiers.for_device(torch.device("cpu"), torch.float32)


class Held:
    """A tensor with a view of it."""

    def __init__(self, size):
        self.kv = torch.empty(2, size)
        self.k = self.kv[0]

    def waiting(self):
        return (self.kv,)

    @property
    def bytes(self):
        return self.kv.untyped_storage().nbytes()


def test_what_is_closed_takes_no_memory_and_comes_back_with_its_views():
    waits, caches = Parking(TIERS), [Held(5), Held(7)]
    for cache in caches:
        waits.enter(cache)
    assert [cache.bytes for cache in caches] == [0, 0]
    for value, cache in enumerate(caches):
        waits.open(cache)
        waits.open(cache)
        assert [each.bytes for each in caches if each is not cache] == [0]
        cache.kv.fill_(value)
        waits.close(cache)
    waits.open(caches[0])  # once more before the end
    caches[0].k += 8
    waits.close(caches[0])
    waits.leave()
    assert [cache.k.tolist() for cache in caches] == [[8.0] * 5, [1.0] * 7]
    assert [cache.kv[1].tolist() for cache in caches] == [[0.0] * 5, [1.0] * 7]
    waits.close(caches[0])
    assert caches[0].bytes == caches[0].kv.nbytes


def test_what_keeps_nothing_takes_no_host_memory(monkeypatch):
    waits, buffer = Parking(TIERS), Held(9)
    monkeypatch.setattr(parking.Tiers, "on_host_async", lambda *_, **__: pytest.fail("asked for"))
    waits.enter(buffer, keeps=False)
    assert buffer.bytes == 0
    waits.leave()
    assert buffer.bytes == buffer.kv.nbytes


def test_what_was_never_opened_or_never_taken_in():
    waits, stranger, cache = Parking(TIERS), Held(3), Held(3)
    waits.enter(cache)
    waits.open(stranger)
    waits.close(stranger)
    waits.close(cache)
    assert stranger.bytes == stranger.kv.nbytes
    waits.leave()
    assert cache.bytes == cache.kv.nbytes


def test_rows_that_were_lent_are_not_copied():
    cache, (k, v) = DenseCache(2, 4, 9, TIERS), torch.randn(2, 2, 7, 4)
    rows = cache.lend(7)
    rows[0], rows[1] = k, v
    cache.load(rows[0], rows[1])
    assert (cache.length, cache.k[:, :7].equal(k), cache.v[:, :7].equal(v)) == (7, True, True)
    cache.load(v, k)  # of which nothing lies there
    assert cache.k[:, :7].equal(v)


def test_a_cache_that_loads_otherwise_lends_nothing():
    class Reversed(DenseCache):
        def load(self, k, v):
            return super().load(k.flip(1), v.flip(1))

    assert Reversed(2, 4, 9, TIERS).lend(7) is None
    assert DenseCache(2, 4, 9, TIERS).lend(7) is not None
