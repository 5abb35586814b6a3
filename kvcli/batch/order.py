"""In which order rows are run: those that begin alike together, those that take longest first."""

from __future__ import annotations

from collections.abc import Sequence

from kvcli.batch.jobs import Job, common_tokens

# Tokens of a prompt that are read in the time of a decode step, roughly: a step reads all weights for a token of each
# row, the prefill for a whole chunk. It only decides which rows come first.
_PREFILL_TOKENS_A_STEP = 32


def grouped(jobs: Sequence[Job]) -> list[list[Job]]:
    """Put rows that may have half of their tokens in common into one group, groups that take longest first.

    Within a group rows that begin alike stand side by side.
    """
    groups: list[list[Job]] = []
    for job in sorted(jobs, key=lambda job: (job.prefixes, job.line.number)):
        # What is known to be in common may be half of what is, so that a quarter is enough here; whether rows are
        # read together is decided by their tokens.
        if not (groups and 4 * common_tokens(groups[-1][0], job) >= max(groups[-1][0].tokens, job.tokens)):
            groups.append([])
        groups[-1].append(job)
    return sorted(groups, key=lambda group: -max(map(work, group)))


def work(job: Job) -> float:
    """How long a row takes at most, in decode steps."""
    return job.tokens / _PREFILL_TOKENS_A_STEP + job.sampling.max_tokens
