"""What a run tells while it goes on. The base class ignores everything; the console shows it."""


class Observer:
    """Callbacks of one run, called on the host, never from inside a decode step.

    A sequence is named by its index in the report. No callback may change the run; an exception it raises ends the run.
    """

    def stage(self, name: str, total: int | None = None) -> None:
        """Begin a stage such as "load" or "prefill" of `total` units (None: unknown); the stage before it ends."""

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
        """Take what was asked for and is not done, though the run goes on, one line; it is no note to be left out."""
        self.notice(message)

    def step(self, done: int, total: int) -> None:
        """Note that decode step `done` of at most `total` has ended."""
