"""A row while it runs, rows that are read together, and what is said of one that failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcli.batch.jobs import Job
from kvcli.batch.rows import Row, RowProblem
from kvcli.capacity.workspace import Workspace
from kvcli.errors import ExitCode, KvcliError, is_out_of_memory
from kvcli.inputs.encoding import EncodedPrompt
from kvcli.memory.tiers import Footprint
from kvcli.runtime.sequence import RunningSequence


@dataclass
class Flight:
    """A row that is read or decoded: its tokens until they have been read, and then its samples."""

    job: Job
    row: Row
    prompt: EncodedPrompt | None
    samples: list[RunningSequence] = field(default_factory=list)


@dataclass
class Part:
    """Rows that are read together; their memory is given back when the last of them has ended."""

    flights: list[Flight]
    alone: bool
    kv: Footprint
    workspace: Workspace


class Alone(list[Job]):
    """A group of one row that is run while no other is."""


def problem_of(error: Exception) -> RowProblem:
    """Say what is wrong with a row that an error hit while it was alone."""
    text = " ".join(str(error).split())[:500]
    if is_out_of_memory(error) or (isinstance(error, KvcliError) and error.exit_code == ExitCode.WILL_NOT_FIT):
        return RowProblem("out_of_memory", f"out of memory: {text}" if text else "out of memory")
    return RowProblem("failed", text if isinstance(error, KvcliError) else f"{type(error).__name__}: {text}")
