"""Callbacks of a run, and the progress of a batch. The console shows both."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Observer:
    """Callbacks of one run, called on the host; here they do nothing.

    None is called from inside a decode step but `notice`, where loops are compiled in it.

    A sequence is named by its index in the report. No callback may change the run; an exception it raises ends the run.
    """

    def stage(self, name: str, total: int | None = None) -> None:
        """Begin a stage such as "load" or "prefill" of `total` units (None: unknown); the stage before it ends."""

    def document(self, number: int, total: int) -> None:
        """Begin to read document `number`, from 1, of `total`."""

    def advance(self, amount: int = 1) -> None:
        """Finish `amount` more units of the current stage."""

    def stage_done(self) -> None:
        """End the current stage."""

    def text(self, sequence: int, piece: str) -> None:
        """Take the next piece of text of `sequence`; pieces of several sequences interleave."""

    def finished(self, sequence: int) -> None:
        """No more text of `sequence` will come."""

    def notice(self, message: str) -> None:
        """Take a warning or note that the user should read, one line."""

    def failure(self, message: str) -> None:
        """Take a message that a request was not fulfilled, though the run goes on, one line; never to be left out."""
        self.notice(message)

    def step(self, done: int, total: int) -> None:
        """Note that decode step `done` of at most `total` has ended."""


class Progress(BaseModel):
    """A batch at one moment. The names are a contract with readers of `--log-json` and of `batch status --json`.

    Rows: `total` of the batch or its shard, `earlier` in the file already (`earlier_failed` of them failed), `done` and
    `failed` by this run (a failed one is not done), `in_flight`. Seconds: since the run began, and those of prefill and
    decode steps within; `left_seconds` is estimated, None before there is a basis for that. Of streamed weights
    `weight_bytes` were loaded; of experts that routers chose, `experts_cached` of `experts_asked` were in memory.
    """

    model_config = ConfigDict(frozen=True)

    total: int
    earlier: int = 0
    earlier_failed: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    weight_bytes: int = 0
    weight_wait_seconds: float = 0.0
    experts_asked: int = 0
    experts_cached: int = 0
    left_seconds: float | None = None
    output_tokens_per_second: float = 0.0
    time: float = 0.0

    @property
    def ended(self) -> int:
        """Rows that have a result."""
        return self.earlier + self.done + self.failed
