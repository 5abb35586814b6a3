"""All rows of a batch before any is run: their names, keys, lengths and problems."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from kvcli.batch.results import Key, shown
from kvcli.batch.rows import Row, RowProblem, digest_of, parse_row
from kvcli.batch.source import Line, RowSource
from kvcli.capacity import memory
from kvcli.capacity.memory import Need
from kvcli.errors import KvcliError, usage_error
from kvcli.inputs.encoding import EncodedPrompt, encode, encode_question, refuse_unembedded, render_chat_template
from kvcli.inputs.options import Sampling, Template
from kvcli.inputs.profiles import Profile
from kvcli.memory.disk_tier import DiskTier
from kvcli.models.loading import Checkpoint, fingerprint, text_fingerprint

_BEGINNING = 1024  # characters of a text by which documents are told apart before there are tokens
_FIRST_PREFIX = 64  # tokens; each further prefix is twice as long


@dataclass(frozen=True)
class Job:
    """One row: its place, its name, its `problem` if it has one, and once measured its length.

    `size` is the length of its text in characters, and `document` hashes the text's beginning. `prefixes` are hashes of
    its first 64, 128, 256 tokens and so on, which show how much rows have in common.
    """

    line: Line
    custom_id: str
    digest: str
    sampling: Sampling
    problem: RowProblem | None = None
    size: int = 0
    document: int = 0
    tokens: int = 0
    prefixes: tuple[int, ...] = ()
    asked: bool = False
    """Whether there is a question on a document."""

    @property
    def capacity(self) -> int:
        """Tokens of prompt and output."""
        return self.tokens + self.sampling.max_tokens


@dataclass(frozen=True)
class Inputs:
    """Rows as the command line has them read: its sampling, question and template."""

    source: RowSource
    sampling: Sampling
    template: Template
    question: str | None = None

    def row(self, job: Job) -> Row:
        """Read the row of a job again.

        Raises:
            RowProblem: it has changed.
        """
        row = parse_row(job.line.number, self.source.read(job.line), self.sampling, self.question, self.source.folder)
        if row.digest != job.digest:
            raise RowProblem("row_changed", "the row or its document changed after the check")
        return row


def read_jobs(inputs: Inputs) -> list[Job]:
    """Read all rows; those that cannot be run have a problem.

    Raises:
        KvcliError: two rows have one name (usage), with the lines of both.
    """
    jobs: dict[str, Job] = {}
    twice: list[str] = []
    for line, data in inputs.source.lines():
        job = _job(inputs, line, data)
        if (first := jobs.setdefault(job.custom_id, job)) is not job:
            twice.append(f"{job.custom_id!r} in lines {first.line.number:,} and {line.number:,}")
    if twice:
        more = f"; {len(twice) - 20:,} more" if len(twice) > 20 else ""
        what = f"{inputs.source.name}: duplicate custom_id: {'; '.join(twice[:20])}{more}"
        raise usage_error(what, "give each row a custom_id of its own")
    if not jobs:
        raise usage_error(f"{inputs.source.name}: no rows", "write one line per prompt")
    return list(jobs.values())


def _job(inputs: Inputs, line: Line, data: bytes) -> Job:
    try:
        row = parse_row(line.number, data, inputs.sampling, inputs.question, inputs.source.folder)
    except RowProblem as problem:
        return Job(line, problem.custom_id, problem.digest, inputs.sampling, problem)
    text = row.prompt.text
    document = int(digest_of(text[:_BEGINNING]), 16)
    asked = bool(row.prompt.question)
    return Job(line, row.custom_id, row.digest, row.sampling, size=len(text), document=document, asked=asked)


@dataclass(frozen=True)
class Rules:
    """The conditions of rows: the method, the model, how texts become tokens, and the disk for KV beyond memory."""

    profile: Profile
    checkpoint: Checkpoint
    inputs: Inputs
    disk: DiskTier | None = None

    def key(self, job: Job) -> Key:
        """Return the key of the job's result."""
        template = {} if job.problem else {"template": asdict(self.inputs.template), "question": self.inputs.question}
        sampling = asdict(job.sampling)
        if job.sampling.repetition_penalty == 1:
            del sampling["repetition_penalty"]  # as in the keys of results from before there was one
        return Key(
            row=job.digest,
            profile=self.profile.hash,
            model=self.model,
            tokenizer=self.tokenizer,
            sampling=digest_of({**sampling, **template}),
        )

    @cached_property
    def model(self) -> str:
        """The model's fingerprint and dtype."""
        return f"{fingerprint(self.checkpoint)} {str(self.checkpoint.dtype).removeprefix('torch.')}"

    @cached_property
    def tokenizer(self) -> str:
        """The fingerprint of the tokenizer, its template and the tokens that end a text."""
        return text_fingerprint(self.checkpoint)

    def encode(self, row: Row) -> EncodedPrompt:
        """Encode a row into tokens.

        Raises:
            RowProblem: the chat template refuses it, or it has no tokens.
        """
        tokenizer, template = self.checkpoint.tokenizer, self.inputs.template
        try:
            if row.conversation:
                if template.raw or tokenizer.chat_template is None:
                    why = "--raw skips it" if template.raw else "the tokenizer has none"
                    raise usage_error(f"messages need a chat template, but {why}")
                said: Sequence[dict[str, str]] = row.conversation
                if template.system is not None and said[0]["role"] not in ("system", "developer"):
                    said = [{"role": "system", "content": template.system}, *said]
                text = render_chat_template(tokenizer, said, template.kwargs)
                ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            else:
                ids = encode(row.prompt, Template(raw=True) if row.plain else template, tokenizer)
            refuse_unembedded(ids, self.checkpoint, row.custom_id)
        except KvcliError as error:
            raise RowProblem("invalid_row", error.what) from None
        return EncodedPrompt(
            row.custom_id, ids, encode_question(row.prompt, tokenizer), prompt=row.prompt, sampling=row.sampling
        )

    def measured(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Yield jobs with their lengths; those too long for the model or this machine have that as their problem."""
        limits = Limits(self.profile, self.checkpoint, self.disk)
        for job in jobs:
            if job.problem is not None:
                yield job
                continue
            try:
                ids = self.encode(self.inputs.row(job)).ids
                measured = replace(job, tokens=len(ids), prefixes=prefixes(ids))
                limits.check(measured)
            except RowProblem as problem:
                yield replace(job, problem=problem)
            else:
                yield measured


class Limits:
    """The limits of a row's length: the positions of the model, and the memory of this machine."""

    def __init__(self, profile: Profile, checkpoint: Checkpoint, disk: DiskTier | None = None):
        self.profile, self.checkpoint, self.disk = profile, checkpoint, disk
        self.free = memory.available(checkpoint.place)
        self._held: dict[tuple[int, int], int] = {}  # most tokens known to fit, by max_tokens and samples
        by_windows = memory.reads_by_windows(profile, checkpoint)
        self.positions = None if by_windows else checkpoint.geometry.max_positions

    def check(self, job: Job) -> None:
        """Refuse a job that cannot be run even alone.

        Raises:
            RowProblem: it has more tokens than positions, or needs more memory than is free; a budget that is a share
                of the prompt is too small for the method.
        """
        try:
            self.profile.for_prompt(job.tokens)
        except KvcliError as error:
            raise RowProblem("invalid_row", error.what) from None
        if self.positions is not None and job.capacity > self.positions:
            raise RowProblem(
                "context_length_exceeded",
                f"{job.tokens:,} tokens of prompt and {job.sampling.max_tokens:,} of output exceed the "
                f"{self.positions:,} positions of {self.checkpoint.name}",
            )
        size = job.sampling.max_tokens, job.sampling.num_samples
        if job.tokens <= self._held.get(size, 0):
            return
        try:
            needed = self.need(job).on(self.checkpoint.place)
        except KvcliError as error:
            raise RowProblem("out_of_memory", error.what) from None
        if not memory.fits(needed, self.free):
            pool = next(name for name, size in needed.items() if size > self.free[name])
            raise RowProblem(
                "out_of_memory",
                f"{job.tokens:,} tokens of prompt and {job.sampling.max_tokens:,} of output need "
                f"{needed[pool]:,} bytes of {pool} memory, but {self.free[pool]:,} are free",
            )
        self._held[size] = job.tokens

    def need(self, job: Job) -> Need:
        """Add up the memory that a job needs alone."""
        checkpoint, sampling = self.checkpoint, job.sampling
        return memory.need(
            self.profile,
            checkpoint.geometry,
            checkpoint.dtype,
            [job.tokens],
            sampling.max_tokens,
            sampling.num_samples,
            device=checkpoint.place,
            disk=self.disk,
        )


def prefixes(ids: Sequence[int]) -> tuple[int, ...]:
    """Hash the first 64, 128, 256 tokens and so on, as far as a prompt goes."""
    digest, found, done = hashlib.blake2b(digest_size=8), [], 0
    size = _FIRST_PREFIX
    while size <= len(ids):
        digest.update(array("q", ids[done:size]).tobytes())
        found.append(int.from_bytes(digest.copy().digest()))
        done, size = size, 2 * size
    return tuple(found)


def common_tokens(one: Job, other: Job) -> int:
    """Return a lower bound, at least half, of the tokens that two prompts begin with in common."""
    same = 0
    for mine, theirs in zip(one.prefixes, other.prefixes, strict=False):
        if mine != theirs:
            break
        same += 1
    return _FIRST_PREFIX << same - 1 if same else 0


def refuse_changes(changed: dict[str, list[str]], strangers: list[str], output: object) -> None:
    """Refuse results of other rows than the batch's: `changed` parts by row, and `strangers`.

    Raises:
        KvcliError: names them (usage).
    """
    if changed:
        parts = sorted({part for differing in changed.values() for part in differing})
        differ = " and ".join(parts)
        what = f"{output} has results for {len(changed):,} rows whose {differ} changed: {shown([*changed])}"
        raise usage_error(what, "repeat the earlier options, or redo these rows with --overwrite")
    if strangers:
        what = f"{output} has results for {len(strangers):,} rows that are not in the batch: {shown(strangers)}"
        raise usage_error(what, "give -o another file, or remove them with --overwrite")
