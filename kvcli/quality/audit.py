"""Auditing a generation: every so many steps a sequence is compared with full attention on what it has written.

The reference (`kvcli.quality.fidelity`) reads the prompt along with the sequence's method, and before each step that is
looked at, as one window, what the sequence has written since. It takes a full KV cache on the device for every
sequence.
"""

from collections.abc import Iterable
from typing import Any

from kvcli.methods.contract import AnyMethod
from kvcli.quality.fidelity import FidelityProbe
from kvcli.runtime.engine import Engine
from kvcli.runtime.sequence import RunningSequence


class Audit:
    """Watches one sequence; `before` and `after` are to be called around each decode step of its batch."""

    def __init__(self, engine: Engine, sequence: RunningSequence, every: int):
        assert sequence.reference is not None
        self.engine, self.sequence, self.every = engine, sequence, every
        self.reference: AnyMethod = sequence.reference
        self.probe = FidelityProbe(self.reference)
        self.probe.looking = False
        self.known = 0  # tokens of the sequence that the reference has read
        sequence.method.context.attention_observer = self.probe

    @property
    def steps(self) -> int:
        """Decode steps that the sequence has done."""
        return len(self.sequence.token_ids) - 1

    def before(self) -> None:
        """Bring the reference up to date if the next step is to be looked at."""
        self.probe.looking = self.sequence.running and self.steps % self.every == 0
        if self.probe.looking:
            (self.expected,) = self.engine.extend(self.sequence.token_ids[self.known :], self.reference)
            self.known = len(self.sequence.token_ids)

    def after(self) -> None:
        """Compare what both runs say next."""
        if self.probe.looking and self.sequence.logits is not None:
            self.probe.fidelity.note_step(self.steps - 1, self.expected, self.sequence.logits)

    def summary(self) -> dict[str, Any]:
        """Plain data for the report."""
        found = self.probe.fidelity.summary()
        kv = self.reference.footprint()
        return {"every": self.every, "reference_kv_bytes": kv.device + kv.host, **found} if found else {}


def prepare(audits: Iterable[Audit]) -> None:
    """Call `Audit.before` of all."""
    for audit in audits:
        audit.before()


def conclude(audits: Iterable[Audit]) -> None:
    """Call `Audit.after` of all."""
    for audit in audits:
        audit.after()
