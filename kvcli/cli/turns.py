"""`kvcli generate --turns`: questions as the turns of one conversation."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.cli.presentation import Presentation
from kvcli.errors import usage_error

if TYPE_CHECKING:
    from kvcli.inputs.encoding import Template
    from kvcli.inputs.profiles import Profile
    from kvcli.models.loading import ModelSpec
    from kvcli.runtime.sampling import Sampling
    from kvcli.telemetry.report import Report


def check_turns(show: Presentation, given: Mapping[str, object]) -> None:
    """Refuse what a conversation is not made of: several documents, and options that are `given` by their names.

    Raises:
        KvcliError: usage.
    """
    if len({prompt.source for prompt in show.prompts}) > 1:
        raise usage_error("--turns are about one document", "name one file, or ask each in a run of its own")
    if (name := next((name for name, value in given.items() if value), None)) is not None:
        raise usage_error(f"--turns goes without {name}", f"leave {name} or --turns out")


def take_turns(
    spec: "ModelSpec",
    show: Presentation,
    profile: "Profile",
    sampling: "Sampling",
    template: "Template",
    kv: Path | None,
) -> "Report":
    """Ask one question after the other, each after the answer to the one before; Ctrl-C ends with what was said.

    Raises:
        KvcliError: the model cannot be loaded, the conversation will not fit, an answer failed.
    """
    from kvcli.chat.dialogue import Dialogue
    from kvcli.models.loading import open_checkpoint

    show.observer.stage("load")
    checkpoint = open_checkpoint(spec)
    dialogue = Dialogue(checkpoint.load(), checkpoint, profile, sampling, template, show.prompts[0].text, show.observer)
    try:
        dialogue.read(kv)
        for turn, prompt in enumerate(show.prompts):
            for piece in dialogue.ask(prompt.question):
                show.observer.stage_done()
                show.observer.text(turn, piece)
            show.observer.finished(turn)
    except KeyboardInterrupt:
        if not dialogue.exchanges:
            raise
    return dialogue.report()
