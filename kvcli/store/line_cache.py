"""Which lines of a file lie in which slots of host memory; of those that may leave, the least recently asked for does.

Everything is done for many lines at once, by numpy: a step asks each layer for hundreds of them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcli.store.host_memory import host_memory

Ints = NDArray[np.int64]

LINE_TABLES, SLOT_TABLES = 16, 16
"""Bytes that are known of each line, its checksum among them, and of each slot."""

_NEVER = np.iinfo(np.int64).max  # when a line was asked for that stays


class LineCache:
    """`slots` of the `lines` of a file, `memory` [slots, line_bytes] bytes; the first `kept` lines stay for good.

    A line that is being read has a slot that nothing else takes, and is found once it is `placed`.
    """

    def __init__(self, slots: int, lines: int, line_bytes: int, kept: int = 0):
        self.memory: Tensor = host_memory((slots, line_bytes), torch.uint8)
        self.kept = kept
        self._slot_of = np.full(lines, -1, dtype=np.int64)
        self._line_in = np.full(slots, -1, dtype=np.int64)
        self._asked = np.zeros(slots, dtype=np.int64)  # when, counted in calls; 0: empty
        self._calls = 0
        self._held = 0  # slots whose lines stay, or are being read
        self._oldest: Ints = np.empty(0, dtype=np.int64)  # slots that may leave, in order, unless asked for since
        self._oldest_asked: Ints = self._oldest

    @property
    def empty(self) -> int:
        """Slots that hold nothing."""
        return int((self._asked == 0).sum())

    @property
    def room(self) -> int:
        """Slots whose lines may leave."""
        return len(self._asked) - self._held

    def find(self, lines: Ints) -> Ints:
        """Say in which slots lines [n] lie, -1 for none, and note that they are asked for: [n]."""
        slots = self._slot_of[lines]
        here = slots[slots >= 0]
        self._calls += 1
        self._asked[here] = np.where(self._asked[here] == _NEVER, _NEVER, self._calls)
        return slots

    def take(self, count: int) -> Ints:
        """Free slots for so many lines, `room` at most: nothing is found in them until lines are placed."""
        assert count <= self.room
        found, wanted = [np.empty(0, dtype=np.int64)], count
        while wanted:
            if not len(self._oldest):
                self._look(wanted)
            fresh = self._asked[self._oldest] == self._oldest_asked
            at = np.flatnonzero(fresh)[:wanted]
            passed = int(at[-1]) + 1 if len(at) == wanted else len(self._oldest)
            taken = self._oldest[at]
            self._oldest, self._oldest_asked = self._oldest[passed:], self._oldest_asked[passed:]
            self._asked[taken] = _NEVER
            found.append(taken)
            wanted -= len(taken)
            self._held += len(taken)
        slots = np.concatenate(found)
        before = self._line_in[slots]
        self._slot_of[before[before >= 0]] = -1
        self._line_in[slots] = -1
        return slots

    def place(self, lines: Ints, slots: Ints) -> None:
        """Say that lines [n] lie in slots [n] that were taken for them."""
        self._calls += 1
        self._slot_of[lines], self._line_in[slots] = slots, lines
        stays = lines < self.kept
        self._asked[slots] = np.where(stays, _NEVER, self._calls)
        self._held -= int((~stays).sum())

    def keep(self, first: int, lines: Tensor) -> None:
        """Take in lines [n, line_bytes] from line `first` on, in the place of others."""
        slots = self.take(len(lines))
        self.memory[torch.from_numpy(slots)] = lines
        self.place(np.arange(first, first + len(lines)), slots)

    def give_back(self, slots: Ints) -> None:
        """Leave slots empty that were taken for lines which did not come."""
        self._asked[slots] = 0
        self._held -= len(slots)
        self._oldest = self._oldest[:0]

    def _look(self, wanted: int) -> None:
        """Find the slots that may leave next, some more than are wanted."""
        most = min(max(wanted, len(self._asked) // 16), self.room)
        among = np.argpartition(self._asked, most - 1)[:most]
        self._oldest = among[np.lexsort((among, self._asked[among]))]
        self._oldest_asked = self._asked[self._oldest]
