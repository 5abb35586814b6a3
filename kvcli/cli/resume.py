"""`kvcli generate --resume`: a run that was kept in a directory goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from kvcli.cli.options import given
from kvcli.cli.presentation import Presentation
from kvcli.cli.reads import check_files
from kvcli.errors import ExitCode, usage_error

_OWN = {"resume", "every", "model", "output", "trace", "as_json", "quiet", "verbose", "timeline", "stats", "debug"}


def resume_run(
    context: typer.Context,
    directory: Path,
    every: int,
    model: str | None,
    output: Path | None,
    trace: Path | None,
    **shown: Any,
) -> ExitCode:
    """Go on with the run in `directory`, shown as `Presentation` says; the text comes from its beginning.

    Raises:
        KvcliError: an option says what the run has settled already (usage); as `kvcli.generate.resume` does.
    """
    if other := given(context, sorted(context.params.keys() - _OWN)):
        names = {parameter.name: parameter for parameter in context.command.params}
        name = names[other[0]].opts[0] if names[other[0]].opts else other[0]
        shown_as = name if name.startswith("-") else "FILE"
        raise usage_error(f"{shown_as} does not go with --resume, which takes it from {directory}", "leave it out")
    named = {"model": model} if given(context, ["model"]) else {"model": None}
    check_files({"-o": output, "--trace": trace}, **named)

    from kvcli.generate import resume
    from kvcli.runtime.checkpoint.kept_run import Keep, KeptRun
    from kvcli.telemetry.timeline import Timeline, chrome_trace

    kept = KeptRun.open(Keep(directory, every))
    prompts = [prompt.prompt for prompt in kept.prompts if prompt.prompt is not None]
    show = Presentation(prompts, kept.sampling.num_samples, output, trace=trace, **shown)
    spans = Timeline(trace is not None)
    try:
        report = resume(kept, show.observer, spans, **named)
    except BaseException:
        show.abandon()
        raise
    return show.conclude(report, lambda: chrome_trace({"kvcli": spans.spans}))
