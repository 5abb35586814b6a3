"""`kvcli generate`: text from documents and questions; --turns holds a conversation, --resume continues a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli.command import command, given, hush_libraries, model_of, profile_of, read_entries, template_of
from kvcli.cli.output import check_files, demo_notice
from kvcli.cli.presentation import Presentation
from kvcli.errors import ExitCode, usage_error
from kvcli.inputs import options

if TYPE_CHECKING:
    from kvcli.inputs.prompts import FailedPrompt, Prompt
    from kvcli.models.loading import ModelSpec
    from kvcli.request import GenerationRequest
    from kvcli.telemetry.report import Report

_WITH_RESUME = {"resume", "every", "model", "output", "trace", "json", "quiet", "verbose", "timeline", "stats", "debug"}


@options.group
class Resume:
    """A run to continue."""

    directory: Path | None = options.GOING_ON(
        None, "--resume", "DIR", "Continue a run of --checkpoint with its own prompts, model, method and sampling."
    )


@command
def generate(
    context: typer.Context,
    asked: options.Input,
    template: options.Template,
    kv: options.KVOptions,
    model: options.ModelOptions,
    method: options.MethodOptions,
    disk: options.DiskOptions | None,
    sampling: options.Sampling,
    keep: options.Keep | None,
    resume: Resume,
    tracing: options.Tracing,
    stepping: options.Stepping,
    output: Annotated[
        options.Output,
        options.Some(
            "stats json output quiet verbose debug",
            quiet={"help": "Show only the text: no progress, notes or statistics."},
        ),
    ],
) -> None:
    """Generate text from long documents.

    kvcli generate report.txt -p "Who signed it?" --method freekv --budget 2K

    Text goes to stdout as it is generated, everything else to stderr. Environment
    variables set options: KVCLI_MODEL, KVCLI_MAX_TOKENS, and so on.

    Exit codes: 0 done, 1 failed, 2 usage, 3 will not fit in memory, 4 some prompts
    failed, 130 interrupted (143 by SIGTERM, 129 by SIGHUP), 141 stdout was closed.
    """
    if resume.directory is not None:
        hush_libraries(output.verbose)
        raise typer.Exit(_go_on(context, resume.directory, model, tracing, output))
    model, taken = model_of(model, kv.use)
    documents = [*asked.files, *([asked.questions] if asked.questions is not None else ())]
    check_files(
        {"-o": output.output, "--trace": tracing.trace}, model, documents, [method.profile], settings=method.settings
    )
    entries = read_entries(asked, kv.use)
    hush_libraries(output.verbose)
    template = template_of(context, template, kv.use)
    chosen = profile_of(context, method)

    from kvcli.generate import generate as run
    from kvcli.request import GenerationRequest
    from kvcli.telemetry.timeline import Timeline, chrome_trace

    show = Presentation(entries, sampling.num_samples, tracing, output)
    if asked.turns:
        beside = {
            "--num-samples": sampling.num_samples > 1,
            "--audit": stepping.audit,
            "--lossless": stepping.lossless,
            "--trace": tracing.trace,
            "--checkpoint": keep,
            "--kv-disk": disk,
            "--save-kv": kv.save,
            "--kv-cache": given(context, ["kv_cache"]),
            "--question-first": asked.question_first != "no",
        }
        if len({prompt.source for prompt in show.prompts}) > 1:
            raise usage_error("--turns takes one document", "name one file, or run kvcli for each")
        if (name := next((name for name, value in beside.items() if value), None)) is not None:
            raise usage_error(f"--turns does not work with {name}", f"leave {name} or --turns out")
    if model.model is None:
        show.observer.notice(demo_notice(asked.files))
    if taken is not None:
        show.observer.notice(taken)
    if sampling.alike is not None:
        show.observer.notice(sampling.alike)
    request = GenerationRequest(
        chosen, tuple(show.prompts), sampling, template, keep=keep, kv=kv, disk=disk, **vars(stepping)
    )
    spans = Timeline(tracing.trace is not None)
    with show.abandoned_on_error():
        if asked.turns:
            report = _take_turns(model.spec(), request, show)
        else:
            report = run(model.spec(), request, show.observer, spans, context.obj)
    raise typer.Exit(show.conclude(report, lambda: chrome_trace({"kvcli": spans.spans})))


def _take_turns(spec: ModelSpec, request: GenerationRequest, show: Presentation) -> Report:
    """Ask the questions in turn, each after the previous answer; Ctrl-C ends the conversation and keeps what was said.

    Raises:
        KvcliError: the model cannot be loaded, the conversation will not fit, or an answer failed.
    """
    from kvcli.chat import Dialogue
    from kvcli.models.loading import open_checkpoint

    show.observer.stage("load")
    checkpoint = open_checkpoint(spec)
    settings = (request.profile, request.sampling, request.template, show.prompts[0].text, show.observer)
    dialogue = Dialogue(checkpoint.load(), checkpoint, *settings)
    try:
        dialogue.read(request.kv.use)
        for turn, prompt in enumerate(show.prompts):
            for piece in dialogue.ask(prompt.question):
                show.observer.stage_done()
                show.observer.text(turn, piece)
            show.observer.finished(turn)
    except KeyboardInterrupt:
        if not dialogue.exchanges:
            raise
    return dialogue.report()


def _go_on(
    context: typer.Context,
    directory: Path,
    model: options.ModelOptions,
    tracing: options.Tracing,
    output: options.Output,
) -> ExitCode:
    """Continue the run in `directory` and show its text from the beginning.

    Raises:
        KvcliError: an option contradicts what the run has already settled (usage); otherwise as
            `kvcli.generate.resume`.
    """
    if other := given(context, sorted(context.params.keys() - _WITH_RESUME)):
        names = {parameter.name: parameter for parameter in context.command.params}
        name = names[other[0]].opts[0] if names[other[0]].opts else other[0]
        shown = name if name.startswith("-") else "FILE"
        raise usage_error(f"{shown} cannot be given with --resume, which takes it from {directory}", "leave it out")
    moved = model.model if given(context, ["model"]) else None
    check_files({"-o": output.output, "--trace": tracing.trace}, options.ModelOptions(moved, load_format="dummy"))

    from kvcli.generate import resume
    from kvcli.runtime.checkpoint.kept_run import KeptRun
    from kvcli.telemetry.timeline import Timeline, chrome_trace

    kept = KeptRun.open(options.Keep(directory, context.params["every"]))
    entries: list[Prompt | FailedPrompt] = [each.prompt for each in kept.prompts if each.prompt is not None]
    show = Presentation(entries, kept.sampling.num_samples, tracing, output)
    spans = Timeline(tracing.trace is not None)
    with show.abandoned_on_error():
        report = resume(kept, show.observer, spans, model=moved)
    return show.conclude(report, lambda: chrome_trace({"kvcli": spans.spans}))
