"""The order of rows: rows that begin alike together, the longest work first; and their shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from kvcli.batch.jobs import Job, common_tokens
from kvcli.errors import usage_error

# Tokens of a prompt that are read in the time of a decode step, roughly: a step reads all weights for one token of each
# row, the prefill for a whole chunk. It only decides which rows come first.
_PREFILL_TOKENS_A_STEP = 32

TOGETHER = 64
"""Most rows that are read together."""


def grouped(jobs: Sequence[Job]) -> list[list[Job]]:
    """Put rows that may have half of their tokens in common into groups of at most `TOGETHER`, longest work first.

    Within a group, rows that begin alike follow each other.
    """
    groups: list[list[Job]] = []
    for job in sorted(jobs, key=lambda job: (job.prefixes, job.line.number)):
        # The known common part may be half of the real one, so a quarter is enough here; the tokens decide later
        # whether rows are read together.
        first = groups[-1][0] if groups and len(groups[-1]) < TOGETHER else None
        if first is None or 4 * common_tokens(first, job) < max(first.tokens, job.tokens):
            groups.append([])
        groups[-1].append(job)
    return sorted(groups, key=lambda group: -max(map(work, group)))


def work(job: Job) -> float:
    """Return how long a row takes at most, in decode steps."""
    return job.tokens / _PREFILL_TOKENS_A_STEP + job.sampling.max_tokens


@dataclass(frozen=True, order=True)
class Shard:
    """Part `number` of `count`, from 1 on."""

    number: int
    count: int

    @classmethod
    def named(cls, text: str, environment: Mapping[str, str]) -> Shard:
        """Parse "I/N" with I from 1 on, or "slurm": both from the variables of a job array.

        Raises:
            KvcliError: it is neither, or there are no such variables (usage).
        """
        if text == "slurm":
            values = (environment.get(f"SLURM_ARRAY_TASK_{name}", "") for name in ("ID", "MIN", "STEP", "COUNT"))
            pairs = zip(values, (-1, 0, 1, 0), strict=True)
            task, first, step, count = (int(value) if value.isdecimal() else default for value, default in pairs)
            if task < 0 or count < 1:
                what = "--shard slurm: SLURM_ARRAY_TASK_ID and SLURM_ARRAY_TASK_COUNT are not set"
                raise usage_error(what, "submit with sbatch --array=1-N, or give --shard I/N")
            return cls((task - first) // step + 1, count)
        part, slash, whole = text.partition("/")
        if not (slash and part.isdecimal() and whole.isdecimal() and 1 <= int(part) <= int(whole)):
            raise usage_error(f"--shard {text!r} is not I/N", "count from 1: --shard 1/4 to --shard 4/4")
        return cls(int(part), int(whole))

    def of(self, output: Path) -> Path:
        """Name the file of this shard's results."""
        return output.with_name(f"{output.stem}.{self.number}-of-{self.count}{output.suffix}")

    def jobs(self, jobs: Sequence[Job]) -> list[Job]:
        """Choose this shard's rows: texts that begin alike stay together, and shards get about the same amount to read.

        The choice depends only on the rows, so that all shards agree.
        """
        rows: dict[int, list[Job]] = {}
        for job in jobs:
            rows.setdefault(job.document, []).append(job)
        most = _size(jobs) / self.count
        pieces = sorted((piece for alike in rows.values() for piece in _pieces(alike, most)), key=lambda p: -_size(p))
        loads = [(0, shard) for shard in range(self.count)]
        chosen = []
        for piece in pieces:
            load, shard = heappop(loads)
            heappush(loads, (load + _size(piece), shard))
            if shard == self.number - 1:
                chosen += piece
        return sorted(chosen, key=lambda job: job.line.number)


def _pieces(jobs: Sequence[Job], most: float) -> Iterator[list[Job]]:
    """Cut rows into pieces of no more text than a shard is to have."""
    piece: list[Job] = []
    size = 0
    for job in jobs:
        size += _size([job])
        if piece and size > most:
            yield piece
            piece, size = [], _size([job])
        piece.append(job)
    yield piece


def _size(jobs: Sequence[Job]) -> int:
    return sum(job.size + 1 for job in jobs)
