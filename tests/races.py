"""Happens-before over the streams of a step: two that touch the same bytes, one of them writing, have to be ordered.

Steps run on a CPU in the order in which they are given, by the Triton kernels under their interpreter, so that every
address that a kernel loads from or stores to is known; so are those of torch's operations. What is ordered is what the
streams say by events, as CUDA would: a vector clock for each of them. Memory is reused as torch's allocator does it: by
the stream that it was allocated in, as soon as nobody holds it.
"""

import weakref
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import interpreted
import numpy as np
import torch
import triton.runtime.interpreter as interpreter
from kernel_modules import kernel_modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MOST_STREAMS = 5
PAGE = 12  # bits of an address within a page of the shadow


class FakeStream:
    """A stream that knows what happened before: `clock` [streams], its own work counted at `index`."""

    def __init__(self, index, name):
        self.index, self.name = index, name
        self.clock = np.zeros(MOST_STREAMS, dtype=np.int64)

    def record_event(self):
        return self.clock.copy()

    def wait_event(self, event):
        np.maximum(self.clock, event, out=self.clock)

    def wait_stream(self, other):
        self.wait_event(other.clock)


class Races(TorchDispatchMode):
    """Watches work while it is entered; `found` is what was not in order, each in a few words."""

    def __init__(self, monkeypatch, constants=()):
        super().__init__()
        self.found, self.accesses, self.watching = set(), 0, False
        self.streams = [FakeStream(0, "main")]
        self.current = [self.streams[0]]
        self.names = defaultdict(dict)  # stream -> its work by number
        self.shadow = {}  # page -> the last read and write of each address by each stream, [2, streams, addresses]
        self.born, self.used = {}, {}  # storage -> the stream that allocated it; its last use by every stream
        self.constants = {x.untyped_storage().data_ptr() for x in constants}  # which nobody writes
        self.touched = None  # [loads, stores] of the kernel that runs
        interpreted.few_programs(monkeypatch)
        interpreted.overflow_is_not_looked_for(monkeypatch)
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current[-1])
        monkeypatch.setattr(torch.cuda, "stream", self._in_stream)
        native = interpreter._interpreter
        stand_in = SimpleNamespace(**{name: getattr(native, name) for name in dir(native) if name[0] != "_"})
        stand_in.load = lambda at, mask, *rest: self._note(0, at, mask) or native.load(at, mask, *rest)
        stand_in.store = lambda at, value, mask: self._note(1, at, mask) or native.store(at, value, mask)
        stand_in.atomic_rmw = lambda op, at, value, mask, order: (
            self._note(2, at, mask) or native.atomic_rmw(op, at, value, mask, order)
        )
        monkeypatch.setattr(interpreter, "_interpreter", stand_in)
        for module in kernel_modules():
            if hasattr(module, "launch"):
                monkeypatch.setattr(module, "launch", self._launched(module.launch))

    def __enter__(self):
        self.watching = True
        return super().__enter__()

    def __exit__(self, *args):
        self.watching = False
        return super().__exit__(*args)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.touched is not None:  # the interpreter's own
            return out
        written = [
            x
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in _tensors(value)
        ] + [x for name, x in (kwargs or {}).items() if name == "out"]
        read, made = _tensors((args, kwargs)), _tensors(out)
        known = {x.untyped_storage().data_ptr() for x in read}
        new = [x for x in made if x.untyped_storage().data_ptr() not in known]
        if func is torch.ops.aten.lift_fresh.default:  # a number of the host's
            self._allocated(out.untyped_storage())
        for x in new:
            self._allocated(x.untyped_storage())
        if written or new:  # all else looks at its input in another way
            self._happened(func.overloadpacket.__name__, read, written + ([] if _empty(func) else new))
        return out

    def _new_stream(self, device, priority=0):
        self.streams.append(FakeStream(len(self.streams), f"stream {len(self.streams)}"))
        return self.streams[-1]

    @contextmanager
    def _in_stream(self, stream):
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def _launched(self, launch):
        def launch_watched(kernel, *args, **constants):
            if not self.watching:
                return launch(kernel, *args, **constants)
            self.touched = [], [], []
            launch(kernel, *args, **constants)
            (loads, stores, atomics), self.touched = self.touched, None
            self._tick(kernel.__name__)
            self._check(0, _together(loads))
            self._check(1, _together([*stores, *atomics]))
            for x in _tensors(args):
                self._use(x)
            return None

        return launch_watched

    def _note(self, kind, at, mask):
        if self.touched is not None:
            self.touched[kind].append(at[mask] if mask.shape == at.shape else at[np.broadcast_to(mask, at.shape)])

    def _happened(self, name, read, written):
        self._tick(name)
        for kind, tensors in enumerate((read, written)):
            for x in tensors:
                if x.untyped_storage().data_ptr() not in self.constants:
                    self._check(kind, _addresses(x))
                    self._use(x)

    def _tick(self, name):
        stream = self.current[-1]
        stream.clock[stream.index] += 1
        self.names[stream.index][int(stream.clock[stream.index])] = name

    def _check(self, kind, addresses):
        """Look up who was at these addresses, and say that this stream was: 0 to read, 1 to write."""
        me = self.current[-1]
        self.accesses += len(addresses)
        pages = addresses >> PAGE
        for page in np.unique(pages):
            at = addresses[pages == page] & ((1 << PAGE) - 1)
            last = self._page(page)
            for before in range(1 - kind, 2):  # who writes minds readers, too
                late = last[before][:, at] > me.clock[:, None]
                for stream in np.flatnonzero(late.any(1)):
                    done = self.names[stream][int(last[before][stream, at].max())]
                    verbs = ("reads", "writes")
                    self.found.add(
                        f"{self.names[me.index][int(me.clock[me.index])]} {verbs[kind]} in {me.name} what {done} "
                        f"{verbs[before]} in {self.streams[stream].name}"
                    )
            last[kind][me.index, at] = me.clock[me.index]

    def _page(self, page):
        if page not in self.shadow:
            self.shadow[page] = np.zeros((2, MOST_STREAMS, 1 << PAGE), dtype=np.int64)
        return self.shadow[page]

    def _use(self, x):
        storage = x.untyped_storage().data_ptr()
        if storage in self.used:
            stream = self.current[-1]
            self.used[storage][stream.index] = stream.clock[stream.index]

    def _allocated(self, storage):
        """Forget what was at these addresses, which the allocator vouches for."""
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for page in range(start >> PAGE, (stop >> PAGE) + 1):
            if page in self.shadow:
                base = page << PAGE
                self.shadow[page][:, :, max(0, start - base) : max(0, stop - base)] = 0
        self.born[start], self.used[start] = self.current[-1], np.zeros(MOST_STREAMS, dtype=np.int64)
        weakref.finalize(storage, self._freed, start)

    def _freed(self, start):
        """Who allocated it may have it again at once: nobody else may be at it."""
        owner, used = self.born.pop(start, None), self.used.pop(start, None)
        if owner is None or not self.watching:
            return
        for stream in np.flatnonzero(used > owner.clock):
            if stream != owner.index:
                done = self.names[stream][int(used[stream])]
                self.found.add(f"freed in {owner.name} while {done} uses it in {self.streams[stream].name}")


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.numel()]


def _empty(func):
    return func.overloadpacket.__name__ in {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def _addresses(x):
    at = np.zeros(1, dtype=np.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        at = (at[:, None] + np.arange(size if stride else 1) * stride).reshape(-1)
    return x.data_ptr() + at * x.element_size()


def _together(parts):
    return (
        np.unique(np.concatenate([part.astype(np.int64).reshape(-1) for part in parts])) if parts else np.zeros(0, int)
    )
