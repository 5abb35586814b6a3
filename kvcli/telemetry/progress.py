"""How far a batch has come, as data."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Progress(BaseModel):
    """A batch at one moment. The names are a contract with readers of `--log-json` and of `batch status --json`.

    Rows: `total` of the batch or its shard, `earlier` in the file already (`earlier_failed` of them failed), `done` and
    `failed` by this run (a failed one is not done), `in_flight`. Seconds: since the run began, and those of prefill and
    decode steps within; `left` is estimated, None before there is something to go by.
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
    left_seconds: float | None = None
    output_tokens_per_second: float = 0.0
    time: float = 0.0

    @property
    def ended(self) -> int:
        """Rows that have a result."""
        return self.earlier + self.done + self.failed
