"""Work in processes of its own, within a limit of time, its results kept as they come.

What hangs, crashes or spoils its CUDA context takes nothing with it but what it had not found yet. Processes are
forked, so that what was imported need not be imported again; the parent must not have touched a device before.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Rows = list[Row]
"""Rows that belong together, since ratios are taken between them: they are kept together, or not at all."""

_ROOT = Path(__file__).parents[2]
_OWN = ("kvcli", "gpu_parts", "common", "triton_cases")
_FORK = multiprocessing.get_context("fork")


def name_of(row: Row) -> tuple[Any, ...]:
    """Return what tells a row of a part from its others."""
    return tuple(row.get(key) for key in ("case", "phase", "round", "programs"))


@dataclass(frozen=True)
class Found:
    """What was found before: the parts by name, and the rows of the part that asks, which does the rest."""

    parts: Mapping[str, Any] = field(default_factory=dict)
    own: Sequence[Row] = ()

    def has(self, *cases: str, **like: Any) -> bool:
        """Tell whether there is a row of each case that did not fail, and that has these values."""
        known = [row["case"] for row in self.own if "failed" not in row and row | like == row]
        return set(cases) <= {*known}


class NotHere(Exception):  # noqa: N818 - nothing went wrong
    """This machine cannot do it; the message says why."""


@dataclass(frozen=True)
class Ended:
    """Nothing more comes: because all is done, because it cannot be done here, or because of an `error`."""

    error: str | None = None
    not_here: bool = False


class _Child:
    """A process that sends the rows of `work`, then how it ended."""

    def __init__(self, name: str, work: Callable[[], Iterable[Rows]], limit: float):
        self.name, self.limit = name, limit
        self.deadline = time.monotonic() + limit
        self.leads = multiprocessing.parent_process() is None  # a group of its own, with what it starts itself
        self.receiver, sender = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(target=_send, args=(work, sender, self.leads))
        self.process.start()
        sender.close()

    def receive(self) -> Rows | Ended:
        """Take the next message; that there is one must be known."""
        try:
            message: Rows | Ended = self.receiver.recv()
        except EOFError:
            self.process.join()
            return Ended(f"the process died with exit code {self.process.exitcode}")
        return message

    def stop(self) -> None:
        """End the process, whatever it does, and what it has started."""
        if self.process.is_alive():
            try:
                os.killpg(self.process.pid, signal.SIGKILL) if self.leads else self.process.kill()
            except ProcessLookupError:  # it has no group yet
                self.process.kill()
        self.process.join()
        self.receiver.close()


def in_processes(
    works: Mapping[str, Callable[[], Iterable[Rows]]], limit: float, at_once: int = 1
) -> Iterator[tuple[str, Rows | Ended]]:
    """Run every work for at most `limit` seconds, `at_once` of them side by side; yields their rows and ends."""
    waiting = list(works.items())
    running: dict[Connection, _Child] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                child = _Child(*waiting.pop(0), limit)
                running[child.receiver] = child
            patience = min(child.deadline for child in running.values()) - time.monotonic()
            ready = wait(list(running), max(0.0, patience))
            for receiver, child in list(running.items()):
                if receiver in ready:
                    message = child.receive()
                elif time.monotonic() > child.deadline:
                    message = Ended(f"stopped after {child.limit:.0f} s")
                else:
                    continue
                if isinstance(message, Ended):
                    child.process.join(1 if message.error is None else 0)
                    child.stop()
                    del running[receiver]
                yield child.name, message
    finally:
        for child in running.values():
            child.stop()


def _send(work: Callable[[], Iterable[Rows]], sender: Connection, leads: bool) -> None:
    if leads:
        os.setpgid(0, 0)
    end = Ended()
    try:
        for rows in work():
            sender.send(rows)
    except NotHere as reason:
        end = Ended(str(reason), not_here=True)
    except Exception as error:
        if (package := absent(error)) is not None:
            end = Ended(f"the package {package} is not here", not_here=True)
        else:
            traceback.print_exc()
            end = Ended(describe(error))
    sys.stdout.flush()
    sender.send(end)


def absent(error: BaseException) -> str | None:
    """Name the package that an import did not find, if it is none of this repository's."""
    while isinstance(error, ModuleNotFoundError) and error.name is None and error.__cause__ is not None:
        error = error.__cause__  # transformers raises another one from it
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return package if package and package not in _OWN else None


def describe(error: BaseException) -> str:
    """One line: what was raised, and where in this repository."""
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0] if lines else ''}"
    inside = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(_ROOT)
    ]
    return f"{what} ({Path(inside[-1].filename).relative_to(_ROOT)}:{inside[-1].lineno})" if inside else what
