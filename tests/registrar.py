"""A registrar of pinned memory that only takes notes."""

import threading
import time
from functools import cache

from kvcli.memory.pinned import PinnedAllocator


class FakeRegistrar:
    """Registers in name only: up to `limit` bytes, and not before `go` is set."""

    def __init__(self, limit=1 << 30):
        self.limit, self.go = limit, threading.Event()
        self.go.set()
        self.begun = threading.Event()  # that something is being registered
        self.held, self.sizes, self.threads, self.busy = {}, [], set(), False

    def settle(self):
        self.settled = threading.current_thread()

    def register(self, address, size):
        self.begun.set()
        assert self.go.wait(10)
        if sum(self.held.values()) + size > self.limit:
            raise RuntimeError("no more")
        self.held[address] = size
        self.sizes.append(size)
        self.threads.add(threading.current_thread())

    def unregister(self, address):
        if self.busy:
            raise RuntimeError("a graph is being captured")
        del self.held[address]
        self.threads.add(threading.current_thread())


@cache
def pinned_in_name_only(device):
    """Stand in for `pinned_allocator` where there is no device."""
    return PinnedAllocator(FakeRegistrar())


def eventually(condition):
    """Wait until the worker has brought `condition` about."""
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)
